"""Orders of work: the literal lists, and those that torch itself makes."""

import numpy as np
import pytest

from synthetic import chain
from trainplan.plan.plan import plan
from trainplan.predict.clock import play, seconds_by_kind
from trainplan.program.check import check
from trainplan.program.lower import lower
from trainplan.program.ops import Kind
from trainplan.program.schedules import SCHEDULES
from trainplan.program.text import parse

ONE_F_ONE_B = """
F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7
F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7
F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7
F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7
"""


def words(schedule: str, stages: int, micro_batches: int) -> list[str]:
    """The lists of a schedule as text, without their stage (which is the rank)."""
    lists = SCHEDULES[schedule](stages, micro_batches)
    assert all((rows[:, 1] == stage).all() for stage, rows in enumerate(lists))
    return [" ".join(f"{Kind(kind).name}{micro}" for kind, _, micro in rows.tolist()) for rows in lists]


def test_lists_of_gpipe() -> None:
    assert words("gpipe", 4, 4) == ["F0 F1 F2 F3 B3 B2 B1 B0"] * 4


def test_lists_of_1f1b() -> None:
    assert words("1f1b", 4, 8) == ONE_F_ONE_B.strip().splitlines()
    assert words("1f1b", 3, 1) == ["F0 B0"] * 3
    assert words("1f1b", 3, 2) == ["F0 F1 B0 B1", "F0 F1 B0 B1", "F0 B0 F1 B1"]


def test_lists_of_naive() -> None:
    assert words("naive", 3, 2) == ["F0 B0 F1 B1"] * 3


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_micro_batch_once_each_way(schedule: str) -> None:
    for stages in range(1, 6):
        for micro_batches in range(1, 9):
            for row in words(schedule, stages, micro_batches):
                assert sorted(row.split()) == sorted(f"{k}{m}" for k in "FB" for m in range(micro_batches))


def torch_gpipe(stages: int, micro_batches: int) -> list[np.ndarray]:
    """What torch's own ScheduleGPipe says of itself, read through our names, in the form of our schedules."""
    from torch.distributed.pipelining.schedules import ScheduleGPipe

    schedule = ScheduleGPipe.__new__(ScheduleGPipe)  # its list needs no processes, only these two numbers
    schedule._num_stages, schedule._n_microbatches = stages, micro_batches
    keys = [[parse(str(action)) for action in row if action] for row in schedule._get_pipeline_order().values()]
    return [np.array([(k.kind, k.stage, k.micro_batch) for k in row if k.kind in (Kind.F, Kind.B)]) for row in keys]


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 2), (2, 5), (3, 4), (4, 4), (4, 16), (5, 3)])
def test_torch_gpipe_takes_as_long_as_ours(monkeypatch, stages: int, micro_batches: int) -> None:
    """Its backward passes come first micro-batch first, ours last first: another order, the same time."""
    backward = [k for k, s, m in torch_gpipe(stages, micro_batches)[0].tolist() if k == Kind.B]
    assert len(backward) == micro_batches
    assert [m for k, _, m in torch_gpipe(2, 3)[1].tolist() if k == Kind.B] == [0, 1, 2]
    choices = plan(
        pp=stages, micro=micro_batches, schedule="gpipe", stages=tuple(range(1, stages)), blocks=stages
    )  # fmt: skip
    programs = [lower(choices, chain(stages), micro_batches)]
    monkeypatch.setitem(SCHEDULES, "gpipe", torch_gpipe)
    programs.append(lower(choices, chain(stages), micro_batches))
    assert programs[0].rank_list(0) != programs[1].rank_list(0)
    for forward, backward, message in ((1, 2, 0), (1, 1, 0.5), (2, 3, 1)):
        table = dict.fromkeys((Kind.SEND_F, Kind.SEND_B), message)
        table |= {Kind.F: forward, Kind.B: backward, Kind.STEP: 0}
        ours, theirs = (play(check(p), seconds_by_kind(p, table)).makespan for p in programs)
        assert ours == theirs == (micro_batches + stages - 1) * (forward + backward) + 2 * (stages - 1) * message
