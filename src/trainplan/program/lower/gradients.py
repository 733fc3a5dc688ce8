"""Memory of weights: their gradients, how these are exchanged, and the step that uses them.

one replica           gradients come with the first backward pass of a step, and go with its STEP
buckets of our own    gradients are views of the buckets, which stay
torch's DDP           the same; but passes before the last of a step gather gradients beside the buckets, and the
                      last one puts them in
"""

from __future__ import annotations

import numpy as np

from trainplan.profile.footprint import footprints, update_workspace, worst
from trainplan.profile.profile import Parameter
from trainplan.program.lower.found import Found
from trainplan.program.lower.layout import Layout
from trainplan.program.lower.ledger import Ledger
from trainplan.program.ops import Kind, Value
from trainplan.program.program import Ints


def gradients(ledger: Ledger, found: Found, ranks: Ints) -> None:
    """Gradients of the weights, and the facts that exchange, norm and step wait for."""
    layout, plan = found.layout, found.layout.plan
    stages = range(plan.pp)
    home = np.repeat(ranks, found.steps, axis=1)
    step = found.once(Kind.STEP, stages)
    clips = found.layout.clips
    norm = np.repeat(found.once(Kind.NORM, [0]), plan.pp, axis=0) if clips else np.full_like(step, -1)
    trainable = [[p for p in parameters if p.trainable] for parameters in layout.parameters]
    if plan.dp > 1:
        sizes = np.array([sum(bucket.bytes for bucket in buckets) for buckets in layout.buckets])
        never = np.full(ranks.shape, -1, dtype=np.int64)
        ledger.add(Value.GRADIENTS, sizes[:, None], ranks, never, never)
        if layout.gathers:
            _beside_the_buckets(ledger, found, home[0], trainable[0])
        # Weights that several stages hold are in no bucket.
        trainable = [[p for p in some if layout.is_tied(p)] for some in trainable]
    if layout.recomputes:
        _block_by_block(ledger, found, home, step, trainable)
    else:
        _by_first_pass(ledger, found, home, step, trainable)
    complete = found.passes(found.backward(stages, final=True)).max(axis=2)  # later operations have higher numbers
    if clips:
        ledger.add(Value.TOKEN, 0, home, complete, norm, (norm,))
        ledger.add(Value.TOKEN, 0, home, norm, step, (step,))
    # Bucket k: the piece of backward that completes it → its exchange → the norm or the step.
    buckets = [(stage, unit) for stage in stages for unit in range(len(layout.buckets[stage]))]
    of, units = [stage for stage, _ in buckets], [unit for _, unit in buckets]
    cuts = [layout.buckets[stage][unit].block if layout.recomputes else unit for stage, unit in buckets]
    piece = found.passes(found.ops(Kind.B, of, units=cuts)).max(axis=2)
    reduce = found.shared(Kind.REDUCE_GRAD, of, units=units)
    ledger.add(Value.TOKEN, 0, home[of], piece, reduce, (reduce,))
    ledger.add(Value.TOKEN, 0, home[of], reduce, step[of], (norm[of], step[of]))
    for number, tie in enumerate(layout.ties):
        holders = list(tie.stages)
        reduce = found.shared(Kind.REDUCE_GRAD, [holders[0]] * len(holders), [layout.first_tie + number] * len(holders))
        ledger.add(Value.TOKEN, 0, home[holders], complete[holders], reduce, (reduce,))
        ledger.add(Value.TOKEN, 0, home[holders], reduce, step[holders], (norm[holders], step[holders]))
        # They are put side by side for the exchange; the sum takes the place of the gradients when it is used.
        ledger.add(Value.COMMUNICATION, tie.bytes, home[holders], reduce, step[holders], early=True)


def updates(ledger: Ledger, found: Found, ranks: Ints) -> None:
    """What the norm of the gradients and the optimizer's step need while they run."""
    layout, profile = found.layout, found.layout.profile
    home = np.repeat(ranks, found.steps, axis=1)
    stages = range(layout.plan.pp)
    step = found.once(Kind.STEP, stages)
    update = [update_workspace(profile, first, last) for first, last in layout.plan.bounds]
    if profile.clip_norm > 0:
        norm = [max((_squared(p) for p in own if p.trainable), default=0) for own in layout.parameters]
        if layout.clips:
            ops = np.repeat(found.once(Kind.NORM, [0]), layout.plan.pp, axis=0)
            ledger.add_some(Value.WORKSPACE, np.array(norm)[:, None], home, ops, ops)
        else:  # one stage: it is worked out where it is used
            update = [max(pair) for pair in zip(update, norm, strict=True)]
    ledger.add_some(Value.WORKSPACE, np.array(update, dtype=np.int64)[:, None], home, step, step)


def _squared(parameter: Parameter) -> int:
    """A gradient in double precision, and its square."""
    double = 8 * parameter.count
    return double + (double if parameter.bytes < double else 0)


def _by_first_pass(
    ledger: Ledger, found: Found, home: Ints, step: Ints, parameters: list[list[Parameter]]
) -> None:  # fmt: skip
    """Gradients that the first backward pass of a step makes: those that are there at its worst moment, and the rest
    when it is over."""
    stages = range(len(parameters))
    total = np.array([sum(p.bytes for p in own) for own in parameters], dtype=np.int64)
    if not total.any():
        return
    ops, there = _first_pass(found, [_bytes_by_block(found.layout, s, own) for s, own in enumerate(parameters)])
    ledger.add(Value.GRADIENTS, there, home, ops, step, (step,))
    ledger.add_some(Value.GRADIENTS, total[list(stages), None] - there, home, ops, step, late=True)


def _beside_the_buckets(ledger: Ledger, found: Found, home: Ints, parameters: list[Parameter]) -> None:
    """What DDP's passes before the last of a step gather: each bucket's goes when the bucket is filled."""
    layout = found.layout
    known = {p.name: p for p in parameters}
    for unit, bucket in enumerate(layout.buckets[0]):
        own = _bytes_by_block(layout, 0, [known[name] for name in bucket.names])
        ops, there = _first_pass(found, [own])
        full = found.passes(found.ops(Kind.B, [0], units=[unit])).max(axis=2)
        ledger.add_some(Value.GRADIENTS, there, home, ops, full)
        ledger.add_some(Value.GRADIENTS, bucket.bytes - there, home, ops, full, late=True)


def _first_pass(found: Found, sizes: list[dict[int, int]]) -> tuple[Ints, Ints]:
    """The first backward pass of every step on every stage; and of gradients that blocks (of a stage) make, how many
    bytes are there at its worst moment."""
    profile, bounds = found.layout.profile, found.layout.plan.bounds

    def there(stage: int, samples: int) -> int:
        moment = worst(footprints(profile, samples).backward(*bounds[stage], adds=False))
        return sum(size for block, size in sizes[stage].items() if block >= moment.block)

    begin = found.passes(found.backward(range(len(sizes)), final=False))
    first = begin.argmin(axis=2)[:, :, None]
    table = found.passes(found.by_size(there, len(sizes)))
    return np.take_along_axis(begin, first, 2)[:, :, 0], np.take_along_axis(table, first, 2)[:, :, 0]


def _bytes_by_block(layout: Layout, stage: int, parameters: list[Parameter]) -> dict[int, int]:
    """Bytes of gradients by the block of a stage that makes them: backward comes to the last block first, and what it
    finds there the others add to."""
    first, last = layout.plan.bounds[stage]
    found: dict[int, int] = {}
    for parameter in parameters:
        block = max(b for b in parameter.blocks if first <= b < last)
        found[block] = found.get(block, 0) + parameter.bytes
    return found


def _block_by_block(
    ledger: Ledger, found: Found, home: Ints, step: Ints, parameters: list[list[Parameter]]
) -> None:  # fmt: skip
    """The same with recomputation, where every block goes back by itself."""
    layout = found.layout
    size = np.zeros(len(layout.blocks), dtype=np.int64)
    for stage, own in enumerate(parameters):
        for block, bytes_ in _bytes_by_block(layout, stage, own).items():
            size[block] += bytes_
    of = layout.stage_of
    first = found.passes(found.ops(Kind.B, of, units=layout.blocks)).min(axis=2)
    ledger.add(Value.GRADIENTS, size[:, None], home[of], first, step[of], (step[of],))
