"""What the engine takes of a host is measured with the engine, by workers of a probe."""

from statistics import median

import pytest
import torch
import torch.distributed as dist

from trainplan.bench.pool import pool
from trainplan.cluster.probe.probe import probe as plain
from trainplan.cluster.probe.team import Team
from trainplan.engine import dispatch, recorder
from trainplan.engine.clocks import now
from trainplan.engine.handlers import HANDLERS
from trainplan.engine.instructions import Instruction
from trainplan.engine.probe import probe
from trainplan.engine.runner import Runner
from trainplan.program.ops import Kind

LONGER = 1.0  # seconds, by a clock that is put forward: nobody sleeps, and no machine is as slow by chance


def measured(rank: int, world: int, backend: str = "gloo") -> dict[str, float]:
    """On every rank: the median of what each kind takes more."""
    team = Team(rank, world, torch.device("cpu"), backend, dist.group.WORLD if world > 1 else None)
    one_round = dispatch.prepare(team, quick=True)
    found: dict[str, list[float]] = {}
    for _ in range(3):
        one_round(lambda name, sample: found.setdefault(name, []).append(sample))
    return {name.removeprefix("dispatch."): median(samples) for name, samples in found.items()}


@pytest.mark.parametrize(("kind", "word"), [(Kind.F, "forward"), (Kind.B, "backward")])
def test_an_engine_that_is_slow_in_one_kind_is_measured_to_be(kind: Kind, word: str, monkeypatch) -> None:
    usual, late = HANDLERS[kind], 0.0

    def slow(run: Runner, op: Instruction, place: int) -> int | None:
        nonlocal late
        late += LONGER
        return usual(run, op, place)

    monkeypatch.setattr(recorder, "now", lambda: now() + late)
    monkeypatch.setitem(HANDLERS, kind, slow)
    found = measured(0, 1)
    assert set(found) == {"forward", "backward"}  # nobody sends anything
    assert {one: round(seconds) for one, seconds in found.items()} == {"forward": 0, "backward": 0} | {word: LONGER}


def test_stages_take_messages_too():
    for found in pool(2).run(measured):
        assert set(found) == {"forward", "backward", "receive"}
        assert 0 < found["receive"] < 0.1


def test_nothing_is_measured_with_what_was_never_seen_to_work():
    assert measured(0, 2, backend="nccl") == {}


def test_a_probe_of_the_engine_knows_more_than_one_of_the_cluster():
    tries = (probe(1, quick=True, cache=False).dispatch_s for _ in range(3))  # a busy machine may hide it
    assert 0 < next(seconds for seconds in tries if seconds) < 0.01
    assert plain(1, quick=True, cache=False).dispatch_s == 0
