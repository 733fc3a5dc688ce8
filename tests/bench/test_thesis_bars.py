"""The thesis's bars, on our own machines: how far its predictions were off, which ours have to be under.

One GPU 15 % at most; Horovod 15 % for four of six networks, and more for VGG-11 and MobileNet; torchgpipe 20 to 76 %;
of PipeDream there was no prediction, and none of ours yet (`trainplan systems pipedream`). Timings of a machine have a
noise floor, and nobody can be nearer than twice that.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest

from trainplan import files
from trainplan.api import bench_run
from trainplan.bench.cases import NETWORKS
from trainplan.bench.results import Outcome, read

DATA = Path(__file__).parents[2] / "benchmarks" / "data"
BARS = {"single": 0.15, "horovod": 0.15, "torchgpipe-as-found": 0.20}
NOISE = 2.0  # times its floor
SHORT, HARD = DATA / "suite-slices", DATA / "suite-hard-2-cores"


def misses(outcomes: Sequence[Outcome]) -> list[str]:
    """What is further off than the thesis was, in words."""
    found = []
    for outcome in outcomes:
        for result in outcome.ran:
            bar = BARS.get(result.system)
            if bar is not None and result.row and abs(result.row.error) > max(bar, NOISE * result.row.noise_floor):
                off = f"{result.row.error:+.1%}, noise floor {result.row.noise_floor:.1%}"
                found.append(f"{result.system} on {outcome.name}: {off}")
    return found


def covered(outcomes: Sequence[Outcome]) -> set[tuple[str, str]]:
    """The networks that ran under systems that there is a bar for."""
    return {(outcome.network, result.system) for outcome in outcomes for result in outcome.ran if result.system in BARS}


def test_results_that_are_kept() -> None:
    """Every case of the suite that is among the data: none is further off than the thesis was."""
    kept = [
        path
        for path in sorted(DATA.rglob("*.json"))
        if files.kind(path) == "bench" and path.parent not in (SHORT, HARD)
    ]
    assert kept
    assert misses(read(kept)) == []


@pytest.mark.xfail(strict=True, reason="ResNet-18 alone is 18 % off: 4 of its 26 ms were a batch that was copied")
def test_results_where_batches_were_copied_unasked() -> None:
    """The same of four slices of a GPU (docs/bench.md): not reached in that run."""
    assert misses(read([SHORT])) == []


@pytest.mark.xfail(strict=True, reason="MobileNet v2 alone, beside a worker that is held up: 17.5 %, noise floor 3.6")
def test_results_where_it_matters_what_is_chosen() -> None:
    """Of the cases with conditions one row is over its bar (docs/bench.md)."""
    assert misses(read([HARD])) == []


def test_no_other_row_of_these_is_over_its_bar() -> None:
    (row,) = misses(read([HARD]))
    assert row.startswith("single on mobilenetv2:cifar10 x2, half of them 2 times slower")


@pytest.mark.slow
def test_the_suite_again(tmp_path: Path) -> None:
    """All six networks on MNIST, two workers. A quarter of an hour on two quiet cores."""
    bench_run(
        str(tmp_path), networks=",".join(NETWORKS), datasets="mnist", systems=",".join(BARS), workers="2", batch=8,
        steps=4, rounds=3, seconds=8.0, quick=True,
    )  # fmt: skip
    outcomes = read([tmp_path])
    assert covered(outcomes) == {(network, system) for network in NETWORKS for system in BARS}
    assert misses(outcomes) == []
