"""Every exact partitioner equals brute force on 500 random instances: at most 8 blocks and 4 devices, integer costs."""

import itertools
import math
import random
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from solve import brute_force
from solve.brute_force import alike, best, compositions, mixed, plan_of, random_chain, random_limit
from trainplan.errors import PlanError
from trainplan.solve.partition.bottleneck import slowest
from trainplan.solve.partition.chimera import greedy_batch
from trainplan.solve.partition.hetpipe import virtual_workers, worker
from trainplan.solve.partition.instance import P1, instance, on
from trainplan.solve.partition.partitioners import PARTITIONERS
from trainplan.solve.partition.terapipe import slices

COUNT = 500


def answers(name, make, least, value, seed=1, **options):
    """Solve and enumerate so many instances. The value must be the least there is, and the value of the answered plan.

    Returns how many of them nothing fitted.
    """
    dice, impossible = random.Random(seed), 0
    for _ in range(COUNT):
        given = make(dice)
        expected = least(given)
        if expected == math.inf:
            impossible += 1
            with pytest.raises(PlanError, match=f"{given.devices} devices"):
                PARTITIONERS[name](given, **options)
            continue
        found = PARTITIONERS[name](given, **options)
        assert found.value == pytest.approx(expected, rel=1e-12), given
        assert sum(found.replicas) <= given.devices
        plan = plan_of(given, found.cuts, found.replicas, found.placement)
        assert value(given, plan) == pytest.approx(expected, rel=1e-12), given
    return impossible


def one_each(dice):
    """As many devices as blocks at most, of different speed."""
    chain = random_chain(dice)
    count = dice.randint(1, min(4, chain.blocks))
    return on(chain, speeds=[dice.choice([1, 1, 2, 3]) for _ in range(count)])


@pytest.mark.system("elasticpipe", "S")
def test_elasticpipe():
    answers("elasticpipe", one_each, lambda g: best(brute_force.by_speed, g, several=False), brute_force.by_speed)


def test_uneven():
    answers("uneven", one_each, lambda g: best(brute_force.by_speed, g, several=False, any=True), brute_force.by_speed)


@pytest.mark.system("pipedream", "S")
@pytest.mark.parametrize("fewer", [False, True])
def test_pipedream(fewer):
    def least(given):
        return best(brute_force.pipedream, given, fewer=fewer)

    impossible = answers("pipedream", alike, least, brute_force.pipedream, fewer=fewer)
    assert 20 < impossible < 300  # both answers were put to the test


@pytest.mark.system("pipedream", "S")
def test_pipedream_on_two_levels():
    """Levels, memory and states together. Of the flattened plan only the devices are looked at: its links differ."""

    def make(dice):
        chain = random_chain(dice, most=7)
        limit = random_limit(dice, chain)
        return on(chain, levels=((2, dice.choice([1, 4])), (2, dice.choice([0.25, 1, 4]))), memory=limit)

    least = cache(brute_force.pipedream_nested)

    def value(given, plan):
        assert sorted(d for _, _, group in plan for d in group) == [0, 1, 2, 3]
        return least(given)

    assert 20 < answers("pipedream", make, least, value) < 300


@pytest.mark.parametrize("compression", [None, 1.0, 2.0])
def test_pipedream_code(compression):
    def value(given, plan):
        return brute_force.pipedream_code(given, plan, compression)

    answers("pipedream-code", alike, lambda g: best(value, g), value, compression=compression)


@pytest.mark.parametrize("compression", [None, 1.0])
def test_pipedream_code_on_two_levels(compression):
    def make(dice):
        chain = random_chain(dice, most=6)
        limit = random_limit(dice, chain)
        return on(chain, levels=((2, dice.choice([1, 4])), (2, dice.choice([0.25, 1, 4]))), memory=limit)

    @cache
    def least(given):
        return brute_force.pipedream_code_nested(given, compression)

    answers("pipedream-code", make, least, lambda given, plan: least(given), compression=compression)


def test_pipedream_code_on_fewer_devices():
    def make(dice):
        given = alike(dice, least=2)
        return replace(given, memory=(math.inf,) * given.devices)

    answers(
        "pipedream-code", make, lambda g: best(brute_force.pipedream_code, g, fewer=True),
        brute_force.pipedream_code, fewer=True,
    )  # fmt: skip


@pytest.mark.system("piper", "S")
def test_piper():
    """Outside its knapsack Piper is exact: the same greedy choice of what to recompute, over every plan."""
    impossible = answers("piper", alike, lambda g: best(brute_force.piper, g, fewer=True), brute_force.piper)
    assert 20 < impossible < 300


@pytest.mark.system("piper", "S")
def test_piper_where_recomputing_pays():
    """… and what it says it recomputes fits."""
    recomputed = 0

    def value(given, plan):
        nonlocal recomputed
        chosen = set(PARTITIONERS["piper"](given).recompute)
        recomputed += bool(chosen)
        for k, (first, end, group) in enumerate(plan):
            in_flight = math.ceil(brute_force.devices_from(plan, k) / len(group))
            held = sum(given.weights[first:end]) + sum(given.states[first:end])
            for block in range(first, end):
                slim = in_flight * given.inputs[block] + given.saved[block]
                held += slim if block in chosen else in_flight * given.saved[block]
            assert held <= min(given.memory) + 1e-9
        return brute_force.piper(given, plan)

    answers("piper", brute_force.tight, lambda g: best(brute_force.piper, g, fewer=True), value)
    assert recomputed > 100


@pytest.mark.system("2bw", "S")
def test_2bw():
    """Exact over equal pipelines of one width, recomputed or not."""

    def least(given):
        found = math.inf
        for plan in brute_force.plans(given, fewer=True):
            sizes = [end - first for first, end, _ in plan]
            widths = {len(group) for _, _, group in plan}
            if len(widths) > 1 or sorted(sizes) != sizes or sizes[-1] - sizes[0] > 1:
                continue
            for recompute in (False, True):
                found = min(found, value(given, plan, recompute))
        return found

    def value(given, plan, recompute):
        if recompute:  # as if that were how blocks are: slower, and lighter in flight
            again = [t + f for t, f in zip(given.seconds, given.forward, strict=True)]
            states = [s + a for s, a in zip(given.states, given.saved, strict=True)]
            given = replace(given, seconds=tuple(again), states=tuple(states), saved=given.inputs)
        return brute_force.piper(replace(given, inputs=given.saved), plan)  # nothing is left to recompute

    def of_answer(given, plan):
        return min(value(given, plan, False), value(given, plan, True))

    assert 20 < answers("2bw", alike, least, of_answer) < 400


@pytest.mark.system("hetpipe", "S")
@pytest.mark.parametrize("at_once", [1, 2, 4])
def test_hetpipe(at_once):
    def value(given, plan):
        return brute_force.hetpipe(given, plan, at_once)

    def least(given):
        return best(value, given, several=False, any=True)

    assert 5 < answers("hetpipe", mixed, least, value, at_once=at_once) < 400


@pytest.mark.system("pipe-torch", "S")
def test_pipe_torch():
    def least(given):
        return best(brute_force.pipe_torch, given, any=True)

    assert 5 < answers("pipe-torch", lambda dice: mixed(dice, most=6), least, brute_force.pipe_torch) < 400


@pytest.mark.system("pipe-torch", "S")
def test_pipe_torch_on_equal_devices():
    def least(given):
        return best(brute_force.pipe_torch, given)

    assert 20 < answers("pipe-torch", alike, least, brute_force.pipe_torch) < 300


@pytest.mark.system("pipemare", "S")
def test_pipemare():
    def value(given, plan):
        return max(sum(given.weights[first:end]) for first, end, _ in plan)

    answers("pipemare", one_each, lambda g: best(value, g, several=False), value)


@pytest.mark.system("terapipe", "S")
def test_terapipe():
    """Slices, and groups of sequences with slices of their own."""
    dice = random.Random(5)
    for _ in range(COUNT):
        sizes, batch = dice.randint(1, 2), dice.randint(1, 3)
        units = dice.randint(1, 5 if batch > 1 else 8)
        stages = dice.randint(1, 4)
        seconds = np.array([[[dice.randint(1, 20) for _ in range(units)] for _ in range(units)] for _ in range(sizes)])
        cuts = [c for parts in range(1, units + 1) for c in compositions(units, parts)]

        def times(size, lengths, seconds=seconds):
            return [seconds[size - 1][l - 1][sum(lengths[:k])] for k, l in enumerate(lengths)]

        # Of one size of group, the longest slice and the sum are all that matters.
        kinds = {size: {(max(t), sum(t)) for t in (times(size, c) for c in cuts)} for size in range(1, sizes + 1)}
        least = math.inf
        for parts in range(1, batch + 1):
            for groups in compositions(batch, parts):
                if groups == tuple(sorted(groups)) and max(groups) <= sizes:  # their order does not matter
                    for chosen in itertools.product(*(kinds[size] for size in groups)):
                        longest = max(longest for longest, _ in chosen)
                        least = min(least, sum(total for _, total in chosen) + (stages - 1) * longest)
        found = slices(seconds, stages, batch=batch)
        assert found.value == least
        assert sum(found.groups) == batch
        spent = [t for size, lengths in zip(found.groups, found.slices, strict=True) for t in times(size, lengths)]
        assert sum(spent) + (stages - 1) * max(spent) == least
        for epsilon in (0.5, 3.0):
            assert least <= slices(seconds, stages, epsilon, batch).value <= least + (stages - 1) * epsilon


def test_terapipe_just_so_many_slices():
    dice = random.Random(6)
    for _ in range(COUNT):
        units, stages = dice.randint(1, 8), dice.randint(1, 4)
        count = dice.randint(1, units)
        seconds = np.array([[dice.randint(1, 20) for _ in range(units)] for _ in range(units)])

        def value(lengths, seconds=seconds, stages=stages):
            times = [seconds[l - 1][sum(lengths[:k])] for k, l in enumerate(lengths)]
            return sum(times) + (stages - 1) * max(times)

        found = slices(seconds, stages, count=count)
        assert len(found.slices[0]) == count
        assert found.value == value(found.slices[0]) == min(map(value, compositions(units, count)))


@pytest.mark.system("gpipe", "S")
def test_torchgpipe_corrected_keeps_the_promise():
    """No empty stage, and no two stages differ by more than the costliest block."""
    dice = random.Random(11)
    for _ in range(2 * COUNT):
        blocks = dice.randint(1, 14)
        times = [dice.choice([0, 1, 2, 9, dice.randint(0, 20)]) for _ in range(blocks)]
        found = PARTITIONERS["torchgpipe-corrected"](on(instance(times), devices=dice.randint(1, min(7, blocks))))
        assert found.faults == (), times
        sums = [sum(times[a:b]) for a, b in found.bounds(blocks)]
        assert max(sums) - min(sums) <= max(times) + 1e-9, times


@pytest.mark.system("lamp", "S")
def test_lamp_by_memory_is_exact_in_bytes():
    """It fails only where every partition does, and by time it is the bottleneck partition."""
    dice, kinds = random.Random(12), [0, 0, 0]
    for _ in range(COUNT):
        given = random_chain(dice, least=2)
        whole = int(sum(given.weights) + sum(given.saved) + sum(given.states))
        memory, micro = dice.randint(1, 2 * whole + 1), dice.randint(1, 3)
        given = on(given, devices=dice.randint(2, min(4, given.blocks)), memory=memory, micro=micro)
        if best(brute_force.lamp, given, several=False) == math.inf:
            kinds[0] += 1
            with pytest.raises(PlanError, match=f"and a device has {memory}"):
                PARTITIONERS["lamp"](given)
            continue
        found = PARTITIONERS["lamp"](given)
        plan = plan_of(given, found.cuts, found.replicas)
        assert brute_force.lamp(given, plan) == found.value
        if not found.notes:
            kinds[1] += 1
            assert found.value == best(brute_force.by_speed, given, several=False)
        kinds[2] += bool(found.notes)
    assert min(kinds) > 10, kinds


def chimera_flush(given, cuts, replicas):
    """Chimera's own model of a flush, stage by stage; endless where a device, with two stages, does not hold them."""
    edges = [0, *cuts, given.blocks]
    bounds = list(itertools.pairwise(edges))
    depth = len(bounds)

    def each(values):
        return [sum(values[first:end]) for first, end in bounds]

    fixed, saved = [w + s for w, s in zip(each(given.weights), each(given.states), strict=True)], each(given.saved)
    for r in range(depth):
        in_flight = depth // 2 + 1 + min(r, depth - 1 - r)
        both = r, depth - 1 - r
        if sum(fixed[s] for s in both) + in_flight * max(saved[s] for s in both) > min(given.memory):
            return math.inf
    seconds, rate = each(given.seconds), given.slowest_rate
    longest = seconds.index(max(seconds))
    forward = each(given.forward)[longest]
    backward = seconds[longest] - forward
    transfer = max(given.boundary[cut - 1] for cut in cuts) / rate
    units, copies = given.micro // replicas // depth, 2 * replicas
    flush = (depth + 2 * (units - 1)) * (forward + transfer) + units * (2 * depth - 2) * (backward + transfer)
    late = [2 * (copies - 1) / copies * w / rate - s * backward for s, w in enumerate(each(given.weights))]
    return flush + max(0.0, *late)


def chimera_depths(given):
    """For every depth that there is, its cuts and its flush. They are the fastest cuts, of those the lightest."""
    for depth in (2, 4):
        replicas = given.devices // depth
        if depth > given.blocks or given.devices % depth or given.micro % given.devices:
            continue
        ways = [tuple(itertools.accumulate(sizes[:-1])) for sizes in compositions(given.blocks, depth)]
        ranked = {cuts: (slowest(given.seconds, cuts), sum(given.boundary[cut - 1] for cut in cuts)) for cuts in ways}
        cuts = PARTITIONERS["bottleneck"](on(given, devices=depth)).cuts
        assert ranked[cuts] == min(ranked.values())
        flush = chimera_flush(given, cuts, replicas)
        if flush < math.inf:
            yield depth, cuts, flush


@pytest.mark.system("chimera", "S")
def test_chimera():
    """Depth and replicas by the paper's critical path."""
    dice, impossible = random.Random(7), 0
    depths = []
    for _ in range(COUNT):
        chain = random_chain(dice, least=3)
        heavy = dice.choice([1, 4, 16])  # what is dear to exchange goes deep
        chain = replace(chain, weights=tuple(heavy * w for w in chain.weights))
        memory, rate = random_limit(dice, chain), dice.choice([0.5, 1, 4, 100])
        devices, micro = dice.choice([2, 3, 4, 4, 4, 4]), dice.choice([3, 4, 4, 8, 8])
        given = on(chain, devices=devices, rate=rate, memory=memory, micro=micro)
        found = sorted((flush, depth, cuts) for depth, cuts, flush in chimera_depths(given))
        if not found:
            impossible += 1
            with pytest.raises(PlanError, match=f"{given.devices} devices"):
                PARTITIONERS["chimera"](given)
            continue
        answer = PARTITIONERS["chimera"](given)
        assert answer.value == pytest.approx(found[0][0], rel=1e-12), given
        assert answer.stages * answer.replicas[0] == given.devices
        assert (pytest.approx(answer.value, rel=1e-12), answer.stages, answer.cuts) in found, given
        depths.append(answer.stages)
    assert 100 < impossible < 450  # odd devices, odd micro-batches, too little memory
    assert min(depths.count(2), depths.count(4)) > 10


@pytest.mark.system("chimera", "S")
def test_chimera_with_its_greedy_batch():
    """… and for each depth the largest micro-batch that fits."""
    dice, sizes = random.Random(8), []
    for _ in range(COUNT):
        chain, devices = random_chain(dice, least=4), dice.choice([2, 4])
        batch, rate = dice.choice([8, 16, 24]), dice.choice([0.5, 1, 4, 100])
        whole = sum(chain.weights) + sum(chain.states) + 4 * sum(chain.saved)
        memory = dice.choice([math.inf, dice.randint(1, int(2 * whole) + 1)])

        def at(samples, chain=chain, devices=devices, rate=rate, memory=memory):
            def grown(values, factor=samples):
                return tuple(value * factor for value in values)

            large = replace(
                chain, seconds=grown(chain.seconds, samples + 1), forward=grown(chain.forward, samples + 1),
                boundary=grown(chain.boundary), saved=grown(chain.saved),
            )  # fmt: skip
            return on(large, devices=devices, rate=rate, memory=memory)

        largest = {}
        for samples in (1, 2, 4, 8):
            for depth, cuts, flush in chimera_depths(replace(at(samples), micro=batch // samples)):
                largest[depth] = flush, samples, cuts  # the last that fits
        if not largest:
            sizes.append(0)
            with pytest.raises(PlanError, match=f"a batch of {batch}"):
                greedy_batch(at, batch, (1, 2, 4, 8))
            continue
        answer = greedy_batch(at, batch, (1, 2, 4, 8))
        flush, samples, cuts = largest[answer.stages]
        assert answer.value == pytest.approx(min(flush for flush, _, _ in largest.values()), rel=1e-12), chain
        assert (answer.value, answer.samples, answer.cuts) == (pytest.approx(flush, rel=1e-12), samples, cuts), chain
        sizes.append(samples)
    assert all(sizes.count(samples) > 10 for samples in (0, 1, 2, 4)), [sizes.count(s) for s in (0, 1, 2, 4, 8)]


def test_virtual_workers():
    cluster = on(P1, levels=((2, 4.0), (4, 1.0)), speeds=(4, 4, 1, 1, 3, 3, 2, 2))
    assert virtual_workers(cluster, "node") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert virtual_workers(cluster, "equal") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert virtual_workers(cluster, "hybrid") == ((0, 2), (1, 3), (4, 6), (5, 7))
    part = worker(cluster, (0, 1, 2))
    assert (part.speeds, part.rate(0, 1), part.rate(1, 2)) == ((4, 4, 1), 4, 1)
    assert PARTITIONERS["hetpipe"](part).replicas == (1, 1, 1)
    with pytest.raises(PlanError, match="node, equal and hybrid"):
        virtual_workers(cluster, "random")
