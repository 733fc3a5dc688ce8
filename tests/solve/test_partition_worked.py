"""The worked instances of every partitioner: P1 and P2, six blocks each, values and plans literally."""

import math
from dataclasses import replace

import numpy as np
import pytest

from solve import brute_force
from trainplan.errors import PlanError
from trainplan.solve.partition.chimera import critical_path, paper
from trainplan.solve.partition.instance import P1, P2, instance, on
from trainplan.solve.partition.latency import formula, recursion
from trainplan.solve.partition.partitioners import PARTITIONERS
from trainplan.solve.partition.terapipe import slices

CHAINS = {"P1": P1, "P2": P2}


def ends(found, blocks=6):
    return [*found.cuts, blocks]


def lengths(found, blocks):
    return [max(0, b - a) for a, b in found.bounds(blocks)]


def solve(name, given, **options):
    return PARTITIONERS[name](given, **options)


# -- torchgpipe and the bottleneck core ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("times", "stages", "expected", "faults"),
    [
        (P2.seconds, 4, [5, 1, 0, 1], ("stage 2 holds no block", "block 5 is in stages 1 and 3")),
        (P2.seconds, 3, [5, 0, 1], ("stage 1 holds no block",)),
        ([1] * 11, 4, [2, 2, 2, 5], ()),
        (P1.seconds, 4, [1, 1, 1, 3], ()),
    ],
)
def test_torchgpipe_as_published(times, stages, expected, faults):
    found = solve("torchgpipe", on(instance(times), devices=stages))
    assert lengths(found, len(times)) == expected
    assert found.faults == faults


def test_torchgpipe_is_worse_than_the_best():
    assert solve("torchgpipe", on(P1, devices=4)).value == 9
    assert solve("bottleneck", on(P1, devices=4)).value == 7


@pytest.mark.parametrize(
    ("name", "chain", "speeds", "value", "expected"),
    [
        ("elasticpipe", "P1", (1, 1, 1), 8, [2, 4, 6]),
        ("elasticpipe", "P1", (1, 0.5, 1), 13, [3, 4, 6]),
        ("elasticpipe", "P2", (1, 1, 1), 8, [4, 5, 6]),
        ("elasticpipe", "P2", (1, 1, 0.5), 8, [4, 5, 6]),  # no move
        ("uneven", "P1", (1, 0.5, 1), 9, [1, 3, 6]),
    ],
)
def test_uneven_devices(name, chain, speeds, value, expected):
    found = solve(name, on(CHAINS[chain], speeds=speeds))
    assert (found.value, ends(found)) == (value, expected)


@pytest.mark.parametrize(("chain", "values"), [("P1", [11, 9, 8]), ("P2", [9, 9, 9])])
def test_pipemare_splits_weights(chain, values):
    assert [solve("pipemare", on(CHAINS[chain], devices=n)).value for n in (2, 3, 4)] == values


@pytest.mark.parametrize(("devices", "values"), [(2, (13, 10)), (3, (8, 8)), (4, (7, 8))])
@pytest.mark.parametrize("name", ["bottleneck", "lamp", "bapipe", "uneven", "elasticpipe"])
def test_partitioners_that_share_the_bottleneck(name, devices, values):
    """With equal devices and no limit of memory they all come to the same."""
    options = {"fall_back": False} if name == "bapipe" else {}
    for chain, value in zip((P1, P2), values, strict=True):
        found = solve(name, on(chain, devices=devices), **options)
        stage_times = [sum(chain.seconds[a:b]) for a, b in found.bounds(6)]
        assert max(stage_times) == value


# -- PipeDream -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "chain", "rate", "devices", "value", "expected", "replicas"),
    [
        ("pipedream", "P1", 1, 3, 8, [4, 6], (2, 1)),
        ("pipedream", "P1", 4, 3, 22 / 3, [6], (3,)),
        ("pipedream", "P1", 1, 4, 6, [2, 5, 6], (1, 2, 1)),
        ("pipedream", "P1", 4, 4, 5.5, [6], (4,)),
        ("pipedream", "P2", 1, 3, 5.5, [3, 6], (1, 2)),
        ("pipedream", "P2", 4, 3, 14 / 3, [6], (3,)),
        ("pipedream", "P2", 1, 4, 11 / 3, [3, 6], (1, 3)),
        ("pipedream", "P2", 4, 4, 3.5, [6], (4,)),
        ("pipedream-code", "P1", 1, 3, 8, [2, 4, 6], (1, 1, 1)),
        ("pipedream-code", "P1", 4, 3, 8, [2, 4, 6], (1, 1, 1)),
        ("pipedream-code", "P1", 1, 4, 7, [2, 3, 5, 6], (1, 1, 1, 1)),
        ("pipedream-code", "P1", 4, 4, 7, [2, 3, 6], (1, 1, 2)),
        ("pipedream-code", "P2", 1, 3, 8, [4, 5, 6], (1, 1, 1)),
        ("pipedream-code", "P2", 4, 3, 6.25, [4, 6], (1, 2)),
        ("pipedream-code", "P2", 1, 4, 5, [4, 5, 6], (1, 2, 1)),
        ("pipedream-code", "P2", 4, 4, 4.25, [4, 5, 6], (1, 2, 1)),
    ],
)
def test_pipedream(name, chain, rate, devices, value, expected, replicas):
    found = solve(name, on(CHAINS[chain], devices=devices, rate=rate))
    assert found.value == pytest.approx(value, rel=1e-12)
    assert (ends(found), found.replicas) == (expected, replicas)


@pytest.mark.parametrize(
    ("levels", "values", "nodes"),
    [
        (((2, 4), (2, 0.5)), (8, 5.5), ([3, 6], [3, 6])),
        (((2, 4), (2, 0.25)), (8.5, 8), ([5, 6], None)),
        (((2, 1), (2, 1)), (6.5, 5.5), (None, None)),
    ],
)
def test_pipedream_on_two_levels(levels, values, nodes):
    for chain, value, cut in zip((P1, P2), values, nodes, strict=True):
        found = solve("pipedream", on(chain, levels=levels))
        assert found.value == value
        if cut:  # what the first node holds
            of_node = [end for end, group in zip(ends(found), found.placement, strict=True) if group[0] < 2]
            assert [of_node[-1], 6] == cut


@pytest.mark.parametrize(("chain", "without", "with_activations"), [("P1", 7, 8), ("P2", 6.25, 7)])
def test_pipedream_code_on_two_levels(chain, without, with_activations):
    given = on(CHAINS[chain], levels=((2, 4), (2, 0.5)))
    assert solve("pipedream-code", given).value == without
    assert solve("pipedream-code", given, compression=1).value == with_activations


@pytest.mark.parametrize(
    ("chain", "memory", "value", "expected", "replicas"),
    [("P1", 20, 8, [2, 4, 6], (2, 1, 1)), ("P1", 12, 9.25, [6], (4,)), ("P2", 20, 6.6875, [6], (4,))],
)
def test_pipedream_code_within_memory(chain, memory, value, expected, replicas):
    found = solve("pipedream-code", on(CHAINS[chain], devices=4, rate=4, memory=memory))
    assert (found.value, ends(found), found.replicas) == (value, expected, replicas)


# -- DAPPLE ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("forward", "micro", "exchange", "by_formula", "by_recursion"),
    [
        ([1, 1, 1, 1], 8, (), 33, 33),
        ([2, 4, 2], 5, (), 66, 68),
        ([2, 4, 2], 5, (6, 0, 9), 72, 74),
        ([5, 1, 1], 5, (), 75, 75),
    ],
)
def test_latency_of_a_flush(forward, micro, exchange, by_formula, by_recursion):
    backward = [2 * f for f in forward]
    assert formula(forward, backward, micro, exchange) == by_formula
    assert recursion(forward, backward, micro, exchange) == by_recursion


@pytest.mark.parametrize(
    ("chain", "devices", "rate", "by_formula", "really", "best"),
    [
        ("P1", 4, 1, (86.667, [5, 6], (3, 1)), 97.667, (93.5, [3, 6], (2, 2))),
        ("P2", 4, 1, (56, [3, 6], (1, 3)), 56, (56, [3, 6], (1, 3))),
        ("P1", 4, 4, (72, [2, 6], (1, 3)), 83.5, (73.5, [6], (4,))),
        ("P2", 4, 4, (48, [4, 6], (1, 3)), 53.5, (48.375, [6], (4,))),
        ("P1", 3, 1, (114.667, [6], (3,)), 114.667, (114.667, [6], (3,))),
        ("P2", 3, 1, (77, [3, 6], (1, 2)), 77, (77, [3, 6], (1, 2))),
    ],
)
def test_dapple(chain, devices, rate, by_formula, really, best):
    """t is the forward here, backward twice that; four micro-batches."""
    short = CHAINS[chain]
    longer = replace(short, seconds=tuple(3 * t for t in short.seconds), forward=short.seconds)
    given = on(longer, devices, rate, micro=4)
    published, found = solve("dapple-formula", given), solve("dapple", given)
    assert (round(published.value, 3), ends(published), published.replicas) == by_formula
    assert (round(found.value, 3), ends(found), found.replicas) == best
    plan = brute_force.plan_of(given, published.cuts, published.replicas)
    forward, backward, exchange = brute_force.columns(given, plan)
    assert round(recursion(forward, backward, 4, exchange), 3) == really


def test_the_formula_is_near_the_recursion():
    """Pipelines of 3 to 7 stages with M ≥ 2S: hardly above, sometimes well below, often equal."""
    dice = np.random.default_rng(0)
    ratios = []
    for _ in range(1000):
        stages = int(dice.integers(3, 8))
        forward = dice.integers(1, 10, stages).tolist()
        backward, micro = [2 * f for f in forward], int(dice.integers(2 * stages, 4 * stages))
        ratios.append(formula(forward, backward, micro) / recursion(forward, backward, micro))
    assert max(ratios) <= 1.03
    assert min(ratios) >= 0.8
    assert 0.3 < np.mean(np.isclose(ratios, 1)) < 0.6


# -- Piper, 2BW --------------------------------------------------------------------------------------------------------


def with_states(chain):
    """Twice the weights whatever is in flight; a recomputed block keeps one byte."""
    return replace(chain, states=chain.weights, inputs=(1.0,) * 6)


@pytest.mark.parametrize(
    ("chain", "devices", "micro", "memory", "value", "expected", "replicas", "recomputed"),
    [
        ("P1", 3, 6, 30, 10, [2, 3, 6], (1, 1, 1), ()),
        ("P1", 3, 6, 60, 86 / 9, [6], (3,), ()),
        ("P1", 4, 4, 30, 10, [2, 3, 6], (1, 1, 1), ()),  # three devices are enough
        ("P1", 4, 4, 60, 7.875, [2, 5, 6], (1, 2, 1), ()),
        ("P2", 3, 6, 30, 11.5, [1, 3, 6], (1, 1, 1), ()),
        ("P2", 3, 6, 60, 37 / 6, [4, 6], (1, 2), (2,)),
        ("P2", 4, 4, 30, 6.375, [1, 4, 6], (1, 1, 2), (0, 2)),
        ("P2", 4, 4, 60, 5.5, [3, 5, 6], (1, 2, 1), (2,)),
    ],
)
def test_piper(chain, devices, micro, memory, value, expected, replicas, recomputed):
    given = on(with_states(CHAINS[chain]), devices, 4, memory=memory, micro=micro)
    found = solve("piper", given)
    assert found.value == pytest.approx(value, rel=1e-12)
    assert brute_force.piper(given, brute_force.plan_of(given, tuple(expected[:-1]), replicas)) == pytest.approx(value)
    if (chain, memory, devices) != ("P2", 30, 3):  # there [1, 4, 6] is as good, and ours
        assert (ends(found), found.replicas, found.recompute) == (expected, replicas, recomputed)


@pytest.mark.parametrize("chain", CHAINS)
def test_piper_says_what_would_fit(chain):
    given = on(with_states(CHAINS[chain]), 4, 4, memory=20, micro=4)
    with pytest.raises(PlanError, match=r"partition=piper on 4 devices of 20.00 bytes.*Try devices of 24\.") as error:
        solve("piper", given)
    enough = float(error.value.instead.split()[2])
    assert math.isfinite(solve("piper", replace(given, memory=(enough,) * 4)).value)


@pytest.mark.parametrize(
    ("chain", "devices", "micro", "memory", "value", "sizes", "width", "recomputes"),
    [
        ("P1", 3, 6, 30, 85 / 6, [2, 2, 2], 1, True),
        ("P1", 4, 4, 30, 85 / 6, [2, 2, 2], 1, True),
        ("P1", 3, 6, 60, 86 / 9, [6], 3, False),
        ("P1", 4, 4, 60, 8.375, [3, 3], 2, False),
        ("P2", 4, 4, 30, 89 / 6, [1, 1, 2, 2], 1, True),
        ("P2", 3, 6, 60, 59 / 9, [6], 3, False),
        ("P2", 4, 4, 60, 6.5, [3, 3], 2, False),
    ],
)
def test_2bw(chain, devices, micro, memory, value, sizes, width, recomputes):
    found = solve("2bw", on(with_states(CHAINS[chain]), devices, 4, memory=memory, micro=micro))
    assert found.value == pytest.approx(value, rel=1e-12)
    assert (lengths(found, 6), set(found.replicas)) == (sizes, {width})
    assert found.recompute == (tuple(range(6)) if recomputes else ())


def test_2bw_does_not_fit():
    with pytest.raises(PlanError, match="partition=2bw on 3 devices of 30"):
        solve("2bw", on(with_states(P2), 3, 4, memory=30, micro=6))


# -- HetPipe, Pipe-torch ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chain", "speeds", "memory", "value", "expected", "order"),
    [
        ("P1", (1, 1, 2), math.inf, 6.5, [3, 5, 6], (2, 1, 1)),
        ("P2", (1, 1, 2), math.inf, 5, [3, 5, 6], (1, 2, 1)),
        ("P1", (1, 2, 2, 4), math.inf, 3.5, [3, 4, 5, 6], (4, 1, 2, 2)),
        ("P2", (1, 2, 2, 4), math.inf, 2.75, [1, 3, 5, 6], (1, 2, 4, 2)),
        ("P1", (1, 1, 2), 24, 8.5, [2, 3, 6], (1, 1, 2)),
        ("P2", (1, 1, 2), 24, 6, [1, 3, 6], (1, 1, 2)),
    ],
)
def test_hetpipe(chain, speeds, memory, value, expected, order):
    given = on(CHAINS[chain], speeds=speeds, rate=4, memory=memory)
    found = solve("hetpipe", given, at_once=3 if memory == 24 else None)
    assert (found.value, ends(found)) == (value, expected)
    assert tuple(speeds[device] for (device,) in found.placement) == order


@pytest.mark.parametrize(
    ("chain", "rate", "devices", "value", "expected", "replicas"),
    [
        ("P1", 1, 3, 14, [3, 6], (2, 1)),
        ("P2", 1, 3, 9.5, [3, 6], (1, 2)),
        ("P1", 1, 4, 113 / 9, [5, 6], (3, 1)),
        ("P2", 1, 4, 7, [3, 6], (1, 3)),
        ("P1", 4, 3, 86 / 9, [6], (3,)),
        ("P2", 4, 3, 6.375, [4, 6], (1, 2)),
        ("P1", 4, 4, 7.375, [6], (4,)),
        ("P2", 4, 4, 4.5, [3, 6], (1, 3)),
    ],
)
def test_pipe_torch(chain, rate, devices, value, expected, replicas):
    found = solve("pipe-torch", on(CHAINS[chain], devices=devices, rate=rate))
    assert found.value == pytest.approx(value, rel=1e-12)
    assert (ends(found), found.replicas) == (expected, replicas)


# -- Chimera, TeraPipe -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("depth", "micro", "backward", "seconds"),
    [
        (4, 4, 1, 10), (4, 8, 1, 18), (8, 8, 1, 22),  # F = B: 2N + D − 2
        (4, 4, 2, 16), (4, 8, 2, 30), (4, 16, 2, 58), (8, 24, 2, 96),  # B = 2F
        (4, 8, 3, 42), (4, 16, 3, 82),  # recomputed
    ],
)  # fmt: skip
def test_critical_path_of_chimera(depth, micro, backward, seconds):
    forwards, backwards = critical_path(depth, micro)
    assert forwards + backwards * backward == seconds
    equal = on(instance([1.0 + backward] * depth, forward=[1.0] * depth), devices=depth, micro=micro)
    assert paper(equal, 1, tuple(range(1, depth))) == seconds


@pytest.mark.parametrize(
    ("weights", "boundary", "seconds"),
    [
        ((0, 0, 0, 8), 0, 18),  # an all-reduce of 8, of which 3 backwards hide 6
        ((8, 0, 0, 0), 0, 24),  # nothing comes after the first stage's last backward
        ((0, 0, 0, 6), 0, 16),
        ((0, 0, 0, 0), 1, 26),  # a transfer with every forward and backward of the critical path
    ],
)
def test_flush_of_chimera(weights, boundary, seconds):
    """Four stages of F=1, B=2, four micro-batches: 16, and what communication adds."""
    chain = instance([3.0] * 4, weights, [boundary] * 3, forward=[1.0] * 4)
    assert paper(on(chain, devices=4, rate=1.0, micro=4), 1, (1, 2, 3)) == seconds


def table(units):
    return [[2 + l + 0.25 * l * (c + l / 2) for c in range(units)] for l in range(1, units + 1)]


@pytest.mark.parametrize(
    ("tokens", "stages", "value", "expected"),
    [
        (8, 2, 30, (4, 2, 2)),
        (8, 4, 44.375, (3, 2, 1, 1, 1)),
        (12, 4, 66.375, (3, 2, *[1] * 7)),
        (12, 8, 90.875, (3, 2, *[1] * 7)),
    ],
)
def test_terapipe(tokens, stages, value, expected):
    found = slices(table(tokens), stages)
    assert (found.value, found.slices) == (value, (expected,))


@pytest.mark.parametrize(("size", "value"), [(1, 128), (2, 98.5), (3, 84), (4, 76.625), (6, 70.5), (12, 71.625)])
def test_equal_slices_are_worse(size, value):
    """Sizes in the sense of how many: one slice of twelve, two of six …"""
    seconds, length = table(12), 12 // size
    times = [seconds[length - 1][k * length] for k in range(size)]
    assert sum(times) + 3 * max(times) == value > 66.375
