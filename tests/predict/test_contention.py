"""Ranks of a node that compute at once: how many they are as each of them sees it, and what that costs."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from synthetic import chain
from tests.predict.pipelines import pipeline, timed
from tests.predict.places import cluster
from trainplan.cluster.cluster import Curve
from trainplan.plan.plan import Plan, plan
from trainplan.predict import predict as predicting
from trainplan.predict.clock import play
from trainplan.predict.contention import Contention, contention
from trainplan.predict.cost import Setting, costs
from trainplan.predict.predict import predict, step_seconds
from trainplan.profile.profile import Profile
from trainplan.program.lower import lower
from trainplan.program.ops import COMPUTES
from trainplan.program.program import are

TABLE = (1.0, 1.05, 1.1, 1.13)  # ends as that of four slices of a GPU does
ORDERS = [
    ("naive", 1), ("gpipe", 1), ("lockstep", 1), ("1f1b", 1), ("looped", 2), ("interleaved", 2), ("zb-h1", 1),
    ("zb-h2", 1), ("zb-v", 2), ("gems", 1), ("chimera", 1),
]  # fmt: skip


def on_one_node(ranks: int, table: tuple[float, ...] = ()) -> Contention:
    """Every rank for itself; without a table compute takes as many times as long as ranks compute."""
    prices = np.array(table or range(1, ranks + 1), dtype=np.float64)
    return Contention(prices, np.zeros(ranks, dtype=np.int64), np.ones((1, ranks), dtype=np.int64))


def uneven(stages: int) -> Profile:
    """Blocks of different cost, with the parts of backward."""
    even = chain(stages)
    seconds = np.random.default_rng(1).uniform(0.7, 1.3, stages)
    rows = [
        replace(
            block, forward_s=(s, s), backward_s=(2 * s, 2 * s), update_s=s / 4,
            backward_input_s=(1.1 * s, 1.1 * s), backward_weight_s=(1.2 * s, 1.2 * s),
        )
        for block, s in zip(even.blocks, seconds, strict=True)
    ]  # fmt: skip
    return replace(even, blocks=tuple(rows))


def cut(schedule: str, ranks: int, chunks: int = 1, **choices) -> Plan:
    """A block a stage."""
    stages = ranks * chunks
    made = {"micro": 8, "stages": tuple(range(1, stages)), "blocks": stages, **choices}
    return plan(pp=ranks, schedule=schedule, chunks=chunks, **made)


# -- closed forms ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("p", "m"), [(2, 1), (2, 5), (4, 4), (4, 8), (5, 3)])
def test_gpipe_is_a_staircase(p: int, m: int) -> None:
    """Up by a rank each slot, along, and down again; forward and backward alike."""
    stairs = [min(t + 1, p, m, p + m - 1 - t) for t in range(p + m - 1)]
    played = timed(pipeline("gpipe", p, m), 1.0, 2.0)
    found = on_one_node(p).found(played, played.makespan)
    assert found == pytest.approx([np.mean(stairs[rank : rank + m]) for rank in range(p)])
    assert found.mean() == pytest.approx(sum(n * n for n in stairs) / sum(stairs))


def test_what_gpipe_takes() -> None:
    """Two stages: one of m slots is without the other, whichever rank it is."""
    where = cluster(devices=2, rate=1e12, contention=(1.0, 1.5))
    for micro in (1, 2, 6):
        slowed = (1.0 + (micro - 1) * 1.5) / micro
        found = predict(cut("gpipe", 2, micro=micro), chain(2), where, micro)
        assert found.compute_s == pytest.approx(micro * 3 * slowed)
        assert found.step_s == pytest.approx((micro + 1) * 3 * slowed)


def test_the_naive_order_computes_alone_and_replicas_all_at_once() -> None:
    where = cluster(devices=4, rate=1e12, contention=(1.25, 1.5, 2.0, 3.0))
    for dp, factor in ((1, 1.25), (2, 1.5)):
        found = predict(cut("naive", 2, dp=dp), chain(2), where, 8 * dp)
        assert found.compute_s == pytest.approx(8 * 3 * factor)
    for dp, factor in ((1, 1.25), (2, 1.5), (3, 2.0), (4, 3.0)):
        for keep in (True, False):
            assert predict(plan(dp=dp, blocks=2), chain(2), where, 2 * dp, keep).compute_s == pytest.approx(6 * factor)


def test_nodes_that_are_networks_of_one_machine_share_its_cores() -> None:
    two = {"nodes": 2, "devices": 2, "rate": 1e12, "contention": (1.25, 1.5, 2.0, 3.0)}
    for one_machine, factor in ((False, 1.5), (True, 3.0)):
        where = cluster(**two, one_machine=one_machine)
        for keep in (True, False):
            assert predict(plan(dp=4, blocks=2), chain(2), where, 8, keep).compute_s == pytest.approx(6 * factor)


def test_replicas_wait_for_the_slowest_and_workers_of_asynchronous_servers_do_not() -> None:
    """Devices that are 5 % apart: held against what many draws of as many come to."""
    where = cluster(devices=5, rate=1e12, spread=0.05)
    draws = np.random.default_rng(0).normal(1.0, 0.05, (200_000, 4))
    for dp in (1, 2, 4):
        slowest = draws[:, :dp].max(axis=1).mean()
        for keep in (True, False):
            found = predict(plan(dp=dp, blocks=2), chain(2), where, 2 * dp, keep)
            assert found.compute_s == pytest.approx(6 * slowest, rel=2e-3)
    assert predict(cut("naive", 4), chain(4), where, 8).step_s == pytest.approx(8 * 4 * 3, rel=1e-6)
    served = [plan(dp=4, blocks=2, exchange=word, servers=1) for word in ("ps-bsp", "ps-asp")]
    in_step, apart = (predict(made, chain(2), where, 8).compute_s for made in served)
    assert in_step > 1.04 * apart


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 4), (4, 8)])
def test_gems_computes_alone_or_in_twos(p: int, m: int) -> None:
    """One micro-batch goes back while the next comes, and all else is alone: work and time say how much of each."""
    played = timed(pipeline("gems", p, m), 1.0, 2.0)
    work, alone = 3.0 * p * m, 1.0
    in_twos = work - (p + m * p * 2 + (m - 1))  # less its seconds: as many in which two ranks compute
    wanted = ((work - 2 * in_twos) * alone + 2 * in_twos * 1.5) / work
    found = on_one_node(p, (alone, 1.5, *[99.0] * (p - 2))).found(played, played.makespan)
    assert found.mean() == pytest.approx(wanted)  # all ranks have as much to do
    assert 1.0 < wanted < 1.5


def test_the_next_step_begins_before_this_one_is_over() -> None:
    """zb-h2 has no bubble between steps: nobody is ever alone, also where the program ends."""
    stages = 4
    even = chain(stages)
    halves = tuple(replace(b, backward_input_s=(1.0, 1.0), backward_weight_s=(1.0, 1.0)) for b in even.blocks)
    where = cluster(devices=4, rate=1e12, backend="nccl", contention=(1.0, 1.0, 1.0, 2.0))
    found = predict(cut("zb-h2", 4), replace(even, blocks=halves), where, 8)
    spent = sum(found.seconds_by_kind[kind] for kind in ("F", "I", "W"))  # of all ranks
    assert spent == pytest.approx(2 * 8 * 3 * stages, rel=1e-6)


# -- any program ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("schedule", "chunks"), ORDERS)
def test_the_mean_over_the_time_in_which_a_rank_computes(schedule: str, chunks: int) -> None:
    """Counted at every quarter of a second, with some table that does not rise steadily."""
    table = np.array([1.0, 3.0, 2.0, 7.0])
    program = pipeline(schedule, 4, 4, chunks)
    played = timed(program, 1.0, 2.0, chunks=chunks)
    compute = are(COMPUTES)[program.kind]
    rank, start, end = program.rank[compute], played.start[compute], played.end[compute]
    moments = np.arange(0.125, played.makespan, 0.25)
    busy = np.array([[((start < t) & (t < end) & (rank == r)).any() for t in moments] for r in range(4)])
    wanted = [table[busy.sum(axis=0)[busy[r]] - 1].mean() for r in range(4)]
    found = on_one_node(4, tuple(table)).found(played, 2 * played.makespan)
    assert found == pytest.approx(wanted)


@pytest.mark.parametrize(("schedule", "chunks"), ORDERS)
def test_a_third_time_changes_little(schedule: str, chunks: int) -> None:
    """Less than 0.1 %, with a table that ends as that of four slices of a GPU does, messages and uneven stages."""
    made, profile = cut(schedule, 4, chunks), uneven(4 * chunks)
    where = cluster(devices=4, rate=200.0, contention=TABLE, backend="nccl")
    program = lower(made, profile, 8, "nccl", steps=2)
    slowed, times = (), []
    for _ in range(3):
        played = play(program, *costs(program, Setting(profile, where, contention=slowed)))
        times.append(step_seconds(played))
        slowed = tuple(contention(made, where, fold=False).found(played, times[-1]))
    assert predict(made, profile, where, 8).step_s == pytest.approx(times[1])
    assert times[2] == pytest.approx(times[1], rel=0.001)
    assert times[0] < times[1] < times[0] * TABLE[-1] or schedule == "naive"


# -- replicas -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [1, 2, 4])
@pytest.mark.parametrize(("schedule", "chunks"), [("naive", 1), ("gpipe", 1), ("interleaved", 2), ("gems", 1)])
def test_one_replica_counts_the_others(schedule: str, chunks: int, nodes: int) -> None:
    where = cluster(nodes, 8 // nodes, 50.0, 0.01, network_rate=20.0, contention=(1.0, 1.25, 1.5, 2.0, 2.5, 3.0))
    made, profile = cut(schedule, 4, chunks, dp=2), uneven(4 * chunks)
    once, every = (predict(made, profile, where, 16, keep) for keep in (False, True))
    assert len(once.peaks) < len(every.peaks)
    assert once.step_s == pytest.approx(every.step_s)
    assert once.compute_s == pytest.approx(every.compute_s)
    alone = predict(made, profile, replace(where, contention=()), 16)
    assert once.compute_s > alone.compute_s * (1.2 if nodes < 4 else 1.0)


def test_replicas_that_differ_in_work_or_company_are_all_played() -> None:
    where = cluster(nodes=2, devices=2, rate=1e12, contention=(1.0, 2.0))
    grows = chain(2, samples=(1, 2, 4), flat=False)
    # Three replicas on two nodes: the third has one to itself, and waits for the others.
    found = predict(plan(dp=3, blocks=2), grows, where, 3)
    assert (found.step_s, len(found.peaks)) == (pytest.approx(12.0), 3)
    # Two samples and one: the first replica has company half of the time.
    found = predict(plan(dp=2, blocks=2), grows, where, 3)
    assert (found.step_s, len(found.peaks)) == (pytest.approx(12 * 1.5), 2)
    # Where nobody is in anybody's way one stands for all, as ever.
    assert len(predict(plan(dp=3, blocks=2), grows, replace(where, contention=()), 3).peaks) == 1


def test_played_once_more_only_where_it_may_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    plays = []
    monkeypatch.setattr(predicting, "play", lambda *given: plays.append(1) or play(*given))

    def count(made: Plan, table: tuple[float, ...], nodes: int = 1) -> int:
        plays.clear()
        predict(made, chain(4), cluster(nodes, 4 // nodes, contention=table), made.dp * made.micro)
        return len(plays)

    once = 2  # and without communication
    pipelined = cut("gpipe", 4)
    assert count(pipelined, ()) == count(pipelined, (1.0, 1.0)) == count(pipelined, (1.5,)) == once
    assert count(pipelined, TABLE) == once + 1
    assert count(pipelined, (1.0, 1.0, 1.0, 1.1)) == once + 1
    assert count(pipelined, TABLE, nodes=4) == once
    assert count(plan(blocks=4), TABLE) == count(plan(dp=4, micro=2, blocks=4), TABLE) == once
    # A stage a node: its copies compute all at once.
    assert count(cut("gpipe", 2, dp=2, blocks=4, stages=(2,)), TABLE, nodes=2) == once
    assert count(cut("gpipe", 2, dp=2, blocks=4, stages=(2,)), TABLE) == once + 1


# -- messages in both directions ------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=20)
@given(micro=st.integers(1, 12), share=st.floats(0.5, 1.0))
def test_messages_that_meet_at_a_rank_share_its_port(micro: int, share: float) -> None:
    """Two stages that compute nothing: behind the first message there, and before the last one back, one goes each way
    at any moment. Where a probe has found that both at once take 2·share times as long as one, these do."""
    size, alone = 10, 4.0
    message, both = Curve("p2p", 2, (0, size), (0.0, alone)), Curve("round", 2, (0, size), (0.0, 2 * share * alone))
    there = cluster(devices=2, collectives=(message, both))
    idle = chain(2, forward=0.0, backward=0.0)
    found = predict(cut("1f1b", 2, micro=micro), idle, there, micro).step_s
    assert found == pytest.approx(alone * (2 + (micro - 1) * 2 * share), rel=1e-3)
    unknown = predict(cut("1f1b", 2, micro=micro), idle, replace(there, collectives=(message,)), micro).step_s
    assert unknown == pytest.approx(alone * (micro + 1), rel=1e-3)
