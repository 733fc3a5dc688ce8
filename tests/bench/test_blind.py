"""Sixty-three steps of an H200 that were estimated before they were run: what they reached and, by name, missed.

The goal is 8 % in the median, and no step above 30 %. Both are asked of the measurement and of its repetition.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest
from benchmarks import estimates

ROOT = Path(__file__).parents[2]
Key = tuple[str, int, str]
GOAL, MOST = 0.08, 0.30
GPT = "gpt:layers={},hidden={},heads={},seq={},vocab=50257"
OVER: dict[str, dict[Key, float]] = {
    "estimates-blind": {
        ("resnet18:cifar10", 64, "bf16"): -0.308,
        ("vgg11:cifar10", 64, "bf16"): -0.335,
        ("vgg16:cifar10", 64, "pure-bf16"): -0.301,
        ("resnet18:imagenet", 16, "pure-bf16"): -0.301,
        (GPT.format(12, 768, 12, 512), 2, "tf32"): -0.312,
    },
    "estimates-blind-repeated": {
        ("resnet50:cifar10", 64, "pure-bf16"): -0.347,
        ("resnet152:cifar10", 64, "tf32"): -0.329,
        ("vgg11:cifar10", 64, "bf16"): -0.340,
        ("vgg16:cifar10", 64, "pure-bf16"): -0.372,
        ("resnet18:imagenet", 16, "pure-bf16"): -0.354,
        ("resnet152:imagenet", 48, "bf16"): -0.318,
        ("mobilenetv2:imagenet", 16, "bf16"): -0.311,
        (GPT.format(24, 1024, 16, 768), 2, "bf16"): -0.315,
        (GPT.format(36, 1280, 20, 512), 2, "pure-bf16"): -0.328,
        (GPT.format(36, 1280, 20, 512), 4, "pure-bf16"): -0.329,
    },
}


def kept(name: str) -> dict[Key, estimates.Case]:
    return estimates.Rows(str(ROOT / "benchmarks" / "data" / f"{name}.json")).rows


CASES = {name: kept(name) for name in OVER}
FIRST, AGAIN = CASES.values()


def errors(name: str) -> dict[Key, float]:
    """Of what was estimated at first, also where it was measured once more."""
    return {key: FIRST[key].estimated_s / case.measured_s - 1 for key, case in CASES[name].items()}


def test_all_of_the_blind_list_was_measured_twice() -> None:
    asked = {(name, size, precision) for name, sizes, precision in estimates.wanted("blind") for size in sizes}
    assert len(asked) == 63
    for rows in CASES.values():
        assert set(rows) == asked
        assert all(row.measured_s > 0 and not row.error for row in rows.values())


@pytest.mark.parametrize(("name", "middle", "worst"), [(name, *pair) for name, pair in zip(
    OVER, [(0.061, 0.335), (0.089, 0.372)], strict=True)])  # fmt: skip
def test_what_they_came_to_is_what_is_told(name: str, middle: float, worst: float) -> None:
    off = list(map(abs, errors(name).values()))
    assert median(off) == pytest.approx(middle, abs=5e-4)
    assert max(off) == pytest.approx(worst, abs=5e-4)
    found = {key: error for key, error in errors(name).items() if abs(error) > MOST}
    assert found == pytest.approx(OVER[name], abs=5e-4)


def _medians() -> Iterator[object]:
    for name in OVER:
        missed = name == "estimates-blind-repeated"
        marks = [pytest.mark.xfail(strict=True, reason="8.9 %: the host was slower the second time")] if missed else []
        yield pytest.param(name, marks=marks)


@pytest.mark.parametrize("name", _medians())
def test_the_goal_in_the_median(name: str) -> None:
    assert median(map(abs, errors(name).values())) < GOAL


def _steps() -> Iterator[object]:
    for name in OVER:
        for key in FIRST:
            off = OVER[name].get(key)
            marks = [pytest.mark.xfail(strict=True, reason=f"{off:+.1%}")] if off is not None else []
            yield pytest.param(name, key, marks=marks, id=f"{name}-{key[0].replace('/', '.')}-{key[1]}")


@pytest.mark.parametrize(("name", "key"), _steps())
def test_the_goal_of_every_step(name: str, key: Key) -> None:
    assert abs(errors(name)[key]) <= MOST


def _by_device(name: str) -> list[float]:
    """Errors of steps that are bound by the device as estimated, and as issuing them was measured to take."""
    held = estimates.HOST_BOUND
    return [
        abs(errors(name)[key])
        for key, case in CASES[name].items()
        if not FIRST[key].host_bound and case.issue_s <= held * case.measured_s
    ]


def test_steps_that_wait_for_no_host_reach_both_goals() -> None:
    for name, count, middle, worst in (
        ("estimates-blind", 37, 0.041, 0.265),
        ("estimates-blind-repeated", 32, 0.047, 0.258),
    ):
        off = _by_device(name)
        assert len(off) == count
        assert median(off) == pytest.approx(middle, abs=5e-4)
        assert max(off) == pytest.approx(worst, abs=5e-4)


def test_the_page_says_so() -> None:
    page = " ".join((ROOT / "docs" / "estimates.md").read_text(encoding="utf-8").split())
    moved = [
        key for key, case in FIRST.items()
        if not case.host_bound and abs(AGAIN[key].measured_s / case.measured_s - 1) > 0.05
    ]  # fmt: skip
    by_device = sum(not case.host_bound for case in FIRST.values())
    waited = [
        sum(case.issue_s > estimates.HOST_BOUND * case.measured_s for case in rows.values()) for rows in CASES.values()
    ]
    assert "The goal is 8 % in the median and none over 30." in page
    assert "five of 63 are over 30 %, and once more 10." in page
    assert (len(OVER["estimates-blind"]), len(OVER["estimates-blind-repeated"])) == (5, 10)
    assert (
        f"Of the {by_device} that are bound by the device as estimated, {by_device - len(moved)} took as long" in page
    )
    assert f"{waited[0]} of 63 waited for their host, and {waited[1]} once more" in page
    assert json.loads((ROOT / "benchmarks/data/estimates-gpu.json").read_text())["data"]  # what ran there before
