"""In which order receives are posted, and that the memory of a program says the same."""

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synthetic import chain
from trainplan.plan.plan import plan
from trainplan.program.check import check
from trainplan.program.lower import lower
from trainplan.program.ops import RECEIVES, Kind, Value
from trainplan.program.posting import due, in_order_of_sending
from trainplan.program.program import Program


@given(st.lists(st.integers(0, 2), max_size=12), st.randoms(use_true_random=False), st.integers(1, 5))
def test_what_is_taken_has_been_posted_and_no_message_is_taken_for_another(peers, random, ahead) -> None:
    sent = random.sample(range(100), len(peers))
    order = in_order_of_sending(peers, sent)
    assert sorted(order) == list(range(len(peers)))
    by_peer = defaultdict(list)
    for receive in order:
        by_peer[peers[receive]].append(sent[receive])
    assert all(row == sorted(row) for row in by_peer.values())
    posted = due(order, ahead)
    assert posted == sorted(posted)
    for taken in range(len(peers)):
        soon = range(taken, min(taken + ahead, len(peers)))
        assert set(soon) <= set(order[: posted[taken]])  # as many ahead as there should be
        # And nothing that neither is taken soon nor is sent before something that is.
        last = {peer: max((sent[r] for r in range(soon.stop) if peers[r] == peer), default=-1) for peer in peers}
        assert all(sent[r] <= last[peers[r]] for r in order[: posted[taken]])


@given(st.lists(st.integers(0, 2), max_size=12))
def test_messages_that_are_taken_as_they_are_sent_are_posted_as_they_are_taken(peers) -> None:
    assert in_order_of_sending(peers, range(len(peers))) == list(range(len(peers)))


def out_of_turn(program: Program) -> int:
    """Receives that are taken before one that the same rank sent earlier."""
    found = 0
    for rank in range(program.world):
        latest: dict[int, int] = defaultdict(lambda: -1)
        for op in program.lists.row(rank):
            if program.kind[op] in RECEIVES:
                send, peer = sender(program, int(op)), int(program.peer[op])
                found += send < latest[peer]
                latest[peer] = max(latest[peer], send)
    return found


def sender(program: Program, receive: int) -> int:
    return next(int(program.value_maker[v]) for v in program.reads.row(receive))


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize(("schedule", "chunks"), [("zb-v", 2), ("1f1b", 1)])
def test_buffers_count_from_when_they_are_posted(schedule: str, chunks: int, backend: str) -> None:
    """The values of a lowered program against the rule, one receive at a time."""
    stages = 3 * chunks
    cuts = tuple(range(1, stages))
    choices = plan(pp=3, micro=7, schedule=schedule, chunks=chunks, stages=cuts, blocks=stages)
    program = check(lower(choices, chain(stages), 7, backend))
    assert bool(out_of_turn(program)) == (schedule == "zb-v")  # else there would be nothing to see
    for rank in range(program.world):
        row = program.lists.row(rank)
        taken = [int(op) for op in row if program.kind[op] in RECEIVES]
        order = list(range(len(taken)))
        if backend == "nccl":
            order = in_order_of_sending([int(program.peer[r]) for r in taken], [sender(program, r) for r in taken])
        posted = due(order)
        for place, number in enumerate(order):
            after = next(t for t, count in enumerate(posted) if count > place)  # so many had been taken
            trigger = taken[after - 1] if after else int(row[0])
            buffers = [
                int(program.value_maker[v])
                for v in program.frees.row(taken[number])
                if program.value_kind[v] == Value.COMMUNICATION
            ]
            assert buffers == ([trigger] if trigger != taken[number] else [])
    assert Kind.RECV_F in program.kind
