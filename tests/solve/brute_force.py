"""Every partition of a small instance, and what each paper minimises, written down plainly: what solvers are held to.

A plan is a list of stages (first block, end, devices). `plans` lists them all, in one of four ways:

    plans(given)                             replicas of a stage side by side, devices in order (they are all alike)
    plans(given, several=False)              one device a stage, in order
    plans(given, several=False, any=True)    … in any order
    plans(given, any=True)                   any devices for any stage

and the functions below give a plan's value, infinite where it does not fit. They share nothing with the solvers.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace

from trainplan.solve.partition.instance import Instance, instance, on

Stage = tuple[int, int, tuple[int, ...]]
Plan = tuple[Stage, ...]
Value = Callable[[Instance, Plan], float]


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Ways to write a number as a sum of so many positive ones, in order."""
    for cuts in itertools.combinations(range(1, total), parts - 1):
        yield tuple(b - a for a, b in itertools.pairwise((0, *cuts, total)))


def groupings(devices: tuple[int, ...], shares: tuple[int, ...], any: bool) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Ways to deal devices out in such shares: in order, or any."""
    if not shares:
        yield ()
        return
    for hand in itertools.combinations(devices, shares[0]) if any else [devices[: shares[0]]]:
        rest = tuple(device for device in devices if device not in hand)
        for others in groupings(rest, shares[1:], any):
            yield (hand, *others)


def plans(given: Instance, several: bool = True, any: bool = False, fewer: bool = False) -> Iterator[Plan]:
    """Every plan; `fewer`: also those that leave the last devices out."""
    for used in range(1 if fewer else given.devices, given.devices + 1):
        for stages in range(1, min(given.blocks, used) + 1):
            shares = list(compositions(used, stages)) if several else [(1,) * stages] * (stages == used)
            dealt = [groups for share in shares for groups in groupings(tuple(range(used)), share, any)]
            for lengths in compositions(given.blocks, stages):
                edges = list(itertools.accumulate(lengths, initial=0))
                for groups in dealt:
                    yield tuple(zip(edges, edges[1:], groups, strict=False))


def best(value: Value, given: Instance, **kinds: bool) -> float:
    """The least value of any plan."""
    return min((value(given, plan) for plan in plans(given, **kinds)), default=math.inf)


def plan_of(given: Instance, cuts: tuple[int, ...], replicas: tuple[int, ...], placement: tuple = ()) -> Plan:
    """The plan that a solver answered."""
    edges, at = (0, *cuts, given.blocks), list(itertools.accumulate(replicas, initial=0))
    groups = placement or [tuple(range(a, b)) for a, b in itertools.pairwise(at)]
    return tuple(zip(edges, edges[1:], groups, strict=False))


# -- what each paper minimises --------------------------------------------------------------------------------------


def total(values: tuple[float, ...], stage: Stage) -> float:
    return sum(values[stage[0] : stage[1]])


def ring(count: int) -> float:
    return 2 * (count - 1) / count


def slowest_link(given: Instance, some: tuple[int, ...], others: tuple[int, ...]) -> float:
    return min((given.rate(a, b) for a in some for b in others if a != b), default=math.inf)


def devices_from(plan: Plan, k: int) -> int:
    """Devices of a stage and of all behind it."""
    return sum(len(group) for _, _, group in plan[k:])


def by_speed(given: Instance, plan: Plan) -> float:
    return max(total(given.seconds, stage) / given.speeds[stage[2][0]] for stage in plan)


def pipedream(given: Instance, plan: Plan) -> float:
    """One level: all links alike."""
    rate, worst = given.slowest_rate, 0.0
    for k, stage in enumerate(plan):
        q = len(stage[2])
        versions = math.ceil(devices_from(plan, k) / q)
        held = versions * (total(given.weights, stage) + total(given.saved, stage)) + total(given.states, stage)
        if held > min(given.memory):
            return math.inf
        worst = max(worst, total(given.seconds, stage) / q, ring(q) * total(given.weights, stage) / rate / q)
        worst = max(worst, 2 * given.crossing[stage[0]] / rate)
    return worst


def pipedream_nested(given: Instance) -> float:
    """Two levels: nodes hold stages, each cut again for the devices of a node; replicas of a node are cut alike."""
    (inner, outer), worst = given.levels, math.inf
    per_node = {"rate": inner.rate, "memory": math.inf}

    def whole(nodes: Plan) -> Iterator[float]:
        """Every way to cut the stages of the nodes again."""
        choices = []
        for k, (first, end, group) in enumerate(nodes):
            part = on(segment(given, first, end), devices=inner.count, **per_node)
            after, q = devices_from(nodes, k + 1) * inner.count, len(group)
            options = []
            for plan in plans(part):
                time = pipedream(part, plan)
                for s, stage in enumerate(plan):
                    width = len(stage[2]) * q
                    versions = math.ceil((devices_from(plan, s) * q + after) / width)
                    held = versions * (total(part.weights, stage) + total(part.saved, stage))
                    if held + total(part.states, stage) > min(given.memory):
                        time = math.inf
                options.append(max(time, ring(q) * sum(part.weights) / outer.rate) / q)
            choices.append(options)
        crossing = max(2 * given.crossing[first] / outer.rate for first, _, _ in nodes)
        for chosen in itertools.product(*choices):
            yield max(crossing, *chosen)

    for nodes in plans(on(given, devices=outer.count)):
        worst = min([worst, *whole(nodes)])
    return worst


def segment(given: Instance, first: int, end: int) -> Instance:
    """Some of the blocks."""
    names = ("seconds", "weights", "saved", "forward", "inputs", "states")
    columns = {name: getattr(given, name)[first:end] for name in names}
    return instance(**columns, boundary=given.boundary[first : end - 1])


def pipedream_code(given: Instance, plan: Plan, compression: float | None = None) -> float:
    """One level: all links alike."""
    segments = {(i, j): sum(given.seconds[i:j]) for i, j, _ in plan}
    return pipedream_code_level(given, plan, segments, given.slowest_rate, 1, compression)


def pipedream_code_level(
    given: Instance, plan: Plan, segments: dict[tuple[int, int], float], rate: float, below: int,
    compression: float | None,
) -> float:  # fmt: skip
    """A plan on units of one level, of which a segment takes so long."""
    worst = 0.0
    for k, stage in enumerate(plan):
        q, weights = len(stage[2]), total(given.weights, stage)
        copies = math.ceil(devices_from(plan, k + 1) / q)
        if copies * (weights + total(given.saved, stage)) > min(given.memory):
            return math.inf
        sync = 4 * (q - 1) / q * weights / rate / (below if k == 0 else 1)
        worst = max(worst, (segments[stage[:2]] + sync) / q)
        if compression is not None and k > 0:
            passed = max(given.crossing[stage[0]], given.crossing[stage[1]])
            worst = max(worst, 2 * passed / rate / q / compression)
    return worst


def pipedream_code_nested(given: Instance, compression: float | None = None) -> float:
    """Level by level: what a segment takes on all units of the level below is its time on one unit of this one."""
    pairs = [(i, j) for j in range(1, given.blocks + 1) for i in range(j)]
    segments, below = {(i, j): sum(given.seconds[i:j]) for i, j in pairs}, 1
    for level in given.levels:
        found = {}
        for first, end in pairs:
            shifted = [
                tuple((first + i, first + j, group) for i, j, group in plan)
                for plan in plans(on(segment(given, first, end), devices=level.count))
            ]
            found[first, end] = min(
                pipedream_code_level(given, plan, segments, level.rate, below, compression) for plan in shifted
            )
        segments, below = found, level.count
    return segments[0, given.blocks]


def options(given: Instance, stage: Stage, in_flight: int, exact: bool = False) -> float:
    """Seconds of a stage whose blocks are plain or recomputed: Piper's greedy choice, or the best."""
    blocks = range(stage[0], stage[1])
    plain = [given.weights[b] + given.states[b] + in_flight * given.saved[b] for b in blocks]
    slim = [given.weights[b] + given.states[b] + in_flight * given.inputs[b] + given.saved[b] for b in blocks]
    again, limit = [given.forward[b] for b in blocks], min(given.memory)
    if exact:
        found = math.inf
        for chosen in itertools.product((False, True), repeat=len(plain)):
            if sum(s if c else p for p, s, c in zip(plain, slim, chosen, strict=True)) <= limit:
                found = min(found, sum(itertools.compress(again, chosen)))
        return total(given.seconds, stage) + found
    over, extra = sum(plain) - limit, 0.0
    price = sorted((a / (p - s), p - s, a) for p, s, a in zip(plain, slim, again, strict=True) if p > s)
    while over > 1e-9:
        if not price:
            return math.inf
        _, saves, seconds = price.pop(0)
        over, extra = over - saves, extra + seconds
    return total(given.seconds, stage) + extra


def piper(given: Instance, plan: Plan, exact: bool = False) -> float:
    rate, worst = given.slowest_rate, 0.0
    if devices_from(plan, 0) > given.micro or any_does_not_divide(given, plan):
        return math.inf
    for k, stage in enumerate(plan):
        d = len(stage[2])
        in_flight = math.ceil(devices_from(plan, k) / d)
        time = options(given, stage, in_flight, exact)
        moved = 2 * (given.crossing[stage[0]] + given.crossing[stage[1]]) / rate
        worst = max(worst, (time + moved) / d + 4 * (d - 1) / d * total(given.weights, stage) / (given.micro * rate))
    return worst


def any_does_not_divide(given: Instance, plan: Plan) -> bool:
    return any(given.micro % len(group) for _, _, group in plan)


def hetpipe(given: Instance, plan: Plan, at_once: int) -> float:
    worst = 0.0
    for k, stage in enumerate(plan):
        device = stage[2][0]
        held = total(given.weights, stage) + total(given.states, stage)
        if held + min(at_once, len(plan) - k) * total(given.saved, stage) > given.memory[device]:
            return math.inf
        came = 2 * given.crossing[stage[0]] / given.rate(plan[k - 1][2][0], device) if k else 0.0
        worst = max(worst, total(given.seconds, stage) / given.speeds[device] + came)
    return worst


def pipe_torch(given: Instance, plan: Plan) -> float:
    worst = 0.0
    for k, stage in enumerate(plan):
        group, q = stage[2], len(stage[2])
        versions = math.ceil(devices_from(plan, k) / q)
        held = versions * (total(given.weights, stage) + total(given.saved, stage)) + total(given.states, stage)
        if held > min(given.memory[d] for d in group):
            return math.inf
        time = total(given.seconds, stage) / min(given.speeds[d] for d in group)
        time += ring(q) * total(given.weights, stage) / slowest_link(given, group, group)
        for other in (k - 1, k + 1):
            if 0 <= other < len(plan):
                edge = stage[0] if other < k else stage[1]
                time += 2 * given.crossing[edge] / slowest_link(given, group, plan[other][2])
        worst = max(worst, time / q)
    return worst


def lamp(given: Instance, plan: Plan) -> float:
    """The slowest stage, where all micro-batches are held at once."""
    for stage in plan:
        held = total(given.weights, stage) + total(given.states, stage) + given.micro * total(given.saved, stage)
        if held > min(given.memory):
            return math.inf
    return by_speed(given, plan)


def bapipe(given: Instance, plan: Plan) -> float:
    """BaPipe's estimate of a flush, in the better of its two orders that fit."""
    p, m, best_flush = len(plan), given.micro, math.inf
    sends = [given.crossing[first] / given.rate(k, k + 1) for k, (first, _, _) in enumerate(plan[1:])]
    transfer = max(sends, default=0)
    for order, warm in (("1f1b-early", 2), ("1f1b", 1)):
        fits = True
        for k, stage in enumerate(plan):
            in_flight = min(m, warm * (p - k) - warm + 1)
            held = total(given.weights, stage) + total(given.states, stage) + in_flight * total(given.saved, stage)
            fits = fits and held <= given.memory[k]
        waits = 2 * m * transfer * (p - 1) / p if order == "1f1b" else 0
        if fits:
            best_flush = min(best_flush, (m + p - 1) * by_speed(given, plan) + 2 * (p - 1) * transfer + waits)
    return best_flush


def columns(given: Instance, plan: Plan) -> tuple[list[float], list[float], list[float]]:
    """Forward, backward and exchange of every stage of a flush, links among them."""
    forward, backward, exchange = [], [], []
    for k, stage in enumerate(plan):
        if k:
            moved = given.crossing[stage[0]] / slowest_link(given, plan[k - 1][2], stage[2])
            forward, backward, exchange = [*forward, moved], [*backward, moved], [*exchange, 0.0]
        q, first = len(stage[2]), total(given.forward, stage)
        forward.append(first / q)
        backward.append((total(given.seconds, stage) - first) / q)
        exchange.append(ring(q) * total(given.weights, stage) / slowest_link(given, stage[2], stage[2]))
    return forward, backward, exchange


# -- instances -------------------------------------------------------------------------------------------------------


def random_chain(dice: random.Random, least: int = 1, most: int = 8) -> Instance:
    """Integer costs, forward a part of the seconds."""
    blocks = dice.randint(least, most)

    def numbers(low: int, high: int, count: int = blocks) -> list[int]:
        return [dice.randint(low, high) for _ in range(count)]

    seconds = numbers(1, 9)
    return instance(
        seconds, numbers(0, 9), numbers(0, 9, blocks - 1), numbers(0, 6), [dice.randint(0, t) for t in seconds],
        numbers(0, 3), numbers(0, 4),
    )  # fmt: skip


def random_limit(dice: random.Random, given: Instance) -> float:
    """Half the time none; else about what a part of the chain takes."""
    whole = sum(given.weights) + sum(given.saved) + sum(given.states) + 1
    return math.inf if dice.random() < 0.5 else dice.randint(1, int(2 * whole) + 1)


def alike(dice: random.Random, **chain: int) -> Instance:
    """Equal devices, one kind of link."""
    given = random_chain(dice, **chain)
    return on(
        given, devices=dice.randint(1, 4), rate=dice.choice([0.5, 1, 2, 4, 100]), memory=random_limit(dice, given),
        micro=dice.choice([1, 2, 3, 4, 6, 8]),
    )  # fmt: skip


def tight(dice: random.Random) -> Instance:
    """Equal devices with much to save and little memory: where recomputing pays."""
    given = random_chain(dice, least=4)
    heavy = replace(given, saved=tuple(4 * bytes_ for bytes_ in given.saved))
    whole = sum(heavy.weights) + sum(heavy.saved) + sum(heavy.states) + 1
    memory, micro = dice.randint(int(whole / 3), int(whole)), dice.choice([4, 6, 8, 12])
    return on(heavy, devices=dice.randint(2, 4), rate=dice.choice([1, 4, 100]), memory=memory, micro=micro)


def mixed(dice: random.Random, devices: int = 4, **chain: int) -> Instance:
    """Devices, limits and links that differ, some of them alike."""
    given = random_chain(dice, **chain)
    count = dice.randint(1, min(devices, given.blocks))
    rates = [[1.0] * count for _ in range(count)]
    for a, b in itertools.combinations(range(count), 2):
        rates[a][b] = rates[b][a] = dice.choice([1, 2, 4])
    return on(
        given, speeds=[dice.choice([1, 1, 2, 4]) for _ in range(count)],
        memory=[random_limit(dice, given) for _ in range(count)], rates=rates,
    )  # fmt: skip
