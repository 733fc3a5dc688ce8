"""Predictions: what they are made of, and what must hold for all of them."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from synthetic import chain
from tests.predict.places import cluster
from tests.program.strategies import Case, cases, examples
from trainplan.cluster.cluster import Link, Pair, Slowdown
from trainplan.errors import PlanError
from trainplan.plan.plan import plan
from trainplan.predict.accuracy import known_error
from trainplan.predict.cards import flows_of
from trainplan.predict.clock import play
from trainplan.predict.cost import Setting, costs
from trainplan.predict.memory import peaks
from trainplan.predict.predict import predict, replicas_alike, step_seconds
from trainplan.program.lower import lower


def two_by_two(**fields):
    choices = {"dp": 2, "pp": 2, "micro": 4, "schedule": "1f1b", "stages": (2,), "blocks": 4, **fields}
    return plan(**choices)


# -- replicas that are alike are simulated once -------------------------------------------------------------------


@examples(60)
@given(
    cases(placed=False, dp=2), st.sampled_from([Slowdown(), Slowdown(2.0, 1.5, 3.0, 1.0, 2.5, 1.5)]), st.booleans(),
    st.sampled_from([1, 2, 4]),
)  # fmt: skip
def test_one_replica_stands_for_all(case: Case, slowdown: Slowdown, whole: bool, nodes: int) -> None:
    """Same time and same memory as with every replica played. A batch that does not divide makes the first slowest.

    On several nodes the replicas meet at the network cards. (There they must be as large as each other: the first
    replica would meet the others earlier or later than they really come.)
    """
    where = cluster(
        nodes, 8 // nodes, 10.0, 0.25, 0.125, network_rate=4.0, shared=True, slowdown=slowdown, backend=case.backend
    )
    assume(replicas_alike(case.plan, where, case.profile))
    batch = case.plan.dp * case.plan.micro * 2 if whole or nodes > 1 else case.batch
    found = {}
    for fold in (False, True):
        program = lower(case.plan, case.profile, batch, case.backend, steps=2, fold=fold)
        flows = flows_of(program, case.plan, where)
        played = play(program, *costs(program, Setting(case.profile, where)), slowdown, flows=flows)
        found[fold] = (step_seconds(played), played.makespan, peaks(played))
    (step, makespan, all_peaks), (folded_step, folded_makespan, folded_peaks) = found[False], found[True]
    assert folded_step == pytest.approx(step)
    assert folded_makespan == pytest.approx(makespan)
    for stage, peak in enumerate(folded_peaks):
        assert peak.bytes == max(all_peaks[rank].bytes for rank in case.plan.replicas_of(stage))


@pytest.mark.parametrize("schedule", ["gems", "chimera", "chimera-doubled"])
@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_one_replica_stands_for_all_in_two_directions(schedule: str, nodes: int) -> None:
    where = cluster(nodes, 8 // nodes, 10.0, 0.25, 0.125, network_rate=4.0)
    made = plan(dp=2, pp=4, micro=9, schedule=schedule, stages=(1, 4, 6), blocks=8)
    profile = chain(8, forward=0.5, backward=1.0)
    assert replicas_alike(made, where, profile)
    once, every = (predict(made, profile, where, 18, keep=keep) for keep in (False, True))
    assert len(once.peaks) < len(every.peaks)
    assert once.step_s == pytest.approx(every.step_s)
    assert once.exposed_comm_s == pytest.approx(every.exposed_comm_s)
    assert (once.peak_bytes, once.bubble) == (every.peak_bytes, pytest.approx(every.bubble))


def test_predictions_with_and_without_all_replicas_agree() -> None:
    where = cluster(devices=4, rate=100.0, latency=0.01)
    for choices in (plan(dp=4, bucket=1000, blocks=4), two_by_two(), two_by_two(recompute="full", schedule="gpipe")):
        once, all_of_them = (predict(choices, chain(4), where, keep=keep) for keep in (False, True))
        assert once.played is None
        assert all_of_them.played is not None
        assert once == replace(all_of_them, played=None, peaks=once.peaks)
        assert once.seconds_by_kind == pytest.approx(all_of_them.seconds_by_kind)


def test_replicas_whose_links_differ_are_not_alike() -> None:
    """Two nodes of three devices: one pipeline of three stages crosses after its first stage, the other later."""
    choices = plan(dp=2, pp=3, micro=2, schedule="gpipe", stages=(1, 2), blocks=3)
    three = chain(3)
    assert not replicas_alike(choices, cluster(nodes=2, devices=3), three)
    assert replicas_alike(choices, cluster(nodes=3, devices=2), three)
    assert replicas_alike(choices, cluster(nodes=1, devices=6), three)
    # Each replica within a node, or a stage a node: alike.
    assert replicas_alike(replace(choices, placement=(((0,), (1,), (2,)), ((3,), (4,), (5,)))), cluster(2, 3), three)
    # Devices 0 and 1 of the node have a link of their own: the pipeline that runs over it is another one.
    nodes = cluster(devices=4)
    (node,) = nodes.nodes
    fast = replace(nodes, nodes=(replace(node, pairs=(Pair(0, 2, Link("fast", 0.0, 1e9)),)),))
    assert replicas_alike(two_by_two(), nodes, chain(4))
    assert not replicas_alike(two_by_two(), fast, chain(4))
    # And the prediction is then that of the slower one.
    slow_step = predict(two_by_two(), chain(4), nodes).step_s
    assert predict(two_by_two(), chain(4), fast).step_s == pytest.approx(slow_step)


# -- properties ---------------------------------------------------------------------------------------------------


@examples(40)
@given(cases(placed=False, folds=st.just(False)), st.sampled_from([1.0, 5.0, 50.0]))
def test_a_faster_link_never_makes_a_plan_slower(case: Case, rate: float) -> None:
    """As long as communication does not slow down compute (test_clock.py shows what may happen then)."""
    times = []
    for factor in (1, 2, 16):
        where = cluster(devices=16, rate=rate * factor, latency=0.5 / factor, backend=case.backend)
        times.append(predict(case.plan, case.profile, where, case.batch, keep=True).played.makespan)
    assert times[0] >= times[1] - 1e-9
    assert times[1] >= times[2] - 1e-9


@examples(60)
@given(cases(placed=False, folds=st.just(False)), st.sampled_from([1.0, 100.0]))
def test_what_a_prediction_says_hangs_together(case: Case, rate: float) -> None:
    where = cluster(devices=16, rate=rate, latency=0.125, backend=case.backend, dispatch_s=0.125)
    found = predict(case.plan, case.profile, where, case.batch)
    assert found.step_s >= found.compute_s - 1e-9
    assert -1e-9 <= found.bubble <= 1
    assert 0 <= found.exposed_comm_s <= found.step_s
    assert found.samples_per_s * found.step_s == pytest.approx(case.batch)
    steps = -(-case.profile.samples_per_epoch // case.batch)
    assert found.epoch_s >= steps * found.step_s - 1e-9
    assert found.fits == (found.peak_bytes <= found.limit_bytes)
    assert sum(found.peak.breakdown.values()) == found.peak.bytes
    assert found.peak_bytes == found.peak.bytes == max(peak.bytes for peak in found.peaks)
    assert json.loads(json.dumps(found.to_json()))["step_s"] == found.step_s


# -- what is read off --------------------------------------------------------------------------------------------


def test_exposed_communication_is_what_free_communication_would_save() -> None:
    """Two buckets of 1000 bytes at 100 bytes/s on 2 ranks: 10 s each, the first beside 2 s of backward."""
    found = predict(plan(dp=2, bucket=1000, blocks=2), chain(2), cluster(devices=2, rate=100.0))
    # The sum of the losses, 8 bytes, comes last, and whoever trains gets it before the next step begins.
    assert found.step_s == pytest.approx(2 + 2 + 10 + 10 + 0.08)
    assert found.exposed_comm_s == pytest.approx(found.step_s - 6, abs=1e-9)
    assert found.seconds_by_kind["REDUCE_GRAD"] == pytest.approx(2 * 20)  # of both ranks
    assert found.bubble == pytest.approx(1 - 6 / found.step_s)


def test_an_epoch_has_whole_steps_and_fills_once() -> None:
    found = predict(two_by_two(dp=1), chain(4, samples_per_epoch=81), cluster(devices=2, rate=1e9), batch=8)
    assert found.epoch_s == pytest.approx(11 * found.step_s, rel=1e-6)


def test_memory_that_does_not_fit() -> None:
    found = [
        predict(plan(blocks=4, recompute=recompute), chain(4), cluster(devices=1, memory=memory))
        for recompute, memory in itertools.product(("none", "full"), (8000, 9000))
    ]
    assert [p.fits for p in found] == [False, True, False, True]
    assert found[0].limit_bytes == 7520  # 6 % kept free
    assert found[0].peak_bytes == 8110  # weights, gradients, and of the activations those of the last block to go


# -- refusals -----------------------------------------------------------------------------------------------------


def test_more_ranks_than_devices() -> None:
    with pytest.raises(PlanError, match="it needs 4 devices, and test has 2") as caught:
        predict(plan(dp=4, blocks=4), chain(4), cluster(devices=2))
    assert caught.value.instead == "a plan for 2 devices or fewer"


def test_a_profile_of_another_device() -> None:
    with pytest.raises(PlanError, match=r"a profile made on H100 for the cluster test.*devices are cpu") as caught:
        predict(plan(blocks=4), chain(4, device="H100"), cluster())
    assert caught.value.instead == "a profile for cpu"


def test_a_timeline_that_was_not_kept() -> None:
    with pytest.raises(PlanError, match="without keeping its timeline"):
        predict(plan(blocks=4), chain(4), cluster()).timeline()


def test_the_error_of_a_prediction_is_told_also_where_nobody_measured_it() -> None:
    for choices, kind in (
        (plan(), "single"), (plan(dp=2), "dp"), (plan(pp=2), "naive"), (plan(dp=2, pp=2), "dp × naive"),
    ):  # fmt: skip
        error = known_error(choices, "no such profile")
        assert error.kind == kind
        assert error.median is None
        assert "not measured" in str(error)


def test_the_error_of_one_order_is_not_told_of_another() -> None:
    """Of 1F1B and of other orders there are runs; of a given order, of recomputation and of replicas there are none."""
    known = known_error(plan(pp=2, schedule="1f1b"), "measured")
    assert known.runs > 10
    other = known_error(plan(pp=2, chunks=2, schedule="interleaved"), "measured")
    assert other.runs > 0
    assert (other.median, other.worst) != (known.median, known.worst)
    for unknown in (
        plan(order=("0F0,0B0", "1F0,1B0"), stages=(1,), blocks=2), plan(pp=2, schedule="1f1b", recompute="full"),
        plan(dp=2, pp=2, schedule="1f1b"),
    ):  # fmt: skip
        assert known_error(unknown, "measured").median is None, unknown


def test_of_steps_unlike_any_that_were_measured_no_error_is_told() -> None:
    """A step of a millisecond is latencies and hosts; the shortest that was measured of its kind took a hundred."""
    order = plan(pp=2, schedule="1f1b")
    usual = known_error(order, "measured")
    assert usual.median is not None
    assert known_error(order, "measured", step_s=0.3) == usual
    short, long = (known_error(order, "measured", step_s=step_s) for step_s in (0.000976, 60.0))
    for unlike in (short, long):
        assert (unlike.kind, unlike.median, unlike.worst, unlike.within, unlike.runs) == ("1f1b", None, None, None, 0)
    assert short.source == "steps under 71.3 ms: the shortest took 214 ms"
    assert long.source == "steps over 2.42 s: the longest took 805 ms"


def test_the_error_of_a_prediction_is_that_of_steps_like_it() -> None:
    """The same plan of two models, the blocks of one a hundred times faster."""
    order = plan(pp=2, micro=2, schedule="1f1b", stages=(2,), blocks=4)
    slow, fast = (
        predict(order, chain(4, forward, 2 * forward), cluster(devices=2, rate=1e12, backend="gloo"), 4)
        for forward in (0.02, 0.0002)
    )
    assert slow.error.median is not None
    assert fast.error.median is None
    assert fast.to_json()["error"]["source"].startswith("steps under ")


def test_the_timeline_is_the_program_with_times() -> None:
    found = predict(two_by_two(), chain(4), cluster(rate=50.0), keep=True)
    timeline, program = found.timeline(), found.played.program
    assert timeline.source == "predicted"
    assert timeline.duration == pytest.approx(found.played.makespan)
    for rank in range(4):
        assert sorted(e.name for e in timeline.of_rank(rank)) == sorted(program.rank_list(rank))
        compute = [e.name for e in timeline.of_rank(rank) if e.kind in ("F", "B", "STEP")]
        assert compute == [n for n in program.rank_list(rank) if program.kind[_op(program, rank, n)] in (0, 1, 13)]
    starts = [e.start for e in timeline.events]
    assert starts == sorted(starts)
    by_kind = timeline.seconds_by_kind()
    assert by_kind == pytest.approx(found.seconds_by_kind)


def _op(program, rank: int, name: str) -> int:
    return next(int(op) for op in program.lists.row(rank) if program.name(op) == name)


def test_events_without_duration_stand_in_the_order_in_which_they_happened() -> None:
    program = lower(plan(pp=3, micro=2, schedule="gpipe", stages=(1, 2), blocks=3), chain(3), 2)
    timeline = play(program, np.zeros(len(program))).timeline()
    place = {event.name: i for i, event in enumerate(timeline.events)}
    for op in range(len(program)):
        for value in program.reads.row(op):
            maker = int(program.value_maker[value])
            if maker >= 0:
                assert place[program.name(maker)] < place[program.name(op)]


def test_the_breakdown_adds_up_to_the_peak() -> None:
    there = cluster(2)
    data = predict(plan(dp=2, blocks=4), chain(4), there, 16).to_json()
    assert sum(data["breakdown"].values()) == data["peak_bytes"]
    assert predict(plan(blocks=4), chain(4), there, 16).bubble == 0
