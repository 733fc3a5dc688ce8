"""Plans for the workers that there are now: as good as a search finds, with what was asked for where that goes."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from search.models import model
from trainplan.cluster.parse import cluster
from trainplan.cluster.part import part
from trainplan.errors import RunError
from trainplan.plan.text import parse, text, title
from trainplan.report.ran import Ran
from trainplan.search.recommend import recommend
from trainplan.search.replan import Asked, Replanned, replan, request_of
from trainplan.solve.resolve import resolve
from trainplan.units import MIB

BATCH = 16
PROFILE = model(5, 8, "TitanRTX", False)
FOUR = cluster("4xTitanRTX")
LINES = (
    "dp=4", "dp=2 pp=2 schedule=1f1b micro=4", "zero3 dp=4", "pp=4 schedule=gpipe micro=5 recompute=full",
    "ps-bsp dp=3 servers=1", "horovod dp=4", "dp=2 pp=2 schedule=lockstep micro=4", "dp=2,1,1 pp=3 schedule=1f1b",
    "pp=4 schedule=1f1b stages=2,4,6", "dp=4 exchange=ring bucket=1MiB", "dp=4 ratio=2,1,1,1", "single",
    "pp=2 schedule=0F0,0F1,0B0,0B1|1F0,1B0,1F1,1B1", "dp=2 pp=2 partition=torchgpipe",
)  # fmt: skip
WORKERS = st.sets(st.integers(0, 3), min_size=1).map(sorted)


def replanned(line: str, now: list[int]) -> Replanned:
    before = resolve(parse(line), PROFILE, FOUR, BATCH)
    return replan(Asked(parse(line), PROFILE, FOUR, BATCH, before.world), before, range(before.world), now)


@settings(max_examples=12)
@given(line=st.sampled_from(LINES), now=WORKERS)
def test_every_word_is_kept_or_said_not_to_be(line: str, now: list[int]) -> None:
    found = replanned(line, now)
    assert found.after.fits
    assert found.plan.world <= len(now)
    assert found.after.batch == BATCH
    request, left = parse(line), " ".join(row.words for row in found.left).split()
    assert all(row.why for row in found.left)
    for word in text(replace(request, key="")).split():
        field = word.partition("=")[0]
        if word in left or field == "partition":  # by whom it was cut is not in a plan
            continue
        value = request.order if field == "schedule" and request.order else getattr(request, field)
        kept = found.plan.order if field == "schedule" and request.order else getattr(found.plan, field)
        assert kept == value, f"{word} is not in {text(found.plan)!r}, and nobody said so"


@pytest.mark.parametrize("now", [[0, 1, 3], [2, 3], [1]], ids=str)
def test_where_only_replicas_were_asked_for_it_is_the_best_there_is(now: list[int]) -> None:
    best = recommend(PROFILE, part(FOUR, now), BATCH).best
    found = replanned("dp=4", now)
    assert (found.plan, found.after.step_s) == (best.plan, best.step_s)
    assert found.before.plan.dp == 4


@pytest.mark.parametrize(
    ("line", "now", "left"),
    [
        ("dp=2 pp=2 schedule=1f1b micro=4", [0, 1], ["dp=2"]),
        ("dp=2 pp=2 schedule=1f1b micro=4", [0], ["dp=2", "pp=2", "schedule=1f1b"]),
        ("pp=4 schedule=gpipe micro=5 recompute=full", [0, 2, 3], ["pp=4"]),
        ("pp=4 schedule=1f1b stages=2,4,6", [0, 1, 2], ["pp=4", "stages=2,4,6"]),
        ("zero3 dp=4", [3], ["dp=4", "zero=3"]),
        ("dapple partition=dapple", [0, 1, 2], []),
        ("horovod dp=4", [3], ["dp=4", "exchange=horovod"]),
        ("ps-bsp dp=3 servers=1", [0, 1], ["dp=3"]),
        ("ps-bsp dp=3 servers=1", [0], ["dp=3", "exchange=ps-bsp servers=1"]),
    ],
)
def test_no_more_is_left_out_than_must_be(line: str, now: list[int], left: list[str]) -> None:
    assert sorted(row.words for row in replanned(line, now).left) == sorted(left)


def test_more_workers_are_made_use_of() -> None:
    asked = Asked(parse("dp=2"), PROFILE, FOUR, BATCH, 2)
    before = resolve(asked.request, PROFILE, FOUR, BATCH)
    found = replan(asked, before, (0, 1), range(4))
    assert found.is_other
    assert found.workers == (2, 4)
    assert found.plan.world == 4
    assert found.after.step_s < 0.6 * found.before.step_s
    slow = replan(replace(asked, cluster=cluster("4xcpu"), profile=model(5, 8, "cpu")), before, (0, 1), (0, 1))
    assert not slow.is_other  # nobody has come or gone


def test_with_as_many_as_at_the_beginning_it_is_what_was_asked_for() -> None:
    """A worker was lost, and has come back."""
    line = "dp=2 pp=2 schedule=1f1b micro=4"
    fewer = replanned(line, [0, 1, 3])
    asked = Asked(parse(line), PROFILE, FOUR, BATCH, 4)
    again = replan(asked, fewer.plan, (0, 1, 3), range(4))
    assert (again.plan, again.left) == (fewer.before.plan, ())


def test_which_device_has_gone_makes_a_difference() -> None:
    """Of two new GPUs and two old ones."""
    mixed = cluster(str(Path(__file__).parents[2] / "examples" / "mixed.yaml"))
    fast = mixed.device(0).name
    profile = model(5, 8, fast)
    asked = Asked(parse("dp=4"), profile, mixed, 64, 4)
    before = resolve(asked.request, profile, mixed, 64)
    without_new, without_old = (replan(asked, before, range(4), now) for now in ((1, 2, 3), (0, 1, 2)))
    assert without_new.after.step_s > 1.02 * without_old.after.step_s


def test_memory_is_respected_and_where_nothing_fits_the_numbers_are_said() -> None:
    """Two replicas have no room where four had it, so another plan goes on; then there is room for nothing at all."""
    roomy = replanned("dp=4", [0, 1])
    assert roomy.plan.dp == 2
    size = roomy.after.peak_bytes // MIB  # without what is kept free of it
    found = replanned(f"dp=4 memory={size}MiB", [0, 1])
    assert found.before.fits
    assert found.after.peak_bytes <= found.after.limit_bytes < size * MIB
    assert found.plan != roomy.plan
    asked = Asked(parse("dp=4 memory=260MiB"), PROFILE, FOUR, BATCH, 4)
    with pytest.raises(RunError, match=r"going on with 1 worker and a batch of 16: no plan fits: .*\d.*GiB"):
        replan(asked, found.plan, range(4), [2])


def test_what_a_change_takes_is_told() -> None:
    asked = Asked(parse("dp=4"), PROFILE, FOUR, BATCH, 4)
    found = replan(asked, resolve(asked.request, PROFILE, FOUR, BATCH), range(4), (0, 1, 3), 6, 2.5)
    assert found.lost_s == pytest.approx(6 * found.before.step_s + 2.5)
    said = str(found)
    assert said.startswith("dp=4 is not kept: it was for 4 workers\n4 → 3 workers: from dp=4 to ")
    assert "the batch stays 16 samples" in said
    assert "6 steps since the last checkpoint to train again, and 2.50 s to start" in said
    assert found.to_json()["lost_s"] == found.lost_s
    ran = Ran(found.after, (), (3.0, 2.0), (1, 1, 1), "out", 0.0, warm_up=9, changes=(found,))
    assert f"\nworkers changed, 4 → 3: dp=4 → {title(found.plan)}\n" in str(ran)
    assert "the first 9 steps come before the last change of workers, or warm up, and do not count" in ran.summary()
    assert ran.to_json()["changes"] == [found.to_json()]


def test_a_plan_is_a_request_with_nothing_left_open() -> None:
    for line in LINES:
        plan = resolve(parse(line), PROFILE, FOUR, BATCH)
        assert replace(resolve(request_of(plan), PROFILE, FOUR, BATCH), key=plan.key) == plan
