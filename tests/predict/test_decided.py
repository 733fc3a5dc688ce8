"""Exchanges that are decided while running, as they are predicted: worked answers, and one clock for both ways."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from synthetic import chain
from tests.program.strategies import examples
from trainplan.cluster.cluster import Cluster, Curve, Device, Link, Node, Slowdown
from trainplan.errors import PlanError
from trainplan.plan.plan import Plan, plan
from trainplan.plan.text import parse, text
from trainplan.predict.clock import play
from trainplan.predict.cost import Setting, costs
from trainplan.predict.decided import _ready, expected_agendas
from trainplan.predict.predict import predict
from trainplan.predict.rounds import rounds
from trainplan.profile.profile import Profile
from trainplan.program.check import check
from trainplan.program.lower import lower
from trainplan.program.lower.backend import backend
from trainplan.program.lower.layout import Layout
from trainplan.program.ops import Kind
from trainplan.report.exclusive import steps
from trainplan.solve.resolve import solve

GB = 10**9
WORDS = ("horovod", "p3", "bytescheduler", "pace")


def cluster(ranks: int = 2, latency: float = 0.0, **fields) -> Cluster:
    """A sum of a gigabyte takes a second."""
    node = Node("node", (Device("cpu", 2**50, {}, 1e9),) * ranks, Link("inside", 0.0, 1e9))
    curve = Curve("all_reduce", ranks, (0, GB), (latency, latency + 1.0))
    return Cluster("test", (node,), "gloo", (curve,), **fields)


def four_ranks(latency: float) -> Cluster:
    """The same with a place for two pipelines: sums are still of two copies."""
    return replace(cluster(4), collectives=cluster(latency=latency).collectives)


def layers(links: list[float]) -> Profile:
    """Blocks that take a second there and one back, with gradients that take so many seconds to sum."""
    profile = chain(len(links), forward=1.0, backward=1.0, weights=GB)
    sized = [
        replace(p, bytes=round(links[p.blocks[0]] * GB), count=round(links[p.blocks[0]] * GB / 4))
        for p in profile.parameters
    ]
    halves = {"backward_input_s": (0.5, 0.5), "backward_weight_s": (0.5, 0.5)}
    return replace(profile, parameters=tuple(sized), blocks=tuple(replace(b, **halves) for b in profile.blocks))


def of(word: str, blocks: int, **more) -> Plan:
    numbers = {
        "horovod": {"threshold": GB, "cycle": 1e-3},
        "p3": {"slice": GB // 2},
        "bytescheduler": {"slice": GB // 2, "credit": GB},
        "pace": {"slice": GB // 2, "fused": (1,) * blocks},
    }[word]
    return plan(**{"dp": 2, "blocks": blocks, "exchange": word, **numbers, **more})


@pytest.mark.system("p3", "P")
@pytest.mark.parametrize(("links", "want"), [((2, 2, 2), (10, 9, 8)), ((1, 1, 6), (12, 11, 10))])
def test_p3_step_of_three_layers(links: tuple[int, ...], want: tuple[int, ...]) -> None:
    """DDP, whole tensors by priority, slices: a step is as long as from one backward pass to the next."""
    profile, where = layers(list(links)), cluster()
    whole, slices = of("p3", 3, slice=6 * GB), of("p3", 3, slice=GB)
    fifo = of("bytescheduler", 3, slice=6 * GB, credit=100 * GB)
    found = [predict(choices, profile, where, 2).step_s for choices in (fifo, whole, slices)]
    assert found == pytest.approx(want, abs=1e-6)
    assert predict(plan(dp=2, blocks=3, bucket=1), profile, where, 2).step_s == pytest.approx(want[0], abs=1e-6)


@pytest.mark.system("horovod", "P")
def test_horovod_exposes_at_most_the_last_fused_sum_and_a_cycle() -> None:
    """As the thesis assumes: where the sums of what came before are hidden."""
    profile = layers([0.5] * 8)
    step = predict(of("horovod", 8, threshold=64, cycle=1e-3), profile, cluster(), 2).step_s
    assert 16 + 0.5 <= step <= 16 + 0.5 + 2e-3


ORDERS = (
    {},
    {"pp": 2, "schedule": "1f1b", "stages": (1,)},
    {"pp": 2, "schedule": "gpipe", "stages": (2,), "recompute": "full"},
    {"pp": 2, "schedule": "zb-h1", "stages": (1,)},
    {"pp": 2, "schedule": "interleaved", "chunks": 2, "stages": (1, 2, 3), "micro": 2},
)


@examples(40)
@given(
    st.lists(st.integers(1, 8), min_size=1, max_size=5),
    st.sampled_from(WORDS),
    st.integers(1, 2),
    st.integers(1, 6),
    st.booleans(),
    st.sampled_from(ORDERS),
)
def test_rounds_and_clock_agree(
    links: list[int], word: str, micro: int, size: int, uneven: bool, order: dict
) -> None:  # fmt: skip
    """The program of the expected agendas, played by its lists, sums everything of a stage when its rounds say so."""
    profile, where = layers([link / 2 for link in links]), four_ranks(latency=0.01)
    fits = len(links) > max(order.get("stages", (9,))) and (word == "horovod" or "recompute" not in order)
    order = order if fits else {}
    more = {"slice": size * GB // 4} if word != "horovod" else {"threshold": size * GB // 2, "cycle": size / 10}
    choices, batch = of(word, len(links), **{"micro": micro, **more, **order}), 2 * micro + uneven
    setting = Setting(profile, where)
    agendas = expected_agendas(choices, profile, where, batch, setting, fold=False)
    program = check(lower(choices, profile, batch, agendas=(agendas,) * 2, steps=2))
    played = play(program, *costs(program, setting))
    layout = Layout(choices, profile, batch, backend("gloo"), (0, 1))
    one = lower(choices, profile, batch)
    sums = lambda size: float(next(r for r, b in zip(*seconds, strict=True) if b == size))  # noqa: E731
    run, _ = costs(program, setting)
    reduces = program.kind == Kind.REDUCE_GRAD
    seconds = run[reduces].tolist(), program.bytes[reduces].tolist()
    assert agendas.keys() == set(layout.stages)
    for stage, agenda in agendas.items():
        ready, begin = _ready(play(one, *costs(one, setting)), layout, stage)
        want = rounds(layout.decided[stage].rule, ready, begin, sums, float(run[program.kind == Kind.NEGOTIATE][0]))
        assert want.agenda == agenda
        for buffer, start, end in want.sent:
            own = reduces & (program.step == 0) & (program.stage == stage)
            (op,) = np.flatnonzero(own & (program.unit == min(buffer)))
            assert (played.start[op], played.end[op]) == pytest.approx((start, end))


@pytest.mark.parametrize(("word", "order"), [(word, order) for word in WORDS for order in ORDERS[:2]])
def test_one_replica_stands_for_all(word: str, order: dict) -> None:
    profile, where = layers([1, 2, 1]), four_ranks(latency=0.01)
    choices = of(word, 3, micro=2, **order)
    folded, whole = predict(choices, profile, where, 4), predict(choices, profile, where, 4, keep=True)
    assert folded.step_s == pytest.approx(whole.step_s)
    assert folded.peak_bytes == whole.peak_bytes


@pytest.mark.parametrize("word", WORDS)
def test_a_step_of_the_timeline_is_as_long_as_a_step(word: str) -> None:
    """Also where steps overlap: from the end of one's passes to that of the next."""
    expected = predict(of(word, 3), layers([1, 2, 1]), cluster(latency=0.01), 4, keep=True)
    (*_, last) = steps(expected.timeline())
    assert last.seconds == pytest.approx(expected.step_s)
    assert sum(share.seconds for share in last.shares if share.rank == 0) == pytest.approx(expected.step_s)


@pytest.mark.parametrize("word", WORDS)
def test_sums_that_slow_compute_down_are_waited_for(word: str) -> None:
    profile = layers([1, 1, 1])
    free, slow = (predict(of(word, 3), profile, cluster(slowdown=s), 2) for s in (Slowdown(), Slowdown(collective=1.5)))
    assert slow.step_s > free.step_s


def test_memory_of_horovod_is_that_of_its_gradients_and_the_largest_fused_buffer() -> None:
    profile = layers([1, 1, 1])
    apart, together = (
        predict(of("horovod", 3, threshold=threshold, cycle=100.0), profile, cluster(), 2).peak_bytes
        for threshold in (0, 2 * GB)
    )
    assert together - apart == pytest.approx(2 * GB, rel=1e-6)


BAD = {
    "exchange=p3 dp=1": ("nothing to exchange", "dp=2"),
    "p3 dp=1,2 pp=2 schedule=1f1b micro=2": ("of dp=1,2 some stages sum nothing", "exchange=horovod"),
    "p3 dp=2 recompute=full": ("keeps what its blocks read as a whole", "recompute=none"),
    "horovod dp=2 pp=2 schedule=chimera micro=2": ("in opposite orders", "schedule=1f1b"),
    "horovod dp=2 pp=2 schedule=lockstep micro=2": ("in lockstep", "schedule=gpipe"),
    "horovod dp=2 overlap=off": ("while backward passes run", "overlap=on"),
    "horovod dp=2 slice=1MB": ("slice is a number of p3", "exchange=p3"),
    "ddp dp=2 credit=1MB": ("credit is a number of bytescheduler", "exchange=bytescheduler"),
    "pace dp=2 fused=1,1": ("are 2 gradients, and the model has 3", "leaving it open"),
    "p3 dp=2 slice=1KB": ("each has a round of its own", "slice="),
    "bytescheduler dp=2 credit=0B": ("credit of 1 or more", "credit="),
}


@pytest.mark.parametrize("line", BAD)
def test_what_does_not_go_together_is_refused(line: str) -> None:
    why, instead = BAD[line]
    with pytest.raises(PlanError) as caught:
        solve(parse(line), layers([1, 1, 1]), cluster(4), 8)
    assert why in caught.value.why
    assert instead in caught.value.instead


def test_the_credit_that_is_suggested_is_as_fast_as_one_that_is_chosen() -> None:
    """Not the least that is accepted, with which a step is thousands of rounds."""
    profile = layers([1, 1, 1])
    with pytest.raises(PlanError) as caught:
        solve(parse("bytescheduler dp=2 credit=0"), profile, cluster(4), 8)
    credit = caught.value.instead.split(", or ")[0]
    suggested, chosen = (
        solve(parse(f"bytescheduler dp=2 {word}"), profile, cluster(4), 8).step_s for word in (credit, "")
    )
    assert suggested == pytest.approx(chosen, rel=0.05)


@pytest.mark.system("p3", "P")
def test_p3_under_a_pipeline_lets_the_first_stage_begin_sooner() -> None:
    """The next step begins on the first stage, whose backward pass ends last: its first block need wait for no other.
    Two stages of two layers, each a second long there and back, whose sums take 2 s: 8 s of passes. Of the first stage,
    the sum of its second layer begins at 7 s, when that has gone back. With Horovod that of its first layer waits until
    9 s, and both are over at 11 s. With P3 it overtakes the other's second half at 8 s, and is over at 10 s."""
    profile, where, two = layers([2, 2, 2, 2]), four_ranks(latency=0.0), {"pp": 2, "schedule": "1f1b", "stages": (2,)}
    fused = predict(of("horovod", 4, threshold=64, cycle=1e-4, **two), profile, where, 2).step_s
    slices = predict(of("p3", 4, slice=GB, **two), profile, where, 2).step_s
    assert fused == pytest.approx(8 + 3, abs=0.01)
    assert slices == pytest.approx(8 + 2, abs=0.01)


def test_what_several_stages_hold_is_refused_by_priority() -> None:
    profile = chain(4, tied=((0, 3),))
    with pytest.raises(PlanError, match=r"several stages hold tied0.*exchange=horovod"):
        solve(parse("p3 dp=2 pp=2 schedule=1f1b micro=2"), profile, cluster(4), 8)
    assert solve(parse("p3 dp=2"), profile, cluster(4), 8).step_s > 0


@pytest.mark.parametrize("word", ["p3", "bytescheduler", "pace"])
def test_clipping_by_the_whole_norm_is_refused_across_steps(word: str) -> None:
    profile = replace(layers([1, 1, 1]), clip_norm=1.0)
    with pytest.raises(PlanError, match="still being summed"):
        solve(parse(f"{word} dp=2"), profile, cluster(), 8)
    assert solve(parse("horovod dp=2"), profile, cluster(), 8).step_s > 0


# -- what is left open is solved for ----------------------------------------------------------------------------------


def wide(blocks: int = 6, weights: int = 40 * 10**6) -> Profile:
    return chain(blocks, forward=0.02, backward=0.03, weights=weights)


@pytest.mark.system("bytescheduler", "S")
@pytest.mark.parametrize("latency", [0.0, 1e-3, 1e-2])
def test_bytescheduler_slice_and_credit_are_the_best_that_the_clock_finds(latency: float) -> None:
    profile, where = wide(), cluster(latency=latency)
    found = solve(parse("bytescheduler dp=2"), profile, where, 4)
    own = profile.parameters[0].bytes
    for size in (own, own // 4, own // 16):
        for slices in (1, 4):
            other = predict(replace(found.plan, slice=size, credit=slices * size), profile, where, 4)
            assert found.step_s <= 1.01 * other.step_s


@pytest.mark.parametrize("word", ["p3", pytest.param("bytescheduler", marks=pytest.mark.system("bytescheduler", "S"))])
def test_bytescheduler_and_p3_put_small_gradients_together_where_latency_is_large(word: str) -> None:
    """Sixty gradients whose sums take 5 ms each, however small, and passes of 15 ms: a few sums are enough."""
    profile, where = chain(60, forward=1e-4, backward=1.5e-4, weights=40_000), cluster(latency=5e-3)
    found = solve(parse(f"{word} dp=2"), profile, where, 4)
    kinds = [event.kind for event in predict(found.plan, profile, where, 4, keep=True).timeline().events]
    assert found.plan.threshold > 0
    assert kinds.count("REDUCE_GRAD") <= 6 * kinds.count("LOSS")
    apart = predict(replace(found.plan, threshold=0), profile, where, 4)
    assert found.step_s < 0.2 * apart.step_s


@pytest.mark.parametrize("word", ["horovod", "p3"])
def test_of_numbers_that_hardly_differ_those_with_the_fewest_rounds_are_taken(word: str) -> None:
    """Six megabytes over a link that has them through in no time: nothing is gained by sending them early."""
    profile, where = wide(weights=10**6), cluster(latency=1e-6)
    found = solve(parse(f"{word} dp=2"), profile, where, 4).plan
    assert found.threshold >= 6 * 10**6
    assert word != "horovod" or found.cycle == 5e-3


@pytest.mark.system("p3", "P")
def test_p3_steps_block_by_block_take_longer_than_one_for_all() -> None:
    plain, where = layers([1e-6] * 3), cluster()
    profile = replace(plain, blocks=tuple(replace(block, update_s=0.1) for block in plain.blocks))
    apart = replace(profile, update_apart=3.0)
    steps = [predict(of("p3", 3), one, where, 2).step_s for one in (profile, apart)]
    assert steps[1] - steps[0] == pytest.approx(2 * 0.3, abs=1e-3)
    one = [predict(of("horovod", 3), own, where, 2).step_s for own in (profile, apart)]
    assert one[0] == one[1]


@pytest.mark.system("pace", "S")
def test_pace_fuses_where_latency_is_large() -> None:
    profile = wide(weights=10**6)
    found = solve(parse("pace dp=2"), profile, cluster(latency=0.05), 4)
    assert len(found.plan.fused) < 6
    apart = replace(found.plan, fused=(1,) * 6, slice=profile.parameters[0].bytes)
    assert found.step_s < 0.9 * predict(apart, profile, cluster(latency=0.05), 4).step_s


@pytest.mark.parametrize("line", [f"{word} dp=2" for word in WORDS])
def test_a_plan_says_all_its_numbers(line: str) -> None:
    profile, where = wide(3), cluster(latency=1e-3)
    made = solve(parse(line), profile, where, 4)
    again = solve(parse(text(made.plan)), profile, where, 4)
    assert replace(again.plan, key=made.plan.key, bucket=made.plan.bucket) == made.plan
    assert again.step_s == made.step_s
