"""Where messages have no tags, as in NCCL, every order of work still pairs them rightly.

NCCL needs a GPU for each rank. So gloo is made as strict as NCCL is: the n-th message that a rank posts for another is
the n-th that the other posts from it, whatever they hold.
"""

from collections import Counter
from dataclasses import replace

import pytest
import torch.distributed as dist

from tests.engine import jobs
from tests.engine.systems import GRID, ORDERS, RANKS, Case
from tests.engine.test_equality import alone, hold
from trainplan.bench.pool import pool
from trainplan.engine import transport
from trainplan.program.lower import backend

# Of every order of work on 2, 3 and 4 ranks, the one on most: it has all the messages that the others have.
ORDERED = [
    case
    for case in ORDERS
    if case.model in ("tied", "gpt") and case.optimizer == "sgd" and not case.fields
    if case not in GRID or case.plan.pp == max(RANKS)
]


class InOrder(transport.Gloo):
    """gloo without tags: messages are numbered at either end."""

    def __init__(self, device) -> None:
        super().__init__(device)
        self.numbers: Counter[tuple[int, int]] = Counter()

    def number(self, link: tuple[int, int], tensors: int) -> int:
        self.numbers[link] += tensors
        return self.numbers[link] - tensors

    def send(self, tensors, to, tag, op=-1):
        return super().send(tensors, to, self.number((dist.get_rank(), to), len(tensors)), op)

    def receive(self, forms, source, tag):
        return super().receive(forms, source, self.number((source, dist.get_rank()), len(forms)))


def train_in_order(rank: int, world: int, *arguments):
    usual = transport.TRANSPORTS["gloo"], backend.BACKENDS["gloo"]
    transport.TRANSPORTS["gloo"] = InOrder
    backend.BACKENDS["gloo"] = replace(usual[1], tagged=False)
    try:
        return jobs.train(rank, world, *arguments)
    finally:
        transport.TRANSPORTS["gloo"], backend.BACKENDS["gloo"] = usual


@pytest.mark.parametrize("case", ORDERED, ids=str)
def test_messages_without_tags_find_their_way(case: Case) -> None:
    arguments = (case.model, case.optimizer, case.plan, list(case.sizes), case.fields)
    hold(case, alone(case), pool(case.plan.world).run(train_in_order, *arguments))
