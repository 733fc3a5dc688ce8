"""What is true of every partitioner: legal cuts, the same answer twice, more never hurts, refusals with numbers."""

import itertools
import json
import math
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from benchmarks import partitioners as benchmark
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

from solve import brute_force
from trainplan.errors import InputError, PlanError
from trainplan.solve.partition.bapipe import bapipe
from trainplan.solve.partition.chimera import chimera, greedy_batch
from trainplan.solve.partition.dapple import dapple, take
from trainplan.solve.partition.hetpipe import hetpipe
from trainplan.solve.partition.instance import P1, P2, instance, on
from trainplan.solve.partition.lamp import lamp
from trainplan.solve.partition.partitioners import HEURISTICS, PARTITIONERS
from trainplan.solve.partition.pipe_torch import pipe_torch
from trainplan.solve.partition.terapipe import slices

ROOT = Path(__file__).parents[2]
SEEDS = st.integers(0, 2**32)
QUICK = settings(max_examples=40, deadline=None)


def chains(seed, **sizes):
    """A random chain on four equal devices, and the dice for more."""
    dice = random.Random(seed)
    return on(brute_force.random_chain(dice, least=4, **sizes), devices=4, rate=2.0, micro=8), dice


def attempt(name, given, **options):
    """The answer, or None where it is refused; those that need equal counts are given them."""
    try:
        return PARTITIONERS[name](given, **options)
    except PlanError:
        return None


@pytest.mark.parametrize("name", PARTITIONERS)
@drawn(seed=SEEDS)
@QUICK
def test_answers_are_partitions(name, seed):
    given, dice = chains(seed)
    given = replace(given, memory=(brute_force.random_limit(dice, given),) * 4)
    found = attempt(name, given)
    if found is None:
        return
    assert PARTITIONERS[name](given) == found
    if name == "torchgpipe" and found.faults:
        return
    assert found.faults == ()
    edges = (0, *found.cuts, given.blocks)
    assert all(a < b for a, b in itertools.pairwise(edges))
    assert len(found.replicas) == found.stages
    assert min(found.replicas) >= 1
    assert found.devices <= given.devices
    if found.placement:
        assert tuple(map(len, found.placement)) == found.replicas
        used = [device for group in found.placement for device in group]
        assert len(set(used)) == len(used)
        assert set(used) <= set(range(given.devices))
    assert set(found.recompute) <= set(range(given.blocks))
    assert 0 <= found.value < math.inf
    assert found.value > 0 or name == "pipemare"  # which weighs stages, and blocks may have no weights


FAIR = ("pipedream", "pipedream-code", "piper", "2bw", "hetpipe", "pipe-torch", "chimera")


@pytest.mark.parametrize("name", FAIR)
@drawn(seed=SEEDS, factor=st.floats(1, 20))
@QUICK
def test_a_faster_link_never_hurts(name, seed, factor):
    given, _ = chains(seed)
    options = {"compression": 1.0} if name == "pipedream-code" else {}
    slow, fast = (PARTITIONERS[name](on(given, devices=4, rate=2.0 * f), **options).value for f in (1, factor))
    assert fast <= slow * (1 + 1e-12)


@pytest.mark.parametrize("name", [name for name in FAIR if name != "chimera"])
@drawn(seed=SEEDS, memory=st.floats(5, 100), factor=st.floats(1, 4))
@QUICK
def test_more_memory_never_hurts(name, seed, memory, factor):
    given, _ = chains(seed)
    options = {"at_once": 3} if name == "hetpipe" else {}
    little = attempt(name, replace(given, memory=(memory,) * 4), **options)
    if little is not None:
        much = PARTITIONERS[name](replace(given, memory=(memory * factor,) * 4), **options)
        assert much.value <= little.value * (1 + 1e-12)


@pytest.mark.parametrize("name", [name for name in PARTITIONERS if name != "pipemare"])
@drawn(seed=SEEDS)
@QUICK
def test_time_scales_with_costs(name, seed):
    """Everything twice as long: half the speed and half the rate."""
    given, _ = chains(seed)
    once = attempt(name, given)
    if once is not None:
        twice = attempt(name, replace(on(given, devices=4, rate=1.0), speeds=(0.5,) * 4))
        if name in ("torchgpipe", "torchgpipe-corrected"):
            assert twice == once  # they know no speeds
        else:
            assert twice.value == pytest.approx(2 * once.value, rel=1e-9)


@pytest.mark.system("dapple", "S")
@pytest.mark.parametrize(
    ("usage", "need", "fresh", "append", "scatter"),
    [
        ([0, 0, 0], 3, [2, 1, 0], [2, 1, 0], [1, 1, 1]),
        ([1, 0, 0], 2, [1, 2, 0], [2, 1, 0], [2, 1, 0]),
        ([2, 1, 0], 2, [2, 1, 2], [2, 2, 1], [2, 2, 1]),
        ([1, 0, 0], 5, [2, 2, 2], [2, 2, 2], [2, 2, 2]),
        ([2, 1, 0], 1, [2, 1, 1], [2, 2, 0], [2, 2, 0]),
        ([0, 1, 0], 2, [2, 1, 0], [1, 2, 0], [1, 2, 0]),
    ],
)
def test_dapple_proposes_devices_in_three_ways(usage, need, fresh, append, scatter):
    """Three machines of two devices, so many of each in use."""
    for policy, expected in enumerate((fresh, append, scatter)):
        assert take(np.array(usage), 2, need, policy).tolist() == expected


@drawn(seed=SEEDS, dear=st.booleans())
@QUICK
def test_dapple_says_what_its_plan_takes(seed, dear):
    """The value is the latency of the plan, on one machine and on two; dear weights make for many narrow stages."""
    given, dice = chains(seed, most=6)
    given = replace(given, weights=tuple(50 * w for w in given.weights)) if dear else given
    given = on(given, levels=dice.choice([((2, 4.0), (2, 0.5)), ((4, 1.0),), ((2, 8.0), (2, 4.0))]))
    found = dapple(given)
    plan = brute_force.plan_of(given, found.cuts, found.replicas, found.placement)
    forward, backward, exchange = brute_force.columns(given, plan)
    assert benchmark.recursion(forward, backward, given.micro, exchange) == pytest.approx(found.value, rel=1e-12)
    assert sorted(device for group in found.placement for device in group) == [0, 1, 2, 3]


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["bottleneck", "torchgpipe", "torchgpipe-corrected", "even", "elasticpipe", "uneven", "hetpipe", "bapipe", "lamp",
     "pipemare"],
)  # fmt: skip
def test_more_stages_than_blocks(name):
    with pytest.raises(PlanError, match=r"7 stages, but the chain has only 6 blocks\. Try 6 stages or fewer"):
        PARTITIONERS[name](on(P1, devices=7))


@pytest.mark.parametrize("name", ["pipedream", "piper", "2bw", "hetpipe", "pipe-torch"])
def test_what_does_not_fit_says_what_would(name):
    given = on(P1, devices=3, rate=4.0, memory=7, micro=6)
    with pytest.raises(PlanError, match=f"partition={name} on 3 devices of 7.000 bytes: no partition") as error:
        PARTITIONERS[name](given)
    enough = float(error.value.instead.split()[2])
    assert PARTITIONERS[name](replace(given, memory=(enough,) * 3)).value < math.inf
    with pytest.raises(PlanError):
        PARTITIONERS[name](replace(given, memory=(enough * 0.98,) * 3))


def test_the_published_memory_check_lets_data_parallelism_pass():
    """However small the devices are: a stage that nothing follows counts as keeping nothing."""
    assert PARTITIONERS["pipedream-code"](on(P1, devices=3, rate=4.0, memory=1e-6)).replicas == (3,)


@pytest.mark.parametrize(
    ("find", "given", "message"),
    [
        (lamp, on(P1, devices=3, memory=10), "takes at least 16 bytes, and a device has 10"),
        (bapipe, on(P1, devices=3, memory=10, micro=4), "stage 0 takes 24 bytes of 10, and no move mends it"),
        (chimera, on(P1, devices=3), "an even number of stages, and 3 devices have none"),
        (chimera, on(P1, devices=4, micro=6), "6 micro-batches do not divide by 2 × 2; 6 micro-batches"),
        (chimera, on(P1, devices=2, micro=2, memory=10), "2 stages take 44 bytes of 10"),
        (chimera, on(P1, devices=4, micro=4, memory=30), "2 stages take 44 bytes of 30; 4 stages take 31 bytes of 30"),
        (chimera, on(P1, devices=8, micro=8, memory=1), "8 stages of 6 blocks"),
        (PARTITIONERS["even"], on(P1, devices=4), "6 blocks do not divide by 4 stages. Try 3 stages or 6 stages"),
        (PARTITIONERS["pipedream"], on(P1, speeds=(1, 2)), "speeds go from 1.0 to 2.0. Try partition=hetpipe"),
        (pipe_torch, on(instance([1] * 200), speeds=range(1, 17)), "16 kinds would take .* steps on 200 blocks"),
        (dapple, on(instance([1] * 9), levels=((3, 2.0), (3, 1.0), (9, 0.5))), "27 machines and 9 blocks make"),
    ],
)
def test_refusals_have_numbers(find, given, message):
    with pytest.raises(PlanError, match=message):
        find(given)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: instance([]), "there is nothing to cut"),
        (lambda: instance([1, 2], weights=[1]), "weights of a chain: 2 blocks have 2 values, not 1"),
        (lambda: instance([1, 2], boundary=[1, 2]), "2 blocks have 1 values, not 2"),
        (lambda: instance([1, -2]), "zero or more"),
        (lambda: on(P1, devices=0), "0 devices"),
        (lambda: on(P1, devices=3, speeds=(1, 2)), "2 speeds: there are 3 devices"),
        (lambda: on(P1, devices=3, memory=(1, 2)), "2 memory limits"),
        (lambda: on(P1, devices=3, levels=((2, 1), (2, 1))), "levels of 2 × 2 devices"),
        (lambda: on(P1, devices=3, rates=[[1, 1], [1, 1]]), "2 rows of rates"),
        (lambda: on(P1, speeds=(1, 0)), "zero or less"),
        (lambda: on(P1, devices=2, micro=0), "0 micro-batches"),
        (lambda: hetpipe(on(P1, devices=2), at_once=0), "0 mini-batches at once"),
        (lambda: slices([[1.0, 2.0]], 2), "a table of shape"),
        (lambda: slices([[1.0]], 0), "0 stages"),
    ],
)
def test_bad_numbers(make, message):
    with pytest.raises(InputError, match=message):
        make()


def test_slices_that_are_impossible():
    """Two tokens at once are too many: only single ones are left, or nothing."""
    never = math.inf
    assert slices([[1.0, 2.0], [never, 9.0]], stages=1).slices == ((1, 1),)
    with pytest.raises(PlanError, match="no way to cut 2 units of 1 sequences"):
        slices([[never, 2.0], [never, 9.0]], stages=2)


# -- single choices --------------------------------------------------------------------------------------------------


def test_bapipe_falls_back_to_data_parallelism():
    """Weights that cost little to exchange: four replicas have no bubble."""
    light = on(P1, devices=4, rate=1000.0, micro=4)
    assert bapipe(light).replicas == (4,)
    assert bapipe(light, fall_back=False).replicas == (1, 1, 1, 1)
    assert bapipe(on(P1, devices=4, rate=0.1, micro=4)).stages == 4  # dear to exchange
    assert bapipe(replace(light, memory=(30.0,) * 4)).stages == 4  # does not fit whole


def test_hetpipe_takes_as_many_at_once_as_fit_and_help():
    free = hetpipe(on(P1, devices=3, rate=4.0))
    assert (free.at_once, free.notes) == (3, ())
    tight = hetpipe(on(P1, devices=3, rate=4.0, memory=20))
    assert tight.at_once < 3
    assert "do not fill the pipeline" in tight.notes[0]
    # Three at once would fit too, only in a partition that is slower.
    assert hetpipe(on(P1, devices=3, rate=4.0, memory=20), at_once=tight.at_once).value == tight.value


def test_chimera_takes_the_largest_micro_batch_that_fits():
    """Larger micro-batches are more efficient here; at depth 2 only one sample fits, at depth 4 two."""

    def at(samples):
        def grown(values, power):
            return [v * samples**power for v in values]

        chain = instance(grown(P1.seconds, 0.5), P1.weights, grown(P1.boundary, 1), grown(P1.saved, 1))
        return on(chain, devices=4, rate=10.0, memory=60)

    found = greedy_batch(at, batch=16, sizes=(1, 2, 4))
    per_depth = {}
    for samples in (1, 2, 4):
        for depth in (2, 4):
            given = replace(at(samples), micro=16 // samples)
            alone = attempt("chimera", given, cost=lambda g, r, c, d=depth: float(len(c) + 1 != d))
            if alone is not None and alone.stages == depth:
                per_depth[depth] = samples  # the last that fits is the largest
    assert per_depth == {2: 1, 4: 2}
    assert found.samples == per_depth[found.stages]
    with pytest.raises(PlanError, match="no size of 3, 5 samples divides it"):
        greedy_batch(at, batch=16, sizes=(3, 5))


def test_uneven_speeds_matter_to_those_that_know_them():
    fast_last = on(P2, speeds=(1, 1, 8), rate=4.0)
    assert PARTITIONERS["uneven"](fast_last).value < PARTITIONERS["elasticpipe"](on(P2, devices=3)).value
    assert hetpipe(fast_last).placement[0] != (2,)  # the heavy block is the fifth


# -- speed, and the gaps that the docs show --------------------------------------------------------------------------


@pytest.mark.parametrize("row", benchmark.SPEED)
def test_200_blocks_on_64_devices_take_seconds(row):
    """The goal is five; here it takes a fraction of one, so a busy machine does not matter."""
    assert benchmark.seconds(row) < benchmark.GOAL


# The systems whose partitioner is a heuristic: that its gap is known is what backs its letter.
OF_SYSTEM = {"torchgpipe": "gpipe", **{key: key for key in ("dapple", "piper", "2bw", "bapipe", "lamp")}}


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, marks=[pytest.mark.system(OF_SYSTEM[row], "S")] if row in OF_SYSTEM else [])
        for row in benchmark.GAPS
    ],
)
def test_gaps_are_those_of_the_data(row):
    """All of the instances again: what is written is what this code does."""
    data = json.loads((ROOT / "benchmarks" / "data" / "partitioners.json").read_text())["gaps"]
    written = {entry["partitioner"]: entry for entry in data}
    assert set(written) == set(benchmark.GAPS)
    assert {name.split()[0] for name in written} == set(HEURISTICS)
    found = benchmark.gaps(row, written[row]["instances"])
    assert found == {**written[row], "mean_gap": pytest.approx(written[row]["mean_gap"], abs=1e-9),
                     "worst_gap": pytest.approx(written[row]["worst_gap"], abs=1e-9)}  # fmt: skip
    assert found["mean_gap"] >= 0
