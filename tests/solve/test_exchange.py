"""How gradients travel: buckets and exchanges that the clock chooses, and what is refused."""

from dataclasses import replace
from typing import Any

import pytest

from synthetic import chain
from trainplan.cluster.cluster import Cluster, Curve, Device, Link, Node
from trainplan.errors import PlanError
from trainplan.plan.plan import WORDS, plan
from trainplan.plan.text import parse, text
from trainplan.predict.predict import predict
from trainplan.profile.profile import Profile
from trainplan.program.exchanges import BY_ROUNDS, HIERARCHICAL
from trainplan.search.recommend import recommend
from trainplan.solve.exchange import bucket_sizes, distinct_sizes, other_exchanges
from trainplan.solve.resolve import resolve, solve
from trainplan.units import MIB

# Eight layers of 4 MiB and 45 ms each, on two machines: an all-reduce of one layer takes 36.6 ms.
LAYERS = 8
LAYER = 36.6e-3
# Milliseconds of a step, measured with torch's DDP on a link of 1 Gbit/s, by the size of its buckets.
MEASURED = {4 * MIB: 445, 25 * MIB: 644, 32 * MIB: 681}


@pytest.fixture(scope="module")
def model() -> Profile:
    return chain(blocks=LAYERS, forward=15e-3, backward=30e-3, weights=4 * MIB, samples=(1, 2, 4), batch=8)


def machines(nodes: int, inside: int = 1, latency: float = 0.0, rate: float = 4 * MIB / LAYER) -> Cluster:
    node = Node(
        "node", (Device("cpu", 2**34, {}, 1e10),) * inside, Link("loopback", 1e-5, 1e9), Link("lan", latency, rate)
    )
    return Cluster(f"{nodes} machines", (node,) * nodes, "gloo")


def test_buckets_of_25_mb_hide_almost_nothing_of_a_model_of_32_mib(model: Profile) -> None:
    """What was measured, and that the solver therefore takes smaller ones."""
    two = machines(2)
    ideal, serial = LAYERS * 45e-3 + LAYER, LAYERS * (45e-3 + LAYER)
    steps = {size: predict(plan(dp=2, bucket=size, blocks=LAYERS), model, two, 8).step_s for size in MEASURED}
    for size, milliseconds in MEASURED.items():
        assert steps[size] == pytest.approx(milliseconds / 1e3, rel=0.05)
    hidden = {size: (serial - step) / (serial - ideal) for size, step in steps.items()}
    assert hidden[25 * MIB] < 0.15
    assert hidden[4 * MIB] > 0.75
    found = solve(parse("dp=2"), model, two, 8)
    assert found.plan.bucket <= 4 * MIB  # a layer each
    assert found.step_s == pytest.approx(steps[4 * MIB])


@pytest.mark.parametrize("word", ["all-reduce", *BY_ROUNDS])
def test_the_bucket_is_the_best_of_those_tried_for_every_exchange(word: str, model: Profile) -> None:
    four = machines(2, 2)
    found = solve(parse(f"dp=4 exchange={word}"), model, four, 8)
    assert found.plan.exchange == word
    sizes = bucket_sizes(found.plan, model)
    assert sizes == [1 * MIB, 4 * MIB, 8 * MIB, 25 * MIB, 32 * MIB]
    steps = {size: predict(replace(found.plan, bucket=size), model, four, 8).step_s for size in sizes}
    assert found.step_s <= min(steps.values()) * 1.001
    assert steps[found.plan.bucket] == found.step_s < steps[32 * MIB] * 0.99  # all at once hides nothing


@pytest.mark.parametrize("choices", [{}, {"zero": 1}, {"zero": 3, "pp": 2, "schedule": "1f1b", "micro": 2}])
def test_sizes_that_make_the_same_program_are_tried_once(choices: dict[str, Any], model: Profile) -> None:
    """Layers of 4 MiB go alone in buckets of 1 MiB and of 4 MiB; every size that is left out predicts as the one before
    it that was not, to the last bit."""
    four = machines(2, 2)
    two = {"stages": (4,)} if "pp" in choices else {}
    asked = plan(dp=4 // choices.get("pp", 1), blocks=LAYERS, bucket=4 * MIB, **choices, **two)
    sizes, kept = bucket_sizes(asked, model), distinct_sizes(asked, model, four, 8)
    assert 4 * MIB not in kept
    assert distinct_sizes(asked, model, four, 8, but=4 * MIB) == [size for size in kept if size > 4 * MIB]
    found = {size: predict(replace(asked, bucket=size), model, four, 8) for size in sizes}
    numbers = {size: replace(p, plan=asked, peaks=()) for size, p in found.items()}
    assert all(size in kept or numbers[size] == numbers[max(k for k in kept if k < size)] for size in sizes)
    assert len({(p.step_s, p.peak_bytes) for p in found.values()}) == len(kept)


def test_small_buckets_lose_where_messages_are_slow_to_start(model: Profile) -> None:
    assert solve(parse("dp=2 exchange=ring"), model, machines(2, latency=0.1, rate=1e9), 8).plan.bucket >= 25 * MIB


def test_buckets_of_two_directions_are_chosen_too_and_written_down(model: Profile) -> None:
    """Chimera has one replica, and two copies of every stage."""
    found = solve(parse("chimera pp=2 micro=2"), model, machines(2), 8).plan
    assert found.bucket < 25 * MIB
    assert f"bucket={found.bucket // MIB}MiB" in text(found)


# -- nodes ----------------------------------------------------------------------------------------------------------


def test_nodes_are_those_of_the_cluster_and_stand_in_the_plan(model: Profile) -> None:
    found = resolve(parse("dp=4 exchange=hierarchical"), model, machines(2, 2), 8)
    assert found.node == 2
    assert "exchange=hierarchical node=2" in text(found)
    assert resolve(parse(text(found)), model, machines(4, 1), 8) == found  # also where there are no such nodes


@pytest.mark.parametrize(
    ("line", "there", "why", "instead"),
    [
        ("exchange=ring dp=1", machines(2), "every stage is on one rank only", "dp=2"),
        ("exchange=tree pp=2 dp=1", machines(2), "every stage is on one rank only", "leaving exchange out"),
        ("exchange=hierarchical dp=3", machines(2, 2), "hold 2 and 1 copies", "exchange=ring"),
        ("exchange=hierarchical dp=4", machines(1, 4), "on one node", "node=2, as if there were such nodes"),
        ("exchange=hierarchical dp=4", machines(4, 1), "on a node of its own", "node=2"),
        ("exchange=hierarchical dp=6 node=4", machines(3, 2), "hold 4 and 2 copies", "node=2"),
        ("exchange=ring dp=4 node=2", machines(2, 2), "does not ask which ranks share a node", "leaving node out"),
        ("dp=2 bucket=33MiB", machines(2), "larger than all gradients", "bucket=32MiB"),
        ("dp=2 bucket=0", machines(2), "holds no gradient", "bucket=1MiB"),
        ("horovod dp=2 bucket=2MiB", machines(2), "horovod decides while running", "threshold=2097152B"),
        ("pace dp=2 bucket=2MiB", machines(2), "has no buckets", "slice=2097152B"),
    ],
)
def test_refused_with_the_nearest_thing_that_works(line, there, why, instead, model: Profile) -> None:
    with pytest.raises(PlanError, match=why) as refused:
        resolve(parse(line), model, there, 8)
    assert instead in refused.value.instead


def test_nodes_of_different_sizes_are_refused(model: Profile) -> None:
    one, two = machines(1, 1).nodes[0], machines(1, 3).nodes[0]
    with pytest.raises(PlanError, match="1 and 3 devices") as refused:
        resolve(parse("exchange=hierarchical dp=4"), model, Cluster("uneven", (one, two), "gloo"), 8)
    assert refused.value.instead == "exchange=ring"


def test_a_bucket_as_large_as_the_model_is_the_largest_there_is(model: Profile) -> None:
    assert resolve(parse("dp=2 bucket=32MiB"), model, machines(2), 8).bucket == 32 * MIB
    small = chain(blocks=4, weights=1000)
    found = resolve(parse("dp=2"), small, machines(2), 8)
    assert resolve(parse(text(found)), small, machines(2), 8) == found  # what we chose ourselves is not refused


# -- which exchange -------------------------------------------------------------------------------------------------


def test_exchanges_are_tried_only_where_they_may_win(model: Profile) -> None:
    def tried(there: Cluster, dp: int = 8) -> list[str]:
        return [p.exchange for p in other_exchanges(plan(dp=dp, blocks=LAYERS), model, there)]

    slow_start = machines(8, latency=0.05, rate=1e9)
    assert tried(slow_start) == ["all-to-all", "all-to-all-sliced"]  # one latency, or two, against fourteen
    assert tried(machines(2, 4)) == [HIERARCHICAL, "all-to-all-sliced"]
    assert tried(machines(8)) == []  # nothing sends fewer bytes than gloo's ring
    assert tried(replace(slow_start, backend="nccl")) == []
    # Where gloo was measured to do as well as its messages allow, nothing of ours is promised to be better; where it
    # takes three times as long because both send at once, a tree is, in whose rounds only one does.
    message = Curve("p2p", 2, (0, 10**8), (1e-4, 0.1))
    for most, promised in ((0.12, []), (0.3, ["tree"])):
        probed = (message, Curve("all_reduce", 2, (0, 10**8), (3e-4, most)))
        assert tried(replace(machines(1, 2), collectives=probed), 2) == promised


def test_recommend_takes_an_exchange_where_the_clock_says_that_it_is_faster() -> None:
    there = machines(8, latency=0.01, rate=1e9)
    sizes = (1, 2, 4, 8)
    model = chain(blocks=4, forward=0.1, backward=0.2, weights=8 * MIB, samples=sizes, flat=False, batch=8)
    winner = recommend(model, there, 8, top=1).best
    assert winner.plan.exchange == "all-to-all-sliced"
    usual = solve(parse(f"dp={winner.plan.dp} exchange=all-reduce"), model, there, 8)
    assert winner.step_s < 0.95 * usual.step_s


def test_a_little_is_not_enough_to_leave_the_backends_own() -> None:
    """A hundredth of a step is less than we know of it."""
    sizes = (1, 2, 4, 8)
    model = chain(blocks=4, forward=0.1, backward=0.2, weights=8 * MIB, samples=sizes, flat=False, batch=8)
    there = machines(4, latency=0.005, rate=1e9)
    usual, ours = (solve(parse(f"dp=4 exchange={e}"), model, there, 8) for e in ("all-reduce", "all-to-all-sliced"))
    assert 0.98 * usual.step_s < ours.step_s < 0.999 * usual.step_s
    shown = [row.prediction.plan for row in recommend(model, there, 8).ranked]
    assert {p.exchange for p in shown if p.dp == 4 and p.pp == 1} == {"all-reduce"}


def test_whoever_asks_for_replicas_only_gets_the_backends_own(model: Profile) -> None:
    assert resolve(parse("dp=8"), model, machines(8, latency=0.02, rate=1e9), 8).exchange == "all-reduce"
    assert "all-reduce" in WORDS["exchange"]
