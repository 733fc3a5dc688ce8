"""What is recommended is the best there is, fits, and comes with reasons."""

import itertools
import subprocess
import sys
from dataclasses import replace

import pytest

import processor
from search.models import SIZES, model
from synthetic import chain
from trainplan.cluster.overrides import with_overrides
from trainplan.cluster.parse import cluster
from trainplan.errors import PlanError
from trainplan.plan import rules
from trainplan.plan.plan import WORDS, Plan, plan
from trainplan.plan.rules import SPLIT_BACKWARD
from trainplan.plan.text import parse, text
from trainplan.predict.predict import predict
from trainplan.profile.profile import Profile
from trainplan.report.answers import Recommended
from trainplan.search.columns import space
from trainplan.search.distinct import same_program
from trainplan.search.recommend import recommend
from trainplan.search.space import LEFT_OUT, device_counts, shape_of
from trainplan.solve.limits import limited, usable
from trainplan.solve.partition.ranges import Tables
from trainplan.solve.resolve import NOTHING, draft, solve
from trainplan.units import GIB, MIB

BATCH = 16


@pytest.fixture(scope="module")
def four():
    return cluster("4xTitanRTX")


@pytest.mark.parametrize(("seed", "in_parts", "memory"), [(1, True, None), (2, False, 600 * MIB)])
def test_the_winner_is_that_of_simulating_everything(seed, in_parts, memory, four):
    """Up to what is tried out afterwards, which only makes it faster."""
    profile = model(seed, blocks=4, in_parts=in_parts)
    there, tables = limited(four, memory), Tables(profile)
    whole = space(profile, there, 4)
    plans = [draft(whole.sketch(row), there, 4, tables) for row in range(len(whole))]
    best = min(p.step_s for p in plans if p.fits)
    found = recommend(profile, four, 4, memory=memory, top=3)
    assert found.considered == len(whole)
    assert found.simulated < len(whole) / 2
    assert (found.left, found.better, found.gap) == (0, 0, 0.0)
    assert found.bound_s <= best * (1 + 1e-9)
    assert found.best.step_s <= best * (1 + NOTHING)


@pytest.mark.parametrize("memory", [None, 660 * MIB])
def test_what_a_search_keeps_from_plan_to_plan_changes_nothing(memory):
    """Seconds of blocks, messages and sums are worked out once: predicted alone, a plan is the same to the last bit."""

    def subject():
        made = model(3, in_parts=True)
        sizes = ((c, 1e5 * (2 + c.producer)) for c in made.crossings)
        crossings = tuple(replace(c, bytes_per_sample=size, fixed_bytes=0) for c, size in sizes)
        return replace(made, crossings=crossings), limited(cluster("2x2xTitanRTX"), memory)

    found = recommend(*subject(), BATCH)
    rows = [row.prediction for row in (*found.ranked, *found.rejected)]
    assert len({p.plan.schedule for p in rows}) > 3
    for p in rows:
        assert predict(p.plan, *subject(), BATCH) == p, text(p.plan)


def test_ranked_by_time_without_duplicates(four):
    found = recommend(model(), four, BATCH)
    times = [row.prediction.step_s for row in found.ranked]
    assert times == sorted(times)
    assert len({shape_of(row.prediction.plan) for row in found.ranked}) == len(found.ranked) > 3
    assert found.best is found.ranked[0].prediction


@pytest.mark.parametrize("memory", [900 * MIB, 700 * MIB, 660 * MIB])
def test_memory_is_never_broken(memory, four):
    found = recommend(model(), four, BATCH, memory=memory)
    assert found.ranked
    for row in found.ranked:
        assert row.prediction.fits
        assert row.prediction.peak_bytes <= memory * 0.94
    for row in found.rejected:
        assert row.over_bytes > 0


def test_more_memory_is_never_slower(four):
    sizes = [560 * MIB, 660 * MIB, 700 * MIB, 900 * MIB, 1400 * MIB, 24 * GIB]
    found = [recommend(model(3), four, BATCH, memory=size, top=1) for size in sizes]
    times = [r.best.step_s if r.ranked else float("inf") for r in found]
    for less, more in itertools.pairwise(times):
        assert more <= less * 1.001


def test_a_faster_link_is_never_slower():
    slow = cluster("2x2xTitanRTX")
    times = []
    for rate in ("0.1GB/s", "1GB/s", "10GB/s", "100GB/s"):
        there = with_overrides(slow, {"link": rate})
        times.append(recommend(model(4), there, BATCH, top=1).best.step_s)
    assert times == sorted(times, reverse=True)


def test_says_when_one_device_is_best():
    there = with_overrides(cluster("4xTitanRTX"), {"link": "0.01GB/s", "latency": "500ms"})
    found = recommend(model(), there, BATCH, top=2)
    assert found.best.plan.world == 1
    assert "it fits on one device, and distributing it is slower because" in found.note
    assert "exposed communication" in found.note


def test_says_what_distributing_gains(four):
    found = recommend(model(), four, BATCH)
    assert found.best.plan.world == 4
    assert "it fits on one device" in found.note
    assert "× as fast on 4 devices" in found.note


def test_one_device_alone():
    found = recommend(model(), cluster("1xTitanRTX"), BATCH)
    assert found.note == "it fits on one device, and there is no other"


def test_reasons_name_what_limits_a_plan():
    slow = with_overrides(cluster("4xTitanRTX"), {"link": "1GB/s"})
    found = recommend(model(), slow, BATCH, top=30)
    why = {text(row.prediction.plan): row.why for row in found.ranked}
    line, ddp = next((plan, words) for plan, words in why.items() if plan.startswith("dp=4 "))
    moved = "gradients and weights" if "zero=" in line else "gradients"  # whichever the clock likes better
    assert f"exposed communication (0.125 GiB of {moved} over" in ddp
    pipeline = next(words for plan, words in why.items() if plan.startswith("pp=4 schedule=1f1b "))
    assert "4 stages fill and drain for" in pipeline
    fewer = next(words for plan, words in why.items() if plan.startswith("pp=3 schedule=1f1b ") and "full" not in plan)
    assert "3 of 4 devices" in fewer
    assert all("slower: " in words for words in list(why.values())[2:])


def test_what_does_not_fit_comes_with_a_change_that_does(four):
    """The change is a line that can be typed: it is, and it fits."""
    profile, memory = model(), 660 * MIB
    found = recommend(profile, four, BATCH, memory=memory)
    assert found.rejected
    typed = 0
    for row in found.rejected:
        p = row.prediction
        assert "needs" in row.why
        assert "and has 0.606 GiB" in row.why
        if row.change.startswith("devices with"):
            continue
        words, batch = row.change.split(" (peak")[0].split(), BATCH
        if words[0] == "--batch":
            words, batch = [], int(words[1])
        choices = dict(word.split("=") for word in text(p.plan).split() if "=" in word)
        changed = choices | dict(word.split("=") for word in words)
        if words:
            changed.pop("stages", None)
        if "pp" in words[0:1] or any(word.startswith("pp=") for word in words):
            changed.setdefault("schedule", "1f1b")
        line = " ".join(f"{key}={value}" for key, value in changed.items())
        request = replace(parse(line), memory=memory)
        assert solve(request, profile, four, batch).fits, (text(p.plan), row.change)
        typed += 1
    assert typed


def test_recomputation_is_offered_where_it_is_what_fits():
    """Activations fill one device; there is no other."""
    profile = model(saved=40 * MIB, weights=MIB)
    one = cluster("1xTitanRTX")
    found = recommend(profile, one, BATCH, memory=850 * MIB)
    assert found.best.plan.recompute == "full" or found.best.plan.micro > 1
    alone = recommend(profile, one, 1, memory=810 * MIB)
    assert [text(row.prediction.plan) for row in alone.ranked] == ["recompute=full"]
    assert alone.rejected[0].change.startswith("recompute=full (peak")


def test_nothing_fits(four):
    found = recommend(model(), four, BATCH, memory=510 * MIB)
    assert not found.ranked
    assert found.note == "nothing fits"
    assert found.rejected
    with pytest.raises(PlanError, match=r"needs .* GiB"):
        _ = found.best


def test_json_has_the_promised_keys(four):
    data = recommend(model(), four, BATCH, memory=660 * MIB).to_json()
    assert {"plans", "rejected", "considered", "simulated", "pruned", "note"} <= data.keys()
    keys = {
        "plan", "fits", "step_s", "samples_per_s", "epoch_s", "peak_bytes", "breakdown", "bubble", "exposed_comm_s",
        "mfu", "profile", "error", "why",
    }  # fmt: skip
    assert keys <= data["plans"][0].keys()
    assert {"over_bytes", "why", "change"} <= data["rejected"][0].keys()
    assert data["pruned"] == data["considered"] - data["simulated"]
    assert (data["left"], data["floor_s"]) == (0, None)


def test_a_search_that_stops_early_says_so(monkeypatch):
    """Where ranks slow each other down as if they were one, no bound tells plans apart: all are simulated, as far as
    that is not too much work."""
    there = replace(cluster("1x3xTitanRTX"), contention=(1.0, 2.0, 3.0))
    profile = model(blocks=3)
    whole = recommend(profile, there, 4)
    assert whole.left == 0
    monkeypatch.setattr("trainplan.search.recommend.WORK", 3000)
    found = recommend(profile, there, 4)
    assert found.simulated < whole.simulated
    assert 0 < found.left <= found.considered - found.simulated
    assert found.floor_s <= whole.best.step_s <= found.best.step_s * (1 + NOTHING)
    assert f"stopped early: {found.left:,} plans were left" in str(Recommended(found))


def test_what_cannot_be_asked(four):
    with pytest.raises(PlanError, match="at least one sample"):
        recommend(model(), four, -1)
    with pytest.raises(PlanError, match="at least one plan"):
        recommend(model(), four, BATCH, top=0)


def test_a_batch_smaller_than_the_cluster(four):
    found = recommend(model(), four, 3)
    assert all(row.prediction.plan.dp <= 3 for row in found.ranked)


def test_device_counts_stay_few_on_large_clusters():
    assert device_counts(cluster("5xT4")) == [1, 2, 3, 4, 5]
    assert device_counts(cluster("100x8xH100-SXM"))[-2:] == [512, 800]


def test_usable_memory_is_that_of_the_smallest(four):
    assert usable(four) == four.device(0).memory_bytes * 0.94 - four.device(0).context_bytes


def test_answers_in_a_blink_and_without_torch(tmp_path):
    """A saved profile and eight devices, in a fresh process: no torch, and less than a second once compiled (more where
    the processor is slow today).

    1,800 plans of nine orders of work. Nothing is kept from one search to the next: each has a profile of its own.
    """
    model(blocks=24).save(tmp_path / "profile.json")
    code = f"""
import sys, time
from trainplan.cluster.parse import cluster
from trainplan.profile.profile import Profile
from trainplan.search.recommend import recommend
times = []
for _ in range(5):
    profile, there = Profile.load({str(tmp_path / "profile.json")!r}), cluster("2x4xTitanRTX")
    started = time.process_time()
    recommend(profile, there, 64)
    times.append(time.process_time() - started)
assert "torch" not in sys.modules, "torch was imported"
print(min(times))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert float(ran.stdout) < processor.slower()


# -- orders of work ----------------------------------------------------------------------------------------------------


def test_every_order_of_work_is_searched():
    """All words of a plan, but for what needs slices, and gpipe with barriers; and the answer says so."""
    there = cluster("4xTitanRTX")

    def orders(in_parts: bool) -> set[str]:
        whole = space(model(blocks=16, in_parts=in_parts), there, BATCH)
        assert all(rules.check(sketch, BATCH, 4) for sketch in map(cut, map(whole.sketch, range(0, len(whole), 17))))
        return {WORDS["schedule"][word] for word in whole.column("schedule")}

    assert set(WORDS["schedule"]) - orders(True) == {"terapipe", "lockstep"} == set(LEFT_OUT)
    assert orders(True) - orders(False) == set(SPLIT_BACKWARD)
    said = str(Recommended(recommend(model(blocks=4), there, 4)))
    assert all(f"schedule={word}" in said for word in LEFT_OUT)
    assert "parameter servers" in said
    assert "tensors of plans that fit leave 6.0 % of every device free" in said


def cut(sketch: Plan) -> Plan:
    return replace(sketch, stages=tuple(range(1, sketch.wanted)))


def test_orders_that_are_the_same_program_are_one_row(four):
    """Two micro-batches over two stages: both orders of Chimera are one; so are two of the zero-bubble orders, until
    there are micro-batches enough for one of them to begin with more."""
    found = recommend(model(in_parts=True), four, BATCH, top=60)
    rows = [row.prediction for row in found.ranked]
    for a, b in itertools.combinations(rows, 2):
        assert not same_program(a, b), (text(a.plan), text(b.plan))
    tables = Tables(model(in_parts=True))
    for one, other, micro in (("chimera", "chimera-doubled", 2), ("zb-h1", "zb-h2", 2), ("zb-h1", "zb-h2", 4)):
        pair = [draft(plan(pp=2, schedule=s, micro=micro, blocks=8), four, BATCH, tables) for s in (one, other)]
        assert same_program(*pair) == (micro == 2)


def test_an_order_that_the_clock_finds_faster_wins():
    """Weights too dear to exchange, so a pipeline: several stages a rank fill it sooner, backward in two parts sooner
    yet where it costs no more than the whole."""
    dear = with_overrides(cluster("4xTitanRTX"), {"link": "2GB/s"})
    profile = chain(
        blocks=8, forward=1e-3, backward=2e-3, weights=800 * MIB, samples=SIZES, flat=False, device="TitanRTX"
    )
    found = recommend(profile, dear, BATCH, top=6)
    assert found.best.plan.pp > 1
    by_order = {row.prediction.plan.schedule: row.prediction.step_s for row in reversed(found.ranked)}
    assert found.best.plan.schedule in ("interleaved", "looped")
    assert by_order["1f1b"] > found.best.step_s * 1.02
    lost = next(row for row in found.ranked if row.prediction.plan.schedule == "1f1b")
    assert "more of bubble (4 stages fill and drain for" in lost.why
    halves = [replace(b, backward_input_s=b.forward_s, backward_weight_s=b.forward_s) for b in profile.blocks]
    free = replace(profile, blocks=tuple(halves))
    assert recommend(free, dear, BATCH, top=4).best.plan.schedule.startswith("zb-")


def test_states_are_shared_out_where_memory_asks_for_it_or_the_clock():
    """Four devices, 16 blocks of 100 MiB of weights with AdamW: whole states are 6.25 GiB a rank, and 2.7 with all but
    the weights shared out."""
    heavy = chain(
        16, weights=100 * MIB, forward=0.5, backward=1.0, state_bytes_per_parameter=8.0, device="TitanRTX",
        samples=(1, 8), flat=False,
    )  # fmt: skip
    there = cluster("4xTitanRTX")

    def replicas(profile: Profile, memory: int | None = None) -> Plan:
        rows = [row.prediction for row in recommend(profile, there, 8, memory=memory, top=12).ranked]
        (found,) = [p for p in rows if (p.plan.dp, p.plan.pp, p.plan.recompute) == (4, 1, "none")]
        assert found.fits
        return found.plan

    assert replicas(heavy).zero == 0
    assert replicas(heavy, memory=4 * GIB).zero == 2
    # A step of the optimizer that takes long is shared out though there is room.
    slow = replace(heavy, blocks=tuple(replace(block, update_s=1.0) for block in heavy.blocks))
    assert replicas(slow).zero == 1
    # … but not of one that may look at whole weights, which no run would share out.
    whole = replace(slow, optimizer="adafactor")
    assert replicas(whole).zero == 0
    with pytest.raises(PlanError, match=r"its optimizer, adafactor, .*Try zero=0, or one of SGD"):
        predict(plan(dp=4, zero=1, blocks=16), whole, there, batch=8)
    with pytest.raises(PlanError, match=r"its optimizer is adafactor, .*Try exchange=all-reduce"):
        predict(plan(dp=4, exchange="p3", slice=MIB, blocks=16), whole, there, batch=8)


@pytest.mark.system("zero-r", "P")
def test_zero_r_is_the_last_resort() -> None:
    """Where recomputation does not save enough, what blocks read goes to the host; and only there."""
    profile = chain(12, saved=50 * MIB, boundary=100 * MIB, weights=MIB, device="TitanRTX")
    there = cluster("TitanRTX")
    plain = recommend(profile, there, 1)
    assert all(row.prediction.plan.offload == "none" for row in plain.ranked)
    least = min(solve(parse(f"recompute={word}"), profile, there, 1).peak_bytes for word in ("none", "full"))
    found = recommend(profile, there, 1, memory=int(least / 0.94) - 50 * MIB)
    assert found.ranked
    for row in found.ranked:
        assert row.prediction.plan.away
        assert row.prediction.fits
    assert "since nothing fits without" in found.ranked[0].why
    smaller = recommend(profile, there, 1, memory=there.device(0).context_bytes + 64 * MIB)
    assert not smaller.ranked
    assert smaller.rejected[0].change
