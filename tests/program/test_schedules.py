"""The time of our orders of work beside that of torch's own lists."""

import numpy as np
import pytest

from synthetic import chain
from trainplan.plan.plan import plan
from trainplan.predict.clock import play, seconds_by_kind
from trainplan.program.check import check
from trainplan.program.lower import lower
from trainplan.program.ops import Kind
from trainplan.program.schedules import SCHEDULES, Size
from trainplan.program.text import parse


def torch_gpipe(size: Size) -> list[np.ndarray]:
    """What torch's own ScheduleGPipe says of itself, read through our names, in the form of our schedules."""
    from torch.distributed.pipelining.schedules import ScheduleGPipe

    schedule = ScheduleGPipe.__new__(ScheduleGPipe)  # its list needs no processes, only these two numbers
    schedule._num_stages, schedule._n_microbatches = size.ranks, size.micro_batches
    keys = [[parse(str(action)) for action in row if action] for row in schedule._get_pipeline_order().values()]
    return [
        np.array([(k.kind, 0, k.stage, k.micro_batch, 0) for k in row if k.kind in (Kind.F, Kind.B)]) for row in keys
    ]


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 2), (2, 5), (3, 4), (4, 4), (4, 16), (5, 3)])
def test_torch_gpipe_takes_as_long_as_ours(monkeypatch, stages: int, micro_batches: int) -> None:
    """Its backward passes come first micro-batch first, ours last first: another order, the same time."""
    backward = [row for row in torch_gpipe(Size(stages, micro_batches))[0].tolist() if row[0] == Kind.B]
    assert len(backward) == micro_batches
    assert [row[3] for row in torch_gpipe(Size(2, 3))[1].tolist() if row[0] == Kind.B] == [0, 1, 2]
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
