"""Gradient buckets: which gradients travel together, and when they are ready.

The rule is that of torch's DDP from its second step on: gradients join a bucket in the order in which they arrive, and
a bucket is closed once it has *reached* the limit, so it may exceed it by part of its last gradient.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainplan.profile.profile import Parameter, Profile
from trainplan.program.program import Ints


@dataclass(frozen=True)
class Bucket:
    """Gradients that are summed in one go."""

    names: tuple[str, ...]
    bytes: int
    block: int = 0  # the backward pass of this block completes it
    ready: float = 1.0  # share of the stage's backward pass that is over then
    element: int = 4  # bytes of a number


def fill(sizes: Sequence[int], limit: int, types: Sequence[int] = ()) -> list[list[int]]:
    """Indices of the sizes, bucket by bucket, in the order in which these are complete. A bucket is one tensor, so of
    gradients that have several `types` each type has its own.

    >>> mib = [2, 16, 8, 4, 0.5, 0.5]          # the six layers of docs/design.md, in order of arrival
    >>> fill([int(s * 2**20) for s in mib], 25 * 2**20), fill([int(s * 2**20) for s in mib], 4 * 2**20)
    ([[0, 1, 2], [3, 4, 5]], [[0, 1], [2], [3], [4, 5]])
    >>> fill([4, 2, 4, 2], 8, types=[4, 2, 4, 2]), fill([4, 2, 4, 2], 4, types=[4, 2, 4, 2])
    ([[0, 2], [1, 3]], [[0], [2], [1, 3]])
    """
    buckets: list[list[int]] = []
    filling: dict[int, tuple[list[int], int]] = {}  # by type, the last bucket and its bytes
    for number, bytes_ in enumerate(sizes):
        kind = types[number] if types else 0
        bucket, size = filling.get(kind, ([], limit))  # so that the first gradient opens a bucket
        if size >= limit:
            buckets.append(bucket := [])
            size = 0
        bucket.append(number)
        filling[kind] = bucket, size + bytes_
    return sorted(buckets, key=lambda bucket: bucket[-1])


def stage_buckets(
    profile: Profile,
    parameters: Sequence[Parameter],
    first: int,
    last: int,
    limit: int,
    samples: float,
    counts: Sequence[int] = (),
) -> list[Bucket]:
    """The buckets of a stage, in the order in which they become ready; tied weights of other stages are not in them.
    `counts`: how many gradients are in each, whatever the limit."""

    def found() -> list[Bucket]:
        # The gradient of a parameter that several blocks use is complete when the earliest of them is through.
        inside = [p for p in parameters if p.trainable and first <= p.low and p.high < last]
        whole = profile.total("backward_s", first, last, samples)
        at = {  # seconds of going back through the blocks behind one, and through itself
            block: (
                profile.total("backward_s", block + 1, last, samples),
                profile.total("backward_s", block, block + 1, samples),
            )
            for block in {p.low for p in inside}
        }
        ready = [1.0] * len(inside)
        if whole > 0:
            ready = [(later + p.ready * own) / whole for p in inside for later, own in (at[p.low],)]
        types = () if profile.one_type else [_element([p]) for p in inside]
        buckets = []
        latest = 0.0
        ends = list(itertools.accumulate(counts))
        ways = [list(range(end - count, end)) for end, count in zip(ends, counts, strict=True)]
        for numbers in ways or fill([p.bytes for p in inside], limit, types):
            members = [inside[n] for n in numbers]
            latest = max(latest, *[ready[n] for n in numbers])
            names, size = tuple([p.name for p in members]), sum([p.bytes for p in members])
            block = min([p.low for p in members])
            buckets.append(Bucket(names, size, block, min(latest, 1.0), _element(members)))
        return buckets

    key = "buckets", first, last, limit, samples, tuple(counts), len(parameters)
    return list(kept(profile, key, found))


def _element(parameters: Sequence[Parameter]) -> int:
    """Bytes of one number of theirs."""
    return max(1, sum([p.bytes for p in parameters]) // max(1, sum([p.count for p in parameters])))


@dataclass(frozen=True)
class Tie:
    """Weights that several stages hold: their gradients are summed over all holders."""

    stages: tuple[int, ...]
    names: tuple[str, ...]
    bytes: int
    element: int = 4  # bytes of a number


def kept(profile: Profile, key: Any, make: Callable[[], Any]) -> Any:
    """What was made of a profile, made once."""
    known = profile.known_stages
    if key not in known:
        known[key] = make()
    return known[key]


def parameters_by_stage(profile: Profile, bounds: tuple[tuple[int, int], ...]) -> list[list[Parameter]]:
    """The parameters that each stage uses, in order of gradient arrival."""
    found: list[list[Parameter]] = kept(profile, ("parameters", bounds), lambda: _parameters_by_stage(profile, bounds))
    return found


def _parameters_by_stage(profile: Profile, bounds: tuple[tuple[int, int], ...]) -> list[list[Parameter]]:
    stage_of = [stage for stage, (first, last) in enumerate(bounds) for _ in range(first, last)]
    found: list[list[Parameter]] = [[] for _ in bounds]
    for parameter in profile.parameters:
        blocks = parameter.blocks
        if len(blocks) == 1:  # nearly all of them
            found[stage_of[blocks[0]]].append(parameter)
            continue
        for stage in sorted({stage_of[block] for block in blocks}):
            found[stage].append(parameter)
    return found


def trainable_by_stage(profile: Profile, bounds: tuple[tuple[int, int], ...]) -> list[list[Parameter]]:
    """Those of them that are trained."""

    def made() -> list[list[Parameter]]:
        return [[p for p in own if p.trainable] for own in parameters_by_stage(profile, bounds)]

    found: list[list[Parameter]] = kept(profile, ("trainable", bounds), made)
    return found


def held_by_stage(profile: Profile, bounds: tuple[tuple[int, int], ...]) -> tuple[Ints, Ints, Ints]:
    """What each stage holds: bytes of weights, elements of those that are trained, and bytes of running statistics."""

    def made() -> tuple[Ints, Ints, Ints]:
        own = parameters_by_stage(profile, bounds)
        weights = [sum([p.bytes for p in parameters]) for parameters in own]
        states = [sum([p.count for p in parameters if p.trainable]) for parameters in own]
        buffers = [sum(block.buffer_bytes for block in profile.blocks[first:last]) for first, last in bounds]
        return np.array(weights), np.array(states), np.array(buffers)

    found: tuple[Ints, Ints, Ints] = kept(profile, ("held", bounds), made)
    return found


def trained(profile: Profile, bound: tuple[int, int]) -> int:
    """Elements of the weights of a stage that are trained."""
    of = profile.parameters_of(*bound)
    found: int = kept(profile, ("trained", bound), lambda: sum(p.count for p in of if p.trainable))
    return found


def ties(profile: Profile, bounds: tuple[tuple[int, int], ...]) -> list[Tie]:
    """The groups of stages that share weights."""
    found: list[Tie] = kept(profile, ("ties", bounds), lambda: _ties(profile, bounds))
    return found


def _ties(profile: Profile, bounds: tuple[tuple[int, int], ...]) -> list[Tie]:
    stage_of = [stage for stage, (first, last) in enumerate(bounds) for _ in range(first, last)]
    found: dict[tuple[int, ...], list[Parameter]] = {}
    for parameter in profile.parameters:
        if len(parameter.blocks) == 1:
            continue
        holders = tuple(sorted({stage_of[block] for block in parameter.blocks}))
        if len(holders) > 1 and parameter.trainable:
            found.setdefault(holders, []).append(parameter)
    return [
        Tie(stages, tuple(p.name for p in group), sum(p.bytes for p in group), _element(group))
        for stages, group in sorted(found.items())
    ]
