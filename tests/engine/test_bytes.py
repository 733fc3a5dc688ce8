"""Bytes: what the transport counts is what the program says, to the byte; and the interface's own counters agree."""

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.engine import jobs
from tests.engine.systems import BLOCKS
from trainplan.bench.pool import pool
from trainplan.engine.exchanges import Sums
from trainplan.engine.trainer import Trainer
from trainplan.engine.transport import Gloo
from trainplan.plan.plan import Plan, plan
from trainplan.program.exchanges import BY_ROUNDS, HIERARCHICAL, gloo, rounds_of
from trainplan.program.exchanges.rounds import sent as sent_in
from trainplan.program.ops import SENDS
from trainplan.program.traffic import sent, sent_by_rank
from trainplan.units import MIB

# -- what we send ourselves ----------------------------------------------------------------------------------------


def plans(world: int) -> list[Plan]:
    """Every exchange on so many replicas, and pipelines; on two ranks servers, on four replicated pipelines, too."""
    blocks = BLOCKS["tied"]
    words = [word for word in BY_ROUNDS if word != HIERARCHICAL or world == 4]
    node = {word: 2 if word == HIERARCHICAL else 0 for word in words}
    found = [plan(dp=world, micro=2, bucket=200, exchange=word, node=node[word], blocks=blocks) for word in words]
    cuts = {2: (4,), 3: (2, 5), 4: (2, 4, 6)}[world]
    found.append(plan(pp=world, micro=3, schedule="1f1b", stages=cuts, blocks=blocks))
    if world == 2:
        found.append(plan(dp=2, bucket=300, exchange="dataparallel", preload="off", blocks=blocks))
        found.append(plan(dp=1, bucket=300, exchange="ps-bsp", servers=1, blocks=blocks))
    if world == 4:
        stages = {"pp": 2, "micro": 2, "schedule": "1f1b", "stages": (4,), "bucket": 300}
        found.append(plan(exchange="ps-bsp", servers=2, split=8, blocks=blocks, **stages))
        both = {"dp": 2, "pp": 2, "micro": 2, "schedule": "1f1b", "stages": (4,), "blocks": blocks, "bucket": 200}
        found += [plan(exchange=word, **both) for word in ("all-reduce", "ring", "tree")]
        found.append(plan(exchange="horovod", threshold=400, cycle=1e-3, **both))
    return found


def counted(rank: int, world: int, several: list[Plan]) -> list[tuple[dict[int, int], dict[int, int], int]]:
    """Of one step of each plan, by operation: bytes that this rank was counted to send, bytes that it was to send; and
    all that it was to send, with what gloo sends for it."""
    found = []
    for one in several:
        job, model, captured = jobs.built("tied", "sgd")
        trainer = Trainer(one, job, captured, lambda names, model=model: jobs.values_of(model))
        batch = job.inputs(9, 0)  # uneven parts
        trainer.step(batch)
        transport, program = trainer.part.transport, trainer.program(9)
        transport.sent.clear()
        trainer.step(batch)
        ours = [
            op for op in program.ops()
            if op.key.kind in SENDS or program.classes[program.cost[op.id]].by in BY_ROUNDS
        ]  # fmt: skip
        planned = Counter({op.id: sent(program, op.id).get(rank, 0) for op in ours})
        found.append((dict(+transport.sent), dict(+planned), int(sent_by_rank(program)[rank])))
        dist.barrier()
        trainer.close()
    return found


@pytest.mark.parametrize("world", [2, 3, 4])
def test_what_is_counted_is_what_the_program_says(world: int) -> None:
    several = plans(world)
    ranks = pool(world).run(counted, several)
    for number, one in enumerate(several):
        assert sum(sum(rank[number][1].values()) for rank in ranks) > 0, one
        for rank, measured in enumerate(ranks):
            real, planned, whole = measured[number]
            assert real == planned, f"{one} on rank {rank}"
            assert sum(planned.values()) <= whole


# -- what the interface saw ----------------------------------------------------------------------------------------

LOOPBACK = Path("/proc/net/dev")
SIZE = 6 * MIB
TRIES = 12
CLOSE = 0.02


def loopback() -> int:
    """Bytes that the loopback interface has carried."""
    line = next(line for line in LOOPBACK.read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[0])


def carried(expected: float, attempt: Callable[[], tuple[int, int]]) -> None:
    """What an attempt puts on the interface is what is expected. It says, too, what the interface carries in as long a
    time without it: others only add, so the least of some attempts beside nobody counts."""
    quiet = []
    for _ in range(TRIES):
        found, beside = attempt()
        if found == pytest.approx(expected, rel=CLOSE):
            return
        if beside < CLOSE * expected:
            quiet.append(found)
    if not quiet:
        pytest.skip("others are busy on the loopback interface")
    assert min(quiet) == pytest.approx(expected, rel=CLOSE)


def summed(rank: int, world: int, word: str, node: int) -> tuple[bool, int, int]:
    """Whether the sum was right; bytes on the interface while it was made, and in as long a time after it."""
    members = tuple(range(world))
    group = dist.new_group(list(members))
    transport = Gloo(torch.device("cpu"))
    sums = Sums(transport, group, members, rank) if word in BY_ROUNDS else None
    seen, right, total = [], True, float(sum(range(1, world + 1)))
    for size in (world, SIZE // 4):  # the first to get acquainted
        tensor = torch.full((size,), float(rank + 1))
        whole = torch.empty_like(tensor)
        dist.barrier(group)
        before, began = loopback(), time.perf_counter()
        dist.barrier(group)
        if sums is not None:
            sums.start(tensor, rounds_of(word, members, size, node), 0).wait()
        elif word == "gather":
            share = tensor[: size // world]
            transport.all_gather(whole, share, group).wait()
            tensor.fill_(float(whole.view(world, -1)[:, 0].sum()))
        elif word == "scatter":
            works, put = transport.reduce_scatter(tensor, world, group)
            works.wait()
            put(whole[: size // world], False)
            tensor.fill_(float(whole[: size // world].mean()))
        else:
            transport.all_reduce(tensor, group).wait()
        dist.barrier(group)
        after = loopback()
        time.sleep(time.perf_counter() - began)
        seen = [after - before, loopback() - after]
        right &= bool((tensor == total).all())
        dist.barrier(group)
    if sums is not None:
        sums.close()
    dist.destroy_process_group(group)
    return right, seen[0], seen[1]


@pytest.mark.alone
@pytest.mark.parametrize("word", ["all-reduce", "gather", "scatter", *BY_ROUNDS])
def test_the_interface_carries_what_the_account_says(word: str) -> None:
    """Headers and acknowledgements come on top, and whatever else talks over the interface: others only add to it, so
    the least of some tries counts."""
    if not LOOPBACK.exists():
        pytest.skip(f"{LOOPBACK} cannot be read")
    world, node = (4, 2) if word == HIERARCHICAL else (3, 0)
    if word == "all-reduce":
        expected = sum(gloo.sent(world, SIZE, 4))
    elif word in ("gather", "scatter"):  # of shares: everybody's to everybody else
        expected = (world - 1) * SIZE
    else:
        expected = 4 * sum(sent_in(rounds_of(word, tuple(range(world)), SIZE // 4, node), world))

    def attempt() -> tuple[int, int]:
        ranks = pool(world).run(summed, word, node)
        assert all(right for right, _, _ in ranks)
        return ranks[0][1:]

    carried(expected, attempt)
