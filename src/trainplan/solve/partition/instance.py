"""What a partitioner is given: a chain of blocks, devices, and the links between them.

All the papers' partitioners see the same few numbers a block, so they all take one `Instance`. Numbers are those of one
micro-batch of one size, on a device of speed 1; a device of speed 2 takes half the time. Bytes after a block count
everything that crosses the cut there, skip connections too, in one direction.

Devices count from 0 and are joined by levels: `levels[0]` are the devices of a node, `levels[1]` the nodes of a
cluster, and so on; the rate between two devices is that of the lowest level that holds both. `rates` says it pair by
pair where levels cannot.

The two chains of six blocks on which every partitioner here is worked by hand (P2: one block decides everything):

>>> P1.seconds, P1.weights, P1.boundary
((4.0, 2.0, 7.0, 1.0, 3.0, 5.0), (1.0, 2.0, 8.0, 1.0, 2.0, 6.0), (6.0, 3.0, 2.0, 4.0, 1.0))
>>> P2.seconds, P2.weights, P2.boundary
((1.0, 1.0, 1.0, 1.0, 8.0, 2.0), (9.0, 1.0, 1.0, 1.0, 1.0, 4.0), (2.0, 5.0, 1.0, 3.0, 2.0))
>>> four = on(P1, devices=4, levels=((2, 4.0), (2, 0.5)))      # two nodes of two
>>> four.rate(0, 1), four.rate(1, 2)
(4.0, 0.5)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from trainplan.errors import InputError, PlanError
from trainplan.units import significant

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Column = Sequence[float] | Floats


@dataclass(frozen=True)
class Level:
    """So many of the level below (at the lowest: devices), joined by links of one rate."""

    count: int
    rate: float  # bytes/s between any two of them


@dataclass(frozen=True)
class Instance:
    """A chain and the devices that are to run it. Made by `instance`, which fills in and checks."""

    seconds: tuple[float, ...]  # forward and backward of each block, one micro-batch, at speed 1
    weights: tuple[float, ...]  # bytes of parameters
    boundary: tuple[float, ...]  # bytes that cross the cut after each block but the last, one way
    saved: tuple[float, ...]  # bytes that a micro-batch in flight keeps for backward
    forward: tuple[float, ...]  # seconds of forward alone
    again: tuple[float, ...]  # seconds of what recomputation does once more: forward, or what backward needs of it
    inputs: tuple[float, ...]  # bytes that a micro-batch in flight keeps of a block that is recomputed
    states: tuple[float, ...]  # bytes that are always there beside one copy of the weights: gradients, optimizer
    speeds: tuple[float, ...]  # of each device
    memory: tuple[float, ...]  # bytes that each device may use
    levels: tuple[Level, ...]  # from the devices of a node upwards
    rates: tuple[tuple[float, ...], ...]  # bytes/s between two devices, pair by pair; empty: as the levels say
    micro: int  # micro-batches between two updates

    @property
    def blocks(self) -> int:
        return len(self.seconds)

    @property
    def devices(self) -> int:
        return len(self.speeds)

    @property
    def slowest_rate(self) -> float:
        """For partitioners that know one bandwidth only: the lowest there is."""
        if self.rates:
            pairs = [self.rates[a][b] for a in range(self.devices) for b in range(self.devices) if a != b]
            return min(pairs, default=math.inf)
        return min((level.rate for level in self.levels if level.count > 1), default=math.inf)

    def rate(self, a: int, b: int) -> float:
        """Bytes/s between two different devices."""
        if self.rates:
            return self.rates[a][b]
        size = 1
        for level in self.levels:
            size *= level.count
            if a // size == b // size:
                return level.rate
        raise InputError(f"device {max(a, b)}", f"there are {self.devices}", f"a device from 0 to {self.devices - 1}")

    @cached_property
    def arrays(self) -> dict[str, Floats]:
        """Sums from the first block on, by name: the sum of blocks i ≤ b < j is sums[j] − sums[i]."""
        names = ("seconds", "weights", "saved", "forward", "inputs", "states")
        return {name: np.concatenate([[0.0], np.cumsum(getattr(self, name))]) for name in names}

    @cached_property
    def crossing(self) -> Floats:
        """[j]: bytes that cross the cut before block j, one way; nothing before the first and after the last."""
        return np.array([0.0, *self.boundary, 0.0])


def instance(
    seconds: Column,
    weights: Column = (),
    boundary: Column = (),
    saved: Column = (),
    forward: Column = (),
    inputs: Column = (),
    states: Column = (),
    again: Column = (),
) -> Instance:
    """A chain on one device. What is left out weighs nothing; forward is a third of the seconds, as usual; a recomputed
    block runs forward once more, and keeps what it reads, the boundary before it."""
    blocks = len(seconds)
    if blocks == 0:
        raise InputError("a chain without blocks", "there is nothing to cut", "a chain of one block or more")
    nothing = (0.0,) * blocks

    def filled(column: Column, otherwise: Column) -> Column:
        return column if len(column) else otherwise

    crossing = filled(boundary, nothing[1:])
    forth = filled(forward, [t / 3 for t in seconds])
    given = {
        "seconds": seconds, "weights": filled(weights, nothing), "boundary": crossing, "saved": filled(saved, nothing),
        "forward": forth, "again": filled(again, forth), "inputs": filled(inputs, (0.0, *crossing)),
        "states": filled(states, nothing),
    }  # fmt: skip
    for name, values in given.items():
        want = blocks - 1 if name == "boundary" else blocks
        if len(values) != want:
            why = f"{blocks} blocks have {want} values, not {len(values)}"
            raise InputError(f"{name} of a chain", why, f"{want} values, or leaving {name} out")
        if not all(value >= 0 and math.isfinite(value) for value in values):
            kept = tuple(v if v >= 0 and math.isfinite(v) else 0.0 for v in values)
            raise InputError(f"{name} {tuple(values)}", "each must be zero or more, and finite", str(kept))
    chain = {name: tuple(float(value) for value in values) for name, values in given.items()}
    return Instance(**chain, speeds=(1.0,), memory=(math.inf,), levels=(Level(1, math.inf),), rates=(), micro=1)


def on(
    chain: Instance,
    devices: int | None = None,
    rate: float = math.inf,
    levels: Sequence[tuple[int, float]] = (),
    speeds: Sequence[float] = (),
    memory: float | Sequence[float] = math.inf,
    rates: Sequence[Sequence[float]] = (),
    micro: int | None = None,
) -> Instance:
    """The same chain on other devices: so many (or as many as there are speeds), at one rate or by levels."""
    count = devices if devices is not None else len(speeds) or math.prod(n for n, _ in levels)
    if count < 1:
        raise InputError(f"{count} devices", "something must compute", "1 device or more")
    speed = tuple(float(s) for s in speeds) or (1.0,) * count
    limit = (float(memory),) * count if isinstance(memory, int | float) else tuple(float(m) for m in memory)
    tree = tuple(Level(n, float(r)) for n, r in levels) or (Level(count, float(rate)),)
    table = tuple(tuple(float(r) for r in row) for row in rates)
    for name, length in (("speeds", len(speed)), ("memory limits", len(limit)), ("rows of rates", len(table) or count)):
        if length != count:
            raise InputError(f"{length} {name}", f"there are {count} devices", f"{count} {name}")
    if math.prod(level.count for level in tree) != count:
        shape = " × ".join(str(level.count) for level in tree)
        raise InputError(f"levels of {shape} devices", f"there are {count} devices", f"levels whose product is {count}")
    numbers = [*speed, *limit, *(level.rate for level in tree), *(r for a, row in enumerate(table) for r in row[:a])]
    if not all(number > 0 for number in numbers):
        raise InputError("a speed, rate or memory of zero or less", "it could do nothing", "numbers above zero")
    micro = chain.micro if micro is None else micro
    if micro < 1:
        raise InputError(f"{micro} micro-batches", "a batch has at least one", "1 micro-batch or more")
    return replace(chain, speeds=speed, memory=limit, levels=tree, rates=table, micro=micro)


_SAVED = (4, 3, 5, 2, 3, 2)
P1 = instance((4, 2, 7, 1, 3, 5), (1, 2, 8, 1, 2, 6), (6, 3, 2, 4, 1), _SAVED)
P2 = instance((1, 1, 1, 1, 8, 2), (9, 1, 1, 1, 1, 4), (2, 5, 1, 3, 2), _SAVED)


# -- what several partitioners refuse ------------------------------------------------------------------------------


def enough_blocks(name: str, given: Instance, stages: int) -> None:
    """Refused where there are more stages than blocks."""
    if stages > given.blocks:
        why = f"{stages} stages, but the chain has only {given.blocks} blocks"
        raise PlanError(f"partition={name}", why, f"{given.blocks} stages or fewer")


def alike(name: str, given: Instance) -> float:
    """The speed of all devices; refused where they differ, since this partitioner counts devices only."""
    if len(set(given.speeds)) > 1:
        why = f"it takes all devices for equal, and their speeds go from {min(given.speeds)} to {max(given.speeds)}"
        raise PlanError(f"partition={name}", why, "partition=hetpipe or partition=pipe-torch")
    return given.speeds[0]


def does_not_fit(name: str, given: Instance, fits: Callable[[Instance], bool]) -> PlanError:
    """Why nothing fits, with the least limit (to 1 %) at which something would."""
    limit = min(given.memory)

    def scaled(factor: float) -> Instance:
        return replace(given, memory=tuple(factor * bytes_ for bytes_ in given.memory))

    most = sum(given.weights) + sum(given.saved) + sum(given.states) + sum(given.inputs)
    low, high = 1.0, max(2.0, 2.0 * most * (given.devices + given.micro) / limit)
    asked = f"partition={name} on {given.devices} devices of {_bytes(limit)}"
    if not fits(scaled(high)):
        return PlanError(asked, f"no partition of the {given.blocks} blocks is possible at any size", "other devices")
    while high - low > 0.01 * low:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if fits(scaled(middle)) else (middle, high)
    largest = max(w + a for w, a in zip(given.weights, given.saved, strict=True))
    why = f"no partition of the {given.blocks} blocks fits (the largest block alone takes {_bytes(largest)})"
    return PlanError(asked, why, f"devices of {_bytes(high * limit)}")


def _bytes(size: float) -> str:
    return f"{significant(size, 4)} bytes"
