"""Bytes: what the transport counts is what the program says, to the byte; and the interface's own counters agree."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.engine import asynchronous_job, jobs
from tests.engine.systems import BLOCKS
from tests.engine.test_timeline import agreed
from trainplan.bench.pool import pool
from trainplan.engine.exchanges import Sums
from trainplan.engine.trainer import Trainer
from trainplan.engine.transport import Gloo
from trainplan.plan.plan import Plan, plan
from trainplan.plan.rules import DECIDED
from trainplan.profile.capture.captured import capture
from trainplan.profile.structure import structure
from trainplan.program.exchanges import BY_ROUNDS, HIERARCHICAL, gloo, rounds_of
from trainplan.program.exchanges.rounds import sent as sent_in
from trainplan.program.lower import lower
from trainplan.program.ops import SENDS, SHARED_OUT, Kind
from trainplan.program.program import Program
from trainplan.program.traffic import sent, sent_by_rank
from trainplan.units import MIB
from trainplan.workload.workload import Batch

# -- what we send ourselves ----------------------------------------------------------------------------------------


DECIDING = {
    "horovod": {"threshold": 400, "cycle": 1e-3},
    "p3": {"slice": 40},
    "bytescheduler": {"slice": 40, "credit": 60},
    "pace": {"slice": 60, "fused": (5, 5, 5)},
}


def plans(world: int) -> list[Plan]:
    """Every exchange on so many replicas, those that share out their states, and pipelines; on two ranks servers, on
    four replicated pipelines, too."""
    blocks = BLOCKS["tied"]
    words = [word for word in BY_ROUNDS if word != HIERARCHICAL or world == 4]
    node = {word: 2 if word == HIERARCHICAL else 0 for word in words}
    found = [plan(dp=world, micro=2, bucket=200, exchange=word, node=node[word], blocks=blocks) for word in words]
    if world < 4:
        found += [plan(dp=world, exchange=word, blocks=blocks, **numbers) for word, numbers in DECIDING.items()]
        found += [plan(dp=world, zero=stage, bucket=300, micro=2, blocks=blocks) for stage in (1, 2, 3)]
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
        found.append(plan(exchange="horovod", **DECIDING["horovod"], **both))
        found.append(plan(dp=4, zero=3, shard=2, bucket=300, blocks=blocks))
    return found


def counted(rank: int, world: int, several: list[Plan]) -> list[tuple[dict[str, int], dict[str, int], int]]:
    """Of one step of each plan, by operation: bytes that this rank was counted to send, bytes that it was to send; and
    all that it was to send, with what gloo sends for it. What ranks tell each other, where that is decided while
    running, is counted as one."""
    found = []
    for one in several:
        job, model, captured = jobs.built("tied", "sgd")
        shape = jobs.shape_of("tied")
        trainer = Trainer(one, job, captured, lambda names, model=model: jobs.values_of(model), shape=shape)
        batch = job.inputs(9, 0)  # uneven parts
        trainer.step(batch)
        transport, program = trainer.part.transport, trainer.program(9)
        name = program.name
        transport.sent.clear()
        told = -telling(trainer)
        if one.exchange in DECIDED:
            trainer.record()
        trainer.step(batch)
        if one.exchange in DECIDED:
            told += telling(trainer)
            program = decided(trainer, world, 9)
        real = Counter({name(op): size for op, size in transport.sent.items()})
        real["told"] = told
        planned: Counter[str] = Counter()
        for op in (op for op in program.ops() if is_ours(program, op.id)):
            planned["told" if op.key.kind is Kind.NEGOTIATE else str(op)] += sent(program, op.id).get(rank, 0)
        found.append((dict(+real), dict(+planned), int(sent_by_rank(program)[rank])))
        dist.barrier()
        trainer.close()
    return found


def is_ours(program: Program, op: int) -> bool:
    """Whether we send the messages of an operation, and not the backend."""
    kind = Kind(program.kind[op])
    by_us = program.classes[program.cost[op]].by in BY_ROUNDS
    return by_us or kind in (*SENDS, *SHARED_OUT, Kind.NEGOTIATE)


def telling(trainer: Trainer) -> int:
    """Bytes that this rank has sent to tell others what is ready."""
    trainer.settle()
    return sum(exchange.bits.sent for exchange in trainer.part.exchanges.values())


def decided(trainer: Trainer, world: int, batch: int) -> Program:
    """The program of the recorded step, with what all ranks decided in it."""
    everybody: list = [None] * world
    dist.all_gather_object(everybody, list(trainer.agendas))
    return lower(trainer.plan, trainer.shape, batch, agendas=agreed(everybody))


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


@pytest.mark.parametrize(
    "choices",
    [
        pytest.param({"exchange": word, "dp": 2, "bound": bound}, marks=pytest.mark.system(word, "P"), id=word)
        for word, bound in (("ps-asp", ()), ("ssp", (1,)), ("dssp", (0, 2)))
    ],
)
def test_what_servers_send_is_what_their_record_says(choices: dict) -> None:
    """A worker sends its gradients once a step; a server sends weights as often as its record says that it released
    somebody, and to whom. By operation, to the byte."""
    one = plan(servers=2, split=8, bucket=300, blocks=BLOCKS["tied"], **choices)
    sizes, pauses = [8, 9, 8], [0.0, 0.02]
    ranks = pool(one.world).run(asynchronous_job.train, "tied", "sgd", one, sizes, {}, pauses, None)
    job, _, captured = jobs.built("tied", "sgd")
    program = lower(one, structure(captured, job, job.inputs(2, 0)), sizes[0])
    for rank, found in enumerate(ranks):
        times = Counter(dict.fromkeys(range(one.world), len(sizes)))
        if rank >= one.workers:
            times = Counter(worker for entry in found.record for worker in entry.released)
        planned = {
            op: times[int(program.peer[op])] * sent(program, op)[rank]
            for op in program.lists.row(rank).tolist()
            if Kind(program.kind[op]) in SENDS
        }
        assert found.sent == planned
        assert sum(planned.values()) > 0


# -- what the interface saw ----------------------------------------------------------------------------------------

DEVICES = Path("/proc/net/dev")
SIZE = 6 * MIB
TRIES = 12
CLOSE = 0.02


def carried_by(device: str = "lo") -> int:
    """Bytes that a device has sent, in the network namespace of this process."""
    line = next(line for line in DEVICES.read_text().splitlines() if line.strip().startswith(f"{device}:"))
    return int(line.split(":")[1].split()[8])


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
        before, began = carried_by(), time.perf_counter()
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
        after = carried_by()
        time.sleep(time.perf_counter() - began)
        seen = [after - before, carried_by() - after]
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
    if not DEVICES.exists():
        pytest.skip(f"{DEVICES} cannot be read")
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


STEPS = [
    plan(dp=2, exchange="ps-bsp", servers=1, bucket=MIB, blocks=3),
    plan(dp=2, exchange="ps-asp", servers=1, bucket=MIB, blocks=3),
    plan(dp=2, exchange="ssp", bound=(1,), servers=1, bucket=MIB, blocks=3),
    plan(dp=2, exchange="dssp", bound=(0, 2), servers=1, bucket=MIB, blocks=3),
    plan(dp=3, exchange="dataparallel", bucket=MIB, preload="off", blocks=3),
    plan(dp=3, exchange="horovod", threshold=2 * MIB, cycle=1e-3, blocks=3),
    plan(dp=3, exchange="bytescheduler", slice=MIB // 2, credit=MIB, blocks=3),
    plan(dp=3, exchange="pace", slice=MIB // 2, fused=(2, 4), blocks=3),
    *(plan(dp=4, zero=stage, bucket=MIB, blocks=3) for stage in (1, 2, 3)),
    plan(dp=4, zero=3, shard=2, bucket=MIB, blocks=3),
]


def called(one: Plan) -> str:
    """The system that a plan is."""
    if one.zero:
        return "hsdp" if one.shard else f"zero{one.zero}"
    return one.exchange


def stepped(rank: int, world: int, one: Plan, device: str = "lo") -> tuple[list[int], int, int]:
    """Of a step with a model of 3 MiB: bytes that each rank sends by the program; those that a device sends meanwhile,
    and in as long a time after it."""
    job = jobs.workload("chain")
    job = replace(job, build=lambda: nn.Sequential(*(nn.Linear(512, 512) for _ in range(3))), inputs=vectors)
    torch.manual_seed(3)
    model = job.build()
    captured = capture(model, job.inputs(2, 0), job.loss)
    trainer = Trainer(one, job, captured, lambda names: jobs.values_of(model))
    trainer.step(job.inputs(6, 0))
    program = trainer.program(6)
    if one.exchange in DECIDED:
        trainer.record()
    dist.barrier()
    before, began = carried_by(device), time.perf_counter()
    dist.barrier()
    trainer.step(job.inputs(6, 1))
    trainer.settle()
    dist.barrier()
    after = carried_by(device)
    time.sleep(time.perf_counter() - began)
    beside = carried_by(device) - after
    if one.exchange in DECIDED:
        program = decided(trainer, world, 6)
    dist.barrier()
    trainer.close()
    return sent_by_rank(program).tolist(), after - before, beside


def shared_out(one: Plan) -> int:
    """What all ranks together send of a model of three equal layers that share out their states: 2Ψ, 2Ψ and 3Ψ in each
    group of N, (N − 1) times; under zero=3 less the layer with which backward begins; and across n groups the sum of
    what each rank has, 2 (n − 1) times."""
    layer, inside = 4 * (512 * 512 + 512), one.shard or one.dp
    groups = one.dp // inside
    moved = 8 * layer if one.zero == 3 else 6 * layer
    return groups * (inside - 1) * moved + 2 * (groups - 1) * 3 * layer


def vectors(samples: int, seed: int) -> Batch:
    """Inputs and targets of the wide model."""
    numbers = torch.Generator().manual_seed(seed)
    inputs, targets = (torch.randn(samples, 512, generator=numbers) for _ in range(2))
    return Batch(samples, args=(inputs,), targets=targets)


@pytest.mark.alone
@pytest.mark.parametrize(
    "one", [pytest.param(one, marks=pytest.mark.system(called(one), "P"), id=called(one)) for one in STEPS]
)
def test_the_interface_carries_a_step(one: Plan) -> None:
    """All that a step sends: of servers, of the root of nn.DataParallel, of ranks that decide, and of four that share
    out their states. (Where root can make a link for that alone, each side of it sends what it should, also under
    others: `tests/bench/test_slow_link.py`.)"""
    if not DEVICES.exists():
        pytest.skip(f"{DEVICES} cannot be read")
    expected = sum(pool(one.world).run(stepped, one)[0][0])
    if one.zero:
        assert expected == pytest.approx(shared_out(one), rel=1e-3)
    assert expected > 6 * MIB
    carried(expected, lambda: pool(one.world).run(stepped, one)[0][1:])
