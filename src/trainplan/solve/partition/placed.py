"""Cutting and placing at once: which stage goes onto which devices, where devices and links differ. Exact.

The core of `hetpipe.py` (one device a stage), `pipe_torch.py` (groups of devices) and `uneven.py` (speeds only). The
time of a stage, of the blocks i ≤ b < j on a group of q devices, is a sum: nothing overlaps within a stage.

    ( Σ seconds / slowest speed + 2 (q−1)/q · Σ weights / slowest link inside
                                + 2 · boundary before / slowest link from the group before
                                + 2 · boundary after / slowest link to the group after    (where it counts)  ) / q

The slowest stage decides. The dynamic program goes over (first block left, devices used, group before):

    X(i, used, before) = min over j, group of  max( time(i..j, before, group, after),  X(j, used + group, group) )

which is exponential in the number of *different* devices only. Twins, that is devices of the same speed, memory and
links to all others, are counted, not named; and of the group before only its links matter. As a stage's time also
depends on the group *after* it, X has the rate of its first link as a further index, and the stage before it asks for
each. O(blocks² · used · groups · rates²).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numba import njit

from trainplan.errors import PlanError
from trainplan.solve.partition.instance import Floats, Instance, Ints

_MOST_STEPS, _MOST_STATES = 8e9, 2e7  # half a minute; a gigabyte


class Columns(NamedTuple):
    """The chain: sums of the blocks before j, and what crosses there."""

    seconds: Floats
    weights: Floats
    saved: Floats
    states: Floats
    crossing: Floats  # bytes there and back


class Groups(NamedTuple):
    """Every group of devices that a stage may have. A state is how many of each kind are in use, as one number."""

    size: Ints  # [group]
    speed: Floats  # [group] of its slowest
    memory: Floats  # [group] of its smallest
    ring: Floats  # [group] rate of its slowest link
    signature: Ints  # [group] groups with the same links to all others have the same
    taken: Ints  # [state, group] state when the group is in use too; −1: not enough devices left
    used: Ints  # [state] devices in use
    link: Ints  # [signature, group] which rate is the slowest between them
    rates: Floats  # the different rates; after them one for no link at all


class Placed(NamedTuple):
    """The answer: value, end of every stage, and its devices."""

    value: float
    ends: tuple[int, ...]
    devices: tuple[tuple[int, ...], ...]


def place(
    name: str,
    given: Instance,
    several: bool,
    after_counts: bool,
    versions: Callable[[int, int], int],
    in_flight: Callable[[int, int], int],
) -> Placed:
    """The best placement on all devices; `value` is infinite where nothing fits.

    `several`: a stage may have several devices. `after_counts`: a stage's time has what it hands on in it. `versions`
    and `in_flight`: copies of the weights and micro-batches that a device keeps, by devices from its stage on and
    replicas.
    """
    kinds = twins(given)
    _refuse_the_endless(name, given, [len(kind) for kind in kinds], several)
    groups, members = _groups(given, kinds, several)
    counts = range(given.devices + 1)
    copies = np.array([[versions(left, q) if q else 0 for q in counts] for left in counts], dtype=np.float64)
    alive = np.array([[in_flight(left, q) if q else 0 for q in counts] for left in counts], dtype=np.float64)
    sums = given.arrays
    chain = Columns(sums["seconds"], sums["weights"], sums["saved"], sums["states"], 2 * given.crossing)
    value, group, end, after = _best(chain, groups, copies, alive, after_counts)
    none = len(groups.rates) - 1
    found = Placed(float(value[0, 0, 0, none]), (), ())
    if not math.isfinite(found.value):
        return found
    left = [list(kind) for kind in kinds]
    place, state, signature, rate = 0, 0, 0, none
    ends, devices = list[int](), list[tuple[int, ...]]()
    while place < given.blocks:
        at = place, state, signature, rate
        chosen, place, rate = int(group[at]), int(end[at]), int(after[at])
        state, signature = int(groups.taken[state, chosen]), int(groups.signature[chosen])
        ends.append(place)
        devices.append(tuple(sorted(left[k].pop(0) for k, n in enumerate(members[chosen]) for _ in range(n))))
    return Placed(found.value, tuple(ends), tuple(devices))


def twins(given: Instance) -> list[list[int]]:
    """Devices that may be exchanged without anybody noticing, together.

    >>> from trainplan.solve.partition.instance import P1, on
    >>> twins(on(P1, speeds=(1, 2, 1))), twins(on(P1, levels=((2, 4.0), (2, 1.0))))
    ([[0, 2], [1]], [[0, 1], [2, 3]])
    """
    kinds: list[list[int]] = []
    for device in range(given.devices):
        for kind in kinds:
            other = kind[0]
            alike = given.speeds[device] == given.speeds[other] and given.memory[device] == given.memory[other]
            others = (third for third in range(given.devices) if third not in (device, other))
            if alike and all(given.rate(device, third) == given.rate(other, third) for third in others):
                kind.append(device)
                break
        else:
            kinds.append([device])
    return kinds


def _groups(given: Instance, kinds: list[list[int]], several: bool) -> tuple[Groups, list[tuple[int, ...]]]:
    """The groups, and how many of each kind are in each."""
    counts = [len(kind) for kind in kinds]
    everything = itertools.product(*(range(n + 1) for n in counts))
    members = [g for g in everything if sum(g) == 1 or (several and sum(g) > 1)]
    between = [[_rate(given, a, b) for b in kinds] for a in kinds]
    ring = [min((between[a][b] for a, b in _pairs(g)), default=math.inf) for g in members]
    links = [tuple(min(between[a][b] for a, n in enumerate(g) if n) for b in range(len(kinds))) for g in members]
    signatures = {link: number for number, link in enumerate(sorted(set(links)))}
    slowest = [[min(s[b] for b, n in enumerate(g) if n) for g in members] for s in signatures]
    rates = sorted({rate for row in slowest for rate in row})
    radix = [math.prod(n + 1 for n in counts[:k]) for k in range(len(counts))]
    total = math.prod(n + 1 for n in counts)
    states = [tuple(u // r % (n + 1) for r, n in zip(radix, counts, strict=True)) for u in range(total)]
    taken = np.full((len(states), len(members)), -1, dtype=np.int64)
    for u, state in enumerate(states):
        for number, g in enumerate(members):
            if all(a + b <= n for a, b, n in zip(state, g, counts, strict=True)):
                taken[u, number] = u + sum(n * r for n, r in zip(g, radix, strict=True))
    kind_speeds = [[given.speeds[kind[0]] for kind, n in zip(kinds, g, strict=True) if n] for g in members]
    kind_memory = [[given.memory[kind[0]] for kind, n in zip(kinds, g, strict=True) if n] for g in members]
    table = Groups(
        size=np.array([sum(g) for g in members]), speed=np.array([min(s) for s in kind_speeds]),
        memory=np.array([min(m) for m in kind_memory]), ring=np.array(ring),
        signature=np.array([signatures[link] for link in links]), taken=taken,
        used=np.array([sum(state) for state in states]),
        link=np.array([[rates.index(rate) for rate in row] for row in slowest]), rates=np.array([*rates, math.inf]),
    )  # fmt: skip
    return table, members


def _rate(given: Instance, a: list[int], b: list[int]) -> float:
    """Between two devices of these kinds; of a kind that has one device, there is none to itself."""
    other = b[0] if b[0] != a[0] else (b[1] if len(b) > 1 else -1)
    return given.rate(a[0], other) if other >= 0 else math.inf


def _pairs(group: tuple[int, ...]) -> list[tuple[int, int]]:
    """The kinds of any two devices of a group."""
    present = [k for k, n in enumerate(group) if n]
    return [*itertools.combinations(present, 2), *((k, k) for k in present if group[k] > 1)]


def _refuse_the_endless(name: str, given: Instance, counts: list[int], several: bool) -> None:
    """Before any table is made: how many steps it would be, counted as the loops below go."""
    states = math.prod(n + 1 for n in counts)
    groups = states - 1 if several else len(counts)
    pairs = math.prod((n + 1) * (n + 2) // 2 for n in counts) if several else states * len(counts)
    everyone = range(given.devices)
    rates = len({given.rate(a, b) for a, b in itertools.combinations(everyone, 2)}) if states < _MOST_STATES else 1
    signatures = min(groups, 2 ** len(counts)) if rates > 1 else 1
    steps = given.blocks**2 / 2 * pairs * rates**2
    if steps > _MOST_STEPS or (given.blocks + 1) * states * signatures * rates > _MOST_STATES:
        why = f"{given.devices} devices of {len(counts)} kinds would take {steps:.0e} steps on {given.blocks} blocks"
        raise PlanError(f"partition={name}", why, "fewer kinds of devices or of links, or partition=pipedream")


@njit(cache=True)
def _best(
    chain: Columns, groups: Groups, copies: Floats, alive: Floats, after_counts: bool
) -> tuple[Floats, Ints, Ints, Ints]:
    """X, and the group, the end and the next link of its first stage."""
    blocks, states = len(chain.seconds) - 1, len(groups.used)
    signatures, none = len(groups.link), len(groups.rates) - 1
    everything = groups.used[states - 1]
    shape = (blocks + 1, states, signatures, none + 1)
    value = np.full(shape, np.inf)
    group, end, after = np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    for i in range(blocks - 1, -1, -1):
        for u in range(states):
            if (groups.used[u] == 0) != (i == 0):
                continue
            left = everything - groups.used[u]
            for g in range(len(groups.size)):
                then = groups.taken[u, g]
                if then < 0:
                    continue
                q = groups.size[g]
                ring = 2.0 * (q - 1) / q / groups.ring[g]
                for rate in range(none + 1):
                    if (rate == none) != (i == 0):
                        continue
                    came = chain.crossing[i] / groups.rates[rate]
                    best, best_end, best_after = np.inf, 0, 0
                    for j in range(i + 1, blocks + 1):
                        held = copies[left, q] * (chain.weights[j] - chain.weights[i])
                        held += alive[left, q] * (chain.saved[j] - chain.saved[i]) + chain.states[j] - chain.states[i]
                        own = (chain.seconds[j] - chain.seconds[i]) / groups.speed[g]
                        own += ring * (chain.weights[j] - chain.weights[i]) + came
                        if held > groups.memory[g] or own / q >= best:
                            break  # and so would longer stages
                        if j == blocks:
                            if then == states - 1 and own / q < best:
                                best, best_end, best_after = own / q, j, none
                            continue
                        for following in range(none):
                            whole = own + (chain.crossing[j] / groups.rates[following] if after_counts else 0.0)
                            total = max(whole / q, value[j, then, groups.signature[g], following])
                            if total < best:
                                best, best_end, best_after = total, j, following
                    for before in range(signatures):
                        if (i == 0 or groups.link[before, g] == rate) and best < value[i, u, before, rate]:
                            value[i, u, before, rate] = best
                            group[i, u, before, rate], end[i, u, before, rate] = g, best_end
                            after[i, u, before, rate] = best_after
    return value, group, end, after
