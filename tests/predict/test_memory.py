"""Predicted memory against the allocator's account of real steps, in real processes, operation by operation."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from tests.predict import memory_job
from trainplan.bench.pool import pool
from trainplan.plan.plan import Plan, plan
from trainplan.predict.clock import play
from trainplan.predict.memory import Track, peaks, tracks
from trainplan.profile.measure import measure
from trainplan.profile.profile import Profile
from trainplan.program.lower import lower
from trainplan.program.offload import absences, decide, levels
from trainplan.program.ops import SENDS, SHARED_OUT, Kind, Value
from trainplan.program.program import Program

# model → batch, micro-batch sizes of the profile, the first block of the second stage
MODELS = {
    "mlp": (64, (8, 32, 64), 3),
    "wide": (64, (16, 64), 1),
    "resnet18:cifar10": (4, (1, 2, 4), 4),
    "gpt:layers=2,hidden=64,heads=4,seq=64,vocab=500": (8, (1, 4, 8), 2),
}
AWAY = {"offload": "activations"}
PLANS = {
    "single": {},
    "accumulate": {"micro": 4},
    "recompute": {"micro": 2, "recompute": "full"},
    "gpipe": {"pp": 2, "micro": 4, "schedule": "gpipe"},
    "1f1b": {"pp": 2, "micro": 4, "schedule": "1f1b"},
    "1f1b, recompute": {"pp": 2, "micro": 4, "schedule": "1f1b", "recompute": "full"},
    "lockstep, but last": {"pp": 2, "micro": 4, "schedule": "lockstep", "recompute": "except-last"},
    "zb-h1": {"pp": 2, "micro": 4, "schedule": "zb-h1"},
    "load": {"preload": "off"},
    "load, 1f1b": {"pp": 2, "micro": 4, "schedule": "1f1b", "preload": "off"},
    "ddp": {"dp": 2, "bucket": 2**18},
    "zero1": {"dp": 2, "overlap": "off", "zero": 1, "bucket": 2**18},
    "zero2": {"dp": 2, "overlap": "off", "zero": 2, "micro": 2, "bucket": 2**18},
    "zero3": {"dp": 2, "overlap": "off", "zero": 3, "bucket": 2**18},
    "zero3, recompute": {"dp": 2, "overlap": "off", "zero": 3, "micro": 2, "bucket": 2**18, "recompute": "full"},
    "ddp, accumulate": {"dp": 2, "micro": 2, "bucket": 2**18},
    "offload": {"micro": 2, **AWAY, "away": ((3,),)},
    "offload, ddp": {"dp": 2, "micro": 2, "bucket": 2**18, **AWAY, "away": ((3, 1),)},
    "offload, zero3": {"dp": 2, "overlap": "off", "zero": 3, "bucket": 2**18, **AWAY, "away": ((3,),)},
    "offload, gpipe, recompute": {
        "pp": 2, "micro": 4, "schedule": "gpipe", "recompute": "full", **AWAY, "away": ((3, 3, 3, 0), (2, 2, 2, 1)),
    },
    "offload, gpipe": {"pp": 2, "micro": 4, "schedule": "gpipe", **AWAY, "away": ((3, 3, 3, 0), (2, 2, 2, 1))},
}  # fmt: skip
# Beyond the smallest model one of each kind: what differs there are the blocks, not the plans.
ENOUGH = ("single", "accumulate", "gpipe", "1f1b, recompute", "zb-h1")
LOADS = ("load", "load, 1f1b")  # where nearly all bytes are inputs
CHOSEN = {"mlp": tuple(name for name in PLANS if name not in LOADS), "wide": LOADS}
CASES = [(model, choices) for model in MODELS for choices in CHOSEN.get(model, ENOUGH)]


@cache
def profiled(name: str) -> Profile:
    workload, _, _ = memory_job.built(name)
    return measure(workload, samples=MODELS[name][1], repeats=1, verify=False)


def planned(name: str, choices: dict) -> Plan:
    stages = {"stages": (MODELS[name][2],)} if "pp" in choices else {}
    return plan(blocks=len(profiled(name).blocks), **stages, **choices)


def ranks(function, name: str, chosen: Plan) -> list:
    batch = MODELS[name][0]
    if chosen.world == 1:
        return [function(0, 1, name, chosen, batch)]
    return pool(chosen.world).run(function, name, chosen, batch)


@pytest.mark.parametrize(("name", "choices"), CASES, ids=[f"{m.split(':')[0]}-{p}" for m, p in CASES])
def test_memory_of_real_steps(name: str, choices: str) -> None:
    chosen = planned(name, PLANS[choices])
    program = lower(chosen, profiled(name), MODELS[name][0])
    played = play(program, np.ones(len(program)))
    for rank, seen in enumerate(ranks(memory_job.track, name, chosen)):
        peak, track = peaks(played)[rank], tracks(played)[rank]
        most = max(bytes_ for _, bytes_, _ in seen.ops)
        assert peak.bytes == pytest.approx(most, rel=0.05), peak
        assert int(track.start.sum()) == pytest.approx(seen.start, rel=0.001)
        left = levels_after(program, track)
        places = {program.name(op): place for place, op in enumerate(program.lists.row(rank))}
        # One call of the engine may be several operations of the program: the last of them says what is left.
        following = [*(places[op] for op, _, _ in seen.ops[1:]), len(left)]
        names = program.rank_list(rank)
        for (op, _, after), place in zip(seen.ops, following, strict=True):
            if "SCATTER_GRAD" in names[min(place, len(names) - 1)]:
                continue  # room for what comes is made with the gradients, and taken when they are sent
            if "REDUCE_GRAD" in op:
                break  # the thread that ends a sum gives its memory back, and is not watched
            assert left[place - 1] == pytest.approx(after, abs=0.02 * most), f"after {op} on rank {rank}"


BEHIND = {  # what goes on while others compute
    "zero1": {"dp": 2, "zero": 1, "bucket": 2**18},
    "zero2": {"dp": 2, "zero": 2, "micro": 2, "bucket": 2**18},
    "zero3": {"dp": 2, "zero": 3, "bucket": 2**18},
    "zero3, recompute": {"dp": 2, "zero": 3, "micro": 2, "bucket": 2**18, "recompute": "full"},
    "hsdp": {"dp": 4, "zero": 3, "shard": 2, "bucket": 2**18},
    "ps-bsp": {"dp": 2, "exchange": "ps-bsp", "servers": 1, "bucket": 2**18},
    "ps-bsp, split": {"dp": 2, "exchange": "ps-bsp", "servers": 2, "split": 10**4, "bucket": 2**18},
    "horovod": {"dp": 2, "exchange": "horovod", "threshold": 2**18, "cycle": 1e-3},
    "p3": {"dp": 2, "exchange": "p3", "slice": 2**18},
    "bytescheduler": {"dp": 2, "exchange": "bytescheduler", "slice": 2**18, "credit": 2**19},
    "pace": {"dp": 2, "exchange": "pace", "slice": 2**18, "fused": (4, 4, 4)},
}
_TALKS = (*SHARED_OUT, *SENDS, Kind.REDUCE_GRAD, Kind.NEGOTIATE)


@pytest.mark.parametrize(
    "choices", [pytest.param(name, marks=pytest.mark.system(name.split(",")[0], "P"), id=name) for name in BEHIND]
)
def test_peaks_of_steps_that_exchange_while_they_compute(choices: str) -> None:
    """Shares and hybrid shares, servers, and sums by priority. What a rank holds depends on how long its messages take;
    here none takes any time, on both sides."""
    chosen = planned("mlp", BEHIND[choices])
    program = lower(chosen, profiled("mlp"), MODELS["mlp"][0])
    played = play(program, np.where(np.isin(program.kind, _TALKS), 0.0, 1.0))
    for rank, (start, most) in enumerate(ranks(memory_job.whole, "mlp", chosen)):
        assert int(tracks(played)[rank].start.sum()) == pytest.approx(start, rel=0.001)
        assert peaks(played)[rank].bytes == pytest.approx(most, rel=0.05)


def test_batches_that_come_ahead() -> None:
    """The allocator has as many bytes of inputs as the program: two batches, and one when a step is over."""
    chosen = planned("wide", {"preload": "on"})
    program = lower(chosen, profiled("wide"), MODELS["wide"][0], steps=2)
    size = int(program.bytes[program.kind == Kind.LOAD][0])
    played = play(program, np.where(program.kind == Kind.LOAD, 0.1, 1.0))
    there = int(played.program.bytes_at_start(0, Value.INPUT))
    assert peaks(played)[0].breakdown["input"] == there + 2 * size
    found = memory_job.ahead("wide", chosen, MODELS["wide"][0])
    wanted = {"first": size, "second": 2 * size, "stepped": size}
    assert found == {what: pytest.approx(bytes_, abs=0.01 * size) for what, bytes_ in wanted.items()}


def levels_after(program: Program, track: Track) -> list[int]:
    """Bytes on a rank after each operation of its list."""
    ends = dict(zip(track.op.tolist(), track.level.tolist(), strict=True))
    level, found = int(track.start.sum()), []
    for op in program.lists.row(track.rank).tolist():
        level = ends.get(op, level)
        found.append(level)
    return found


@pytest.mark.system("zero-r", "P")
def test_zero_r_would_have_decided_alike_by_real_bytes() -> None:
    """The policy, asked with the allocator's account of a real step and with what was really copied, lets the same
    parcels go as with the bytes of the program, whatever the budget."""
    name, batch = "gpt:layers=5,hidden=32,heads=2,seq=32,vocab=50", 16
    profile = measure(memory_job.built(name)[0], samples=(1, 8), repeats=1, verify=False)
    chosen = plan(blocks=len(profile.blocks), micro=2, **AWAY, away=((len(profile.blocks) - 2,),))
    program = lower(chosen, profile, batch)
    start, seen, copied = memory_job.by_operation(name, chosen, batch)
    places = {name: place for place, name in enumerate(program.rank_list(0))}
    real = np.zeros(len(places), dtype=np.int64)  # of operations that compute; the others need no more than these
    for name, most in seen.items():
        real[places[name]] = start + most
    foreseen, expected = absences(program, 0), levels(program, 0)
    for parcel in foreseen:  # but for positions, which all blocks share
        assert parcel.bytes == pytest.approx(copied[parcel.micro, parcel.section], abs=512)
    everything = expected.copy()
    for parcel in foreseen:
        everything[parcel.gone : parcel.back] += parcel.bytes
    budgets = np.linspace(expected.max(), everything.max(), 12, endpoint=False).astype(int)[1:].tolist()
    answers = [decide(expected, foreseen, budget) for budget in budgets]
    assert [decide(real, foreseen, budget) for budget in budgets] == answers
    assert len({sum(answer) for answer in answers}) > 3


def test_what_was_sent_does_not_pile_up() -> None:
    """When all micro-batches of 1F1B are through, a rank has its gradients and at most a few messages."""
    chosen = planned("mlp", {"pp": 2, "micro": 32, "schedule": "1f1b"})
    program = lower(chosen, profiled("mlp"), MODELS["mlp"][0])
    for seen, (first, last) in zip(ranks(memory_job.track, "mlp", chosen), chosen.bounds, strict=True):
        *_, (_, _, left), (step, _, _) = seen.ops
        assert step.endswith("STEP")
        gradients = sum(p.bytes for p in profiled("mlp").parameters_of(first, last))
        assert left - seen.start - gradients <= 3 * program.bytes.max()


def test_nothing_piles_up_from_step_to_step() -> None:
    """Tied weights of two stages: their sum must not outlive its step."""
    name = list(MODELS)[-1]
    tied = max(p.bytes for p in profiled(name).parameters if len(p.blocks) > 1)
    # What gloo's thread gives back is not seen, and now and then it is the last to hold a sum. A leak is always there.
    growth = [max(ranks(memory_job.growth, name, planned(name, PLANS["gpipe"]))) for _ in range(3)]
    assert min(growth) <= tied
