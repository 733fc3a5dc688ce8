"""The bytes that partitioners reckon with, against the program's own."""

import numpy as np
import pytest

from synthetic import chain
from trainplan.plan.plan import plan
from trainplan.predict.clock import play
from trainplan.predict.memory import peaks
from trainplan.program.lower import lower
from trainplan.solve.partition.ranges import Tables, in_flight


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("schedule", ["naive", "gpipe", "1f1b"])
def test_estimate_is_close_to_the_program_and_not_below(schedule, recompute):
    profile = chain(
        blocks=9, saved=5000, boundary=300, weights=700, skips=((0, 4),), tied=((0, 8),), input_bytes_per_sample=11.0,
        state_bytes_per_parameter=8.0,
    )  # fmt: skip
    cuts, micro, batch = (2, 5, 7), 6, 24
    chosen = plan(pp=4, micro=micro, schedule=schedule, stages=cuts, blocks=9, recompute=recompute)
    program = lower(chosen, profile, batch)
    real = [peak.bytes for peak in peaks(play(program, np.ones(len(program))))]
    ranges = Tables(profile).at(batch // micro, recompute)
    held = in_flight(schedule, 4, micro)
    batch_bytes = profile.input_bytes_per_sample * batch
    reckoned = [ranges.need(s, held, batch_bytes)[first, last] for s, (first, last) in enumerate(chosen.bounds)]
    for stage in range(4):
        assert real[stage] <= reckoned[stage] <= real[stage] * 1.25, (stage, real, reckoned)


def test_traffic_counts_skips_and_gradients():
    profile = chain(blocks=4, boundary=10, skips=((0, 3),))
    assert Tables(profile).at(1).traffic.tolist() == [40, 40, 40, 0]  # the skip passes all three cuts, there and back


def test_seconds_count_the_forward_twice_when_recomputing():
    profile = chain(blocks=3, forward=1.0, backward=2.0)
    tables = Tables(profile)
    assert tables.at(1).seconds.tolist() == [3, 3, 3]
    assert tables.at(1, "full").seconds.tolist() == [4, 4, 4]
