"""DAPPLE's planner: stages, their widths and their devices, for the shortest flush of a whole pipeline.

A synchronous pipeline fills, runs and drains for every update, so DAPPLE (Fan et al., PPoPP 2021) minimises the latency
of one flush (`latency.py`), not the slowest stage. That is no sum and no maximum over stages, so a dynamic program over
it is a heuristic: a state is (blocks done, devices used), its best beginning is the one whose flush would be shortest
if all the other blocks were *one* last stage on all the other devices, and only that one is extended:

    L(j, used) = min over i < j, group of  latency( beginning of (i, used − group),  i..j on group,  j.. on the rest )

The answer is the least latency that was ever looked at. The devices of the next stage are proposed by three policies:

    fresh     machines that nobody uses yet, then those in use          keeps a stage inside a machine append
    machines partly in use, then unused ones                  leaves no machine half empty scatter   one from each
    machine in turn, round and round            spreads stages, so that neighbours share machines

(In the published planner, fresh and append give up where their own kind of machine does not suffice.) Replicas split
each micro-batch, so q of them take 1/q of its time; gradients are summed over the group's slowest link; and what passes
from group to group takes the slowest link between them (HPGO counts the share that leaves the machine). A replica count
for the whole pipeline on top of it is not part of this.

`dapple` compares beginnings and answers by the recursion, `dapple_formula` by the published formula. A beginning whose
busiest stage alone takes longer than the best flush so far is dropped, which loses nothing. O(used · blocks² · devices
· policies) latencies, where machines that are alike are interchangeable. Where that is too much, devices are taken two,
four … at a time, and the answer says so.

>>> from trainplan.solve.partition.instance import instance, on
>>> chain = instance((12, 6, 21, 3, 9, 15), (1, 2, 8, 1, 2, 6), (6, 3, 2, 4, 1))      # P1 with its seconds as forward
>>> found = dapple(on(chain, devices=4, rate=1.0, micro=4))
>>> found.cuts, found.replicas, found.value
((3,), (2, 2), 93.5)
>>> dapple_formula(on(chain, devices=4, rate=1.0, micro=4)).value        # which would really take 97.67
86.66666666666666
>>> dapple(on(chain, levels=((2, 4.0), (2, 0.1)), micro=4)).placement    # slow between machines: stages stay inside
((0, 1), (2, 3))
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import numpy as np
from numba import njit

from trainplan.errors import PlanError
from trainplan.solve.partition.answer import FLUSH, Partition
from trainplan.solve.partition.instance import Floats, Instance, Ints, alike
from trainplan.solve.partition.latency import latency

_MOST_STATES = 20_000
_MOST_STEPS = 3e10  # ten seconds


class Chain(NamedTuple):
    """Sums of the blocks before j, and what crosses there."""

    forward: Floats
    backward: Floats
    weights: Floats
    crossing: Floats
    micro: int


class Machines(NamedTuple):
    """Equal machines, and the usages that a search can meet: how many units of each are taken."""

    size: int  # units of a machine
    unit: int  # devices that are taken together
    rates: Floats  # [a, b] between machines; [a, a] inside
    codes: Ints  # of all usages, rising
    order: Ints  # the places of those codes, by devices used
    alike: bool  # any two machines may be exchanged


def dapple(given: Instance) -> Partition:
    """The shortest flush by the recursion."""
    return _plan("dapple", given, True)


def dapple_formula(given: Instance) -> Partition:
    """The shortest flush by DAPPLE's formula, for reproduction; its value may be well below what it would take."""
    return _plan("dapple-formula", given, False)


def _plan(name: str, given: Instance, exact: bool) -> Partition:
    speed = alike(name, given)
    machines = _machines(name, given)
    sums = given.arrays
    forward, backward = sums["forward"] / speed, (sums["seconds"] - sums["forward"]) / speed
    chain = Chain(forward, backward, sums["weights"], given.crossing, given.micro)
    value, ends, usage = _search(chain, machines, exact)
    before = np.vstack([np.zeros(usage.shape[1], dtype=np.int64), usage[:-1]])
    unit, placement = machines.unit, list[tuple[int, ...]]()
    for old, new in zip(before.tolist(), usage.tolist(), strict=True):
        start = [m * machines.size * unit for m in range(len(old))]
        taken = (range(s + a * unit, s + b * unit) for s, a, b in zip(start, old, new, strict=True))
        placement.append(tuple(itertools.chain(*taken)))
    cuts = tuple(int(end) for end in ends[:-1])
    notes = (f"devices were planned {unit} at a time",) if unit > 1 else ()
    return Partition(
        cuts, tuple(map(len, placement)), float(value), unit=FLUSH, placement=tuple(placement), notes=notes
    )


def _machines(name: str, given: Instance) -> Machines:
    """The machines with devices in units as small as the search can bear."""
    size = next((level.count for level in given.levels if level.count > 1), 1)
    count = given.devices // size
    rates = np.full((count, count), np.inf)
    for a, b in itertools.product(range(count), repeat=2):
        if a != b or size > 1:
            rates[a, b] = given.rate(a * size, b * size + (a == b))
    same = len(set(rates[~np.eye(count, dtype=bool)].tolist())) <= 1
    for unit in (divisor for divisor in range(1, size + 1) if size % divisor == 0):
        units = size // unit
        states = math.comb(units + count, count) if same else (units + 1) ** count
        longest = min(2 * min(given.devices, given.blocks), 16)
        steps = states * given.blocks**2 / 2 * units * count * longest * (given.micro + longest)
        if states <= _MOST_STATES and steps <= _MOST_STEPS:
            break
    else:
        why = f"{count} machines and {given.blocks} blocks make {states * given.blocks:.0e} states"
        raise PlanError(f"partition={name}", why, "partition=pipedream, or fewer and larger blocks")
    if same:
        usages = list(itertools.combinations_with_replacement(range(units, -1, -1), count))
    else:
        usages = list(itertools.product(range(units + 1), repeat=count))
    rows = np.array(sorted(usages), dtype=np.int64).reshape(states, count)
    codes = rows @ ((units + 1) ** np.arange(count - 1, -1, -1, dtype=np.int64))
    return Machines(units, unit, rates, codes, np.argsort(rows.sum(axis=1), kind="stable"), same)


@njit(cache=True)
def _code(usage: Ints, machines: Machines) -> int:
    """The place of a usage among all; of machines that are alike the fullest come first."""
    ordered = np.sort(usage)[::-1] if machines.alike else usage
    code = 0
    for taken in ordered:
        code = code * (machines.size + 1) + taken
    return int(np.searchsorted(machines.codes, code))


@njit(cache=True)
def take(usage: Ints, size: int, need: int, policy: int) -> Ints:
    """The usage with so many units more: fresh (0), append (1) or scatter (2) first."""
    taken = usage.copy()
    if policy == 2:
        while need > 0:
            for m in range(len(taken)):
                if need > 0 and taken[m] < size:
                    taken[m] += 1
                    need -= 1
        return taken
    for turn in range(2):
        for m in range(len(usage)):
            if (usage[m] == 0) == ((turn == 0) == (policy == 0)):
                more = min(need, size - taken[m])
                taken[m] += more
                need -= more
    return taken


@njit(cache=True)
def _between(rates: Floats, some: Ints, others: Ints) -> float:
    """The slowest link from one group to another."""
    slowest = np.inf
    for a in range(len(some)):
        for b in range(len(others)):
            if some[a] > 0 and others[b] > 0:
                slowest = min(slowest, rates[a, b])
    return slowest


@njit(cache=True)
def _within(rates: Floats, group: Ints, unit: int) -> float:
    """The slowest link of a group; infinite where it is one device."""
    slowest = np.inf
    for a in range(len(group)):
        for b in range(a, len(group)):
            if (a != b and group[a] > 0 and group[b] > 0) or (a == b and group[a] * unit > 1):
                slowest = min(slowest, rates[a, b])
    return slowest


@njit(cache=True)
def _stage(columns: Floats, at: int, chain: Chain, machines: Machines, i: int, j: int, group: Ints, last: Ints) -> None:
    """Write the blocks i ≤ b < j on a group into the columns at a place, with the link to the group before in front."""
    if at > 0:
        moved = chain.crossing[i] / _between(machines.rates, last, group)
        columns[0, at - 1], columns[1, at - 1], columns[2, at - 1] = moved, moved, 0.0
    q = group.sum() * machines.unit
    columns[0, at] = (chain.forward[j] - chain.forward[i]) / q
    columns[1, at] = (chain.backward[j] - chain.backward[i]) / q
    ring = _within(machines.rates, group, machines.unit)
    columns[2, at] = 2.0 * (q - 1) / q * (chain.weights[j] - chain.weights[i]) / ring


@njit(cache=True)
def _beginning(j: int, place: int, came: Ints, usage: Ints, ends: Ints, usages: Ints) -> int:
    """Write the stages of a state's best beginning into `ends` and `usages`, and say how many there are."""
    stages, at, u = 0, j, place
    while at > 0:
        stages += 1
        at, u = came[at, u, 0], came[at, u, 1]
    for s in range(stages - 1, -1, -1):
        ends[s], usages[s] = j, usage[j, place]
        j, place = came[j, place, 0], came[j, place, 1]
    return stages


@njit(cache=True)
def _search(chain: Chain, machines: Machines, exact: bool) -> tuple[float, Ints, Ints]:
    """The least latency, the end of every stage, and the usage after it."""
    blocks, count, states = len(chain.forward) - 1, len(machines.rates), len(machines.codes)
    everything = np.full(count, machines.size)
    most = 2 * min(blocks, count * machines.size) + 1
    columns = np.zeros((3, most))
    value = np.full((blocks + 1, states), np.inf)
    came = np.zeros((blocks + 1, states, 2), dtype=np.int64)  # the state before: blocks done, place of its usage
    usage = np.zeros((blocks + 1, states, count), dtype=np.int64)
    nothing = np.zeros(count, dtype=np.int64)
    empty = _code(nothing, machines)
    value[0, empty] = 0.0
    _stage(columns, 0, chain, machines, 0, blocks, everything, nothing)
    best = latency(columns[0], columns[1], columns[2], 1, chain.micro, exact)
    best_ends = np.array([blocks])
    best_usage = everything.copy().reshape(1, count)
    chain_ends = np.zeros(most, dtype=np.int64)
    chain_usage = np.zeros((most, count), dtype=np.int64)
    for place in machines.order:
        for i in range(blocks):
            if value[i, place] == np.inf:
                continue
            stages, last = _beginning(i, place, came, usage, chain_ends, chain_usage), nothing
            for s in range(stages):
                group = chain_usage[s] - (chain_usage[s - 1] if s else nothing)
                _stage(columns, 2 * s, chain, machines, chain_ends[s - 1] if s else 0, chain_ends[s], group, last)
                last = group
            busiest = 0.0
            for x in range(2 * stages):
                busiest = max(busiest, columns[0, x] + columns[1, x])
            if chain.micro * busiest >= best:
                continue
            used = usage[i, place]
            left = count * machines.size - used.sum()
            for q in range(1, left):
                for policy in range(3):
                    then = take(used, machines.size, q, policy)
                    known = False
                    for earlier in range(policy):
                        known = known or np.array_equal(then, take(used, machines.size, q, earlier))
                    if known:
                        continue
                    code, group, rest = _code(then, machines), then - used, everything - then
                    for j in range(i + 1, blocks):
                        _stage(columns, 2 * stages, chain, machines, i, j, group, last)
                        if chain.micro * (columns[0, 2 * stages] + columns[1, 2 * stages]) >= best:
                            break  # longer stages are only slower
                        _stage(columns, 2 * stages + 2, chain, machines, j, blocks, rest, group)
                        total = latency(columns[0], columns[1], columns[2], 2 * stages + 3, chain.micro, exact)
                        if total < value[j, code]:
                            value[j, code] = total
                            came[j, code, 0], came[j, code, 1] = i, place
                            usage[j, code] = then
                        if total < best:
                            best = total
                            best_ends = np.zeros(stages + 2, dtype=np.int64)
                            best_usage = np.zeros((stages + 2, count), dtype=np.int64)
                            best_ends[:stages], best_usage[:stages] = chain_ends[:stages], chain_usage[:stages]
                            best_ends[stages], best_usage[stages] = j, then
                            best_ends[stages + 1], best_usage[stages + 1] = blocks, everything
    return best, best_ends, best_usage
