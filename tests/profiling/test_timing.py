"""Clocks, ratios to the reference kernel, and the sum of blocks against the whole."""

import time

import pytest
import torch

from synthetic import chain
from trainplan.profile.gap import sum_gap, two_lanes
from trainplan.profile.provenance import WholeStep
from trainplan.profile.reference import Reference
from trainplan.profile.timing import HostClock, Readings, Spent


def test_the_host_clock_counts_the_core_and_not_the_wall():
    spent = HostClock().time("sleep", lambda: time.sleep(0.05))
    assert spent.run_s < 0.02
    assert spent.issue_s == 0


def test_readings_see_through_a_machine_that_changes_its_speed():
    readings = Readings()
    for speed in [1.0] * 10 + [0.5] * 8 + [1.0] * 10 + [2.0] * 8:
        readings.look(0.01 / speed)
        readings.note("a", Spent(3.0 / speed, 0.0))
    assert readings.reference_s == 0.01
    assert readings.run_s("a") == pytest.approx(3.0)
    assert readings.spread("a") == pytest.approx(0.0)
    assert readings.count("a") == 36


def test_one_bad_reading_of_the_reference_does_no_harm():
    readings = Readings()
    for number in range(9):
        readings.look(0.05 if number == 4 else 0.01)
        readings.note("a", Spent(2.0, 0.0))
    assert readings.ratios("a") == pytest.approx([200.0] * 9)


def test_spread_is_the_interquartile_range():
    readings = Readings()
    for seconds in (1.0, 2.0, 3.0, 4.0, 5.0):
        readings.look(1.0)
        readings.note("a", Spent(seconds, 0.0))
    assert readings.spread("a") == pytest.approx(2.0 / 3.0)


def test_the_reference_leaves_random_numbers_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    reference = Reference("cpu")
    assert 0 < reference.core_seconds() < 1
    assert 0 < reference.seconds() < 5
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(
    ("work", "seconds"),
    [
        ([(2.0, 0.0), (3.0, 0.0)], 5.0),  # a CPU: nothing to issue
        ([(1.0, 2.0), (1.0, 2.0)], 4.0),  # bound by the host
        ([(4.0, 1.0), (4.0, 1.0)], 8.0),  # bound by the device, the host runs ahead
        ([(4.0, 1.0), (1.0, 5.0)], 6.0),  # bound by the device, then by the host
    ],
)
def test_two_lanes(work, seconds):
    assert two_lanes(work) == seconds


def test_sum_gap_is_relative_to_the_whole_step():
    profile = chain(blocks=4, samples=(2,), flat=False, whole=(WholeStep(2, 8.0, 20.0, 2.0),))
    assert sum_gap(profile) == {2: pytest.approx((8 + 16) / 30 - 1)}
