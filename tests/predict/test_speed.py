"""The simulator stays fast: the benchmark, run once."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainplan.plan.rules import SPLIT_BACKWARD
from trainplan.program.schedules import SCHEDULES

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "clock.py"
# On a quiet core most goals hold with a tenth to a half to spare, and lockstep plays 9.3 of the 10 million operations a
# second that are the goal (docs/speed.md). Tests share the machine with others: with twice as many
# busy processes as cores, and caches that are not one's own, the same code was seen to take up to two and a half times
# as long. Four times the goal is still far below what an operation at a time in Python would need.
SLACK = "4"


@pytest.mark.alone
def test_the_clock_is_fast_enough() -> None:
    command = [sys.executable, str(BENCHMARK), "--assert", "--slack", SLACK, "--rounds", "5"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[2:]]
    found = {row[0]: int(row[1].replace(",", "")) for row in rows}
    assert found == {schedule: operations(schedule) for schedule in SCHEDULES}  # nothing was left out to be fast


def operations(schedule: str, stages: int = 64, micro_batches: int = 512) -> int:
    """Passes, messages there and back with two ends each, and steps."""
    passes = 3 if schedule in SPLIT_BACKWARD else 2
    boundaries = stages - 1 - (schedule == "zb-v")  # at the bottom of the V a rank hands over to itself
    copies = 2 if schedule.startswith(("gems", "chimera")) else 1
    exchanges = stages + 1 if copies > 1 else 0  # of the gradients of every stage, and of the loss
    ticks = micro_batches + stages - 1  # in either direction, and messages between any two of them
    barriers = 2 * (2 * ticks - 1) if schedule == "lockstep" else 0
    return micro_batches * (passes * stages + 4 * boundaries) + copies * stages + exchanges + barriers


def test_a_missed_goal_is_told() -> None:
    command = [sys.executable, str(BENCHMARK), "--assert", "--slack", "0.001", "--rounds", "1", "--only", "1f1b"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "1f1b: " in done.stdout
    assert "and the goal is 0.15 s" in done.stdout


def test_the_kept_figures_reach_the_goal() -> None:
    """On one core: 64 stages and 512 micro-batches in 0.15 s, and ten million operations a second. (In lockstep nine:
    every operation there waits for a barrier.)"""
    kept = json.loads((BENCHMARK.parent / "data" / "clock-2-cores.json").read_text())
    rows = {row["schedule"]: row for row in kept["rows"]}
    assert set(rows) == set(SCHEDULES)
    for schedule, row in rows.items():
        assert row["operations"] == operations(schedule)
        assert row["total"] < 0.15, row
        assert row["operations"] / row["play"] > (9e6 if schedule == "lockstep" else 10e6), row
