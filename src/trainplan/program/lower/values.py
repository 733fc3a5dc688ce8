"""Memory: what every operation makes, reads and frees.

For a micro-batch on a stage, without and with recomputation:

    RECV_F ─ in ─┬─ F ─ out ─ SEND_F             RECV_F ─ in ─┬─ F ─ out ─ SEND_F
                 │  └─ saved ─┐                               │  └─ inputs of blocks ─ R ─ saved ─┐
                 └────────────┴─ B ─ gout ─ SEND_B            └───────────────────────────────────┴─ B ─ gout ─ SEND_B
    RECV_B ─ gin ─────────────┘                  RECV_B ─ gin ────────────────────────────────────┘

Weights, optimizer state and running statistics are there from the start. Gradients are there from the start where
buckets keep them, and otherwise from the first backward pass of a step to its STEP.

What holds for every stage (or edge, block, bucket) is said once, of arrays with a row for each of them and a column
for each micro-batch (`Found`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numba import njit

from trainplan.profile.profile import Crossing
from trainplan.program.lower.edges import bytes_of, message_bytes
from trainplan.program.lower.found import Found
from trainplan.program.lower.layout import Layout
from trainplan.program.ops import Kind, Value
from trainplan.program.program import Ints, Ragged


@dataclass(frozen=True)
class Values:
    """The value columns of a program, and who reads them."""

    kind: np.ndarray[tuple[int], np.dtype[np.uint8]]
    bytes: Ints
    rank: Ints
    maker: Ints
    end: Ints
    reads: Ragged


@dataclass
class _Ledger:
    """Values as they are found, in pieces that are joined once at the end."""

    count: int = 0
    kinds: list[Ints] = field(default_factory=list)
    sizes: list[Ints] = field(default_factory=list)
    ranks: list[Ints] = field(default_factory=list)
    makers: list[Ints] = field(default_factory=list)
    ends: list[Ints] = field(default_factory=list)
    readers: list[Ints] = field(default_factory=list)
    read: list[Ints] = field(default_factory=list)

    def add(
        self, kind: Value, size: Ints | int, rank: Ints | int, maker: Ints, end: Ints, readers: tuple[Ints, ...] = ()
    ) -> Ints:
        """One value for each entry of `maker`, and its number. `readers` are arrays of the same shape."""
        numbers = np.arange(self.count, self.count + maker.size).reshape(maker.shape)
        self.count += maker.size
        self.kinds.append(np.full(maker.size, kind, dtype=np.uint8))
        self.sizes.append(np.broadcast_to(np.asarray(size, dtype=np.int64), maker.shape).ravel())
        self.ranks.append(np.broadcast_to(np.asarray(rank, dtype=np.int64), maker.shape).ravel())
        self.makers.append(maker.ravel())
        self.ends.append(end.ravel())
        for reader in readers:
            self.reads(reader, numbers)
        return numbers

    def reads(self, reader: Ints, numbers: Ints) -> None:
        """Operations that read values; -1: nobody does."""
        self.readers.append(reader.ravel())
        self.read.append(numbers.ravel())

    def close(self, ops: int) -> Values:
        start, items = _group(np.concatenate(self.readers), np.concatenate(self.read), ops)
        return Values(
            np.concatenate(self.kinds), np.concatenate(self.sizes), np.concatenate(self.ranks),
            np.concatenate(self.makers), np.concatenate(self.ends), Ragged(start, items),
        )  # fmt: skip


@njit(cache=True)
def _group(owner: Ints, item: Ints, owners: int) -> tuple[Ints, Ints]:
    """Items by owner, as a ragged array: a counting sort."""
    start = np.zeros(owners + 2, np.int64)
    for k in range(len(owner)):
        if owner[k] >= 0:
            start[owner[k] + 2] += 1
    for o in range(owners):
        start[o + 2] += start[o + 1]
    items = np.empty(start[owners + 1], np.int64)
    for k in range(len(owner)):
        if owner[k] >= 0:
            items[start[owner[k] + 1]] = item[k]
            start[owner[k] + 1] += 1
    return start[: owners + 1], items


def values(found: Found, ops: int, payload: Ints) -> Values:
    """The values of a program whose operations are `found`; `payload` is that of messages and collectives."""
    ledger = _Ledger()
    layout = found.layout
    ranks = np.array([[layout.local(r, s) for r in layout.replicas] for s in range(layout.plan.pp)])  # stage, replica
    homes = ranks[:, found.replica]  # stage, place
    _states(ledger, found, ranks)
    (_recomputed_activations if layout.recomputes else _activations)(ledger, found, homes)
    _workspace(ledger, found, homes)
    _gradients(ledger, found, ranks)
    _counts(ledger, found, ranks)
    _edges(ledger, found, homes, payload)
    return ledger.close(ops)


def _states(ledger: _Ledger, found: Found, ranks: Ints) -> None:
    """What is there before the first step."""
    profile, layout = found.layout.profile, found.layout
    local_batch = np.array([sum(sizes) for sizes in layout.sizes])[list(layout.replicas)]
    never = np.full(ranks.shape, -1, dtype=np.int64)
    weights, states, buffers = [], [], []
    for (first, last), parameters in zip(layout.plan.bounds, layout.parameters, strict=True):
        weights.append(sum(p.bytes for p in parameters))
        states.append(round(sum(p.count for p in parameters if p.trainable) * profile.state_bytes_per_parameter))
        buffers.append(sum(block.buffer_bytes for block in profile.blocks[first:last]))
    for kind, sizes in ((Value.WEIGHTS, weights), (Value.OPTIMIZER, states), (Value.BUFFERS, buffers)):
        ledger.add(kind, np.array(sizes)[:, None], ranks, never, never)
    inputs = np.round(profile.input_bytes_per_sample * local_batch).astype(np.int64)
    ledger.add(Value.INPUT, inputs[None, :], ranks[:1], never[:1], never[:1])


def _activations(ledger: _Ledger, found: Found, homes: Ints) -> None:
    """What the forward pass of a stage leaves for its backward: inside blocks, and crossings that stay within.

    What came in over an edge is counted where it arrives.
    """
    layout, profile = found.layout, found.layout.profile
    stages = range(layout.plan.pp)
    between: list[list[Crossing]] = [[] for _ in stages]
    for c in profile.crossings:
        if _keeps(layout, c):
            between[layout.stage_of[c.producer]].append(c)

    def saved(stage: int, samples: int) -> float:
        inside = profile.total("saved_bytes", *layout.plan.bounds[stage], samples)
        return round(inside) + sum(bytes_of(c, samples) for c in between[stage])

    begin, final = found.backward(stages, final=False), found.backward(stages, final=True)
    readers = (begin, np.where(final != begin, final, -1))
    ledger.add(
        Value.SAVED, found.by_size(saved, len(stages)), homes, found.ops(Kind.F, stages), final, readers
    )  # fmt: skip


def _keeps(layout: Layout, crossing: Crossing) -> bool:
    """Whether the stage that makes a crossing holds it until its backward pass.

    Without recomputation that is what a block's backward needs; with it, what a block of the stage reads.
    """
    needed_by = crossing.consumers if layout.recomputes else crossing.saved_by
    return any(layout.stage_of[block] == layout.stage_of[crossing.producer] for block in needed_by)


def _recomputed_activations(ledger: _Ledger, found: Found, homes: Ints) -> None:
    """The forward pass keeps what each block reads; R makes the rest again, for the backward of one block."""
    layout, profile = found.layout, found.layout.profile
    blocks, stages = layout.blocks, layout.stage_of
    kept: list[list[Crossing]] = [[] for _ in blocks]  # what a block is the first to read: its backward is the last
    flows: list[list[Crossing]] = [[] for _ in blocks]  # whose gradients its backward hands to the block before
    for c in profile.crossings:
        readers = [block for block in c.consumers if stages[block] == stages[c.producer]]
        if readers:
            kept[readers[0]].append(c)
            for block in range(c.producer + 1, readers[-1] + 1) if c.needs_grad else ():
                flows[block].append(c)
    home = homes[stages]
    again, back = found.ops(Kind.R, stages, units=blocks), found.ops(Kind.B, stages, units=blocks)
    inputs = found.by_size(lambda b, n: sum(bytes_of(c, n) for c in kept[b]), len(blocks))
    ledger.add(Value.SAVED, inputs, home, found.ops(Kind.F, stages), back, (again, back))
    inside = found.by_size(lambda b, n: profile.total("saved_bytes", b, b + 1, n), len(blocks))
    ledger.add(Value.SAVED, inside, home, again, back, (back,))
    after = [b for b in blocks if b and stages[b - 1] == stages[b]]
    passed = found.by_size(lambda b, n: sum(bytes_of(c, n) for c in flows[b]), len(blocks))[after]
    before = back[[b - 1 for b in after]]
    ledger.add(Value.BOUNDARY, passed, home[after], back[after], before, (before,))


def _workspace(ledger: _Ledger, found: Found, homes: Ints) -> None:
    """Alive only while an operation runs: the worst block of those that it covers."""
    layout, profile = found.layout, found.layout.profile
    stages = range(layout.plan.pp)

    def worst(quantity: str) -> Callable[[int, int], float]:
        bounds = layout.plan.bounds
        return lambda stage, n: max(profile.total(quantity, b, b + 1, n) for b in range(*bounds[stage]))

    def add(ops: Ints, size: Ints, home: Ints) -> None:
        there = (ops >= 0) & (size > 0)
        ledger.add(Value.WORKSPACE, size[there], home[there], ops[there], ops[there])

    forward = found.by_size(worst("forward_workspace_bytes"), len(stages))
    add(found.ops(Kind.F, stages), forward, homes)
    if layout.recomputes:
        ops = found.ops(Kind.B, layout.stage_of, units=layout.blocks)
        own = found.by_size(lambda b, n: profile.total("backward_workspace_bytes", b, b + 1, n), len(layout.blocks))
        add(ops, own, homes[layout.stage_of])
        return
    backward = found.by_size(worst("backward_workspace_bytes"), len(stages))
    pieces = [(stage, unit) for stage in stages for unit in range(max(1, len(layout.buckets[stage])))]
    of = [stage for stage, _ in pieces]
    add(found.ops(Kind.B, of, units=[unit for _, unit in pieces]), backward[of], homes[of])


def _gradients(ledger: _Ledger, found: Found, ranks: Ints) -> None:
    """Gradients of the weights, and the facts that exchange, norm and step wait for."""
    layout, plan = found.layout, found.layout.plan
    stages = range(plan.pp)
    home = np.repeat(ranks, found.steps, axis=1)
    step = found.once(Kind.STEP, stages)
    clips = found.layout.clips
    norm = np.repeat(found.once(Kind.NORM, [0]), plan.pp, axis=0) if clips else np.full_like(step, -1)
    trainable = [[p for p in parameters if p.trainable] for parameters in layout.parameters]
    if plan.dp > 1:  # buckets keep the gradients from step to step
        sizes = np.array([sum(p.bytes for p in parameters) for parameters in trainable])
        never = np.full(ranks.shape, -1, dtype=np.int64)
        ledger.add(Value.GRADIENTS, sizes[:, None], ranks, never, never)
    else:
        # Made by the first backward pass of a step: of the stage, or block by block.
        pieces = layout.blocks if layout.recomputes else stages
        of = layout.stage_of if layout.recomputes else stages
        size = np.zeros(len(pieces), dtype=np.int64)
        for stage, (first, last) in enumerate(plan.bounds):
            for p in trainable[stage]:
                # Backward comes to the last block first, and what it finds there the others add to.
                size[max(b for b in p.blocks if first <= b < last) if layout.recomputes else stage] += p.bytes
        ops = found.ops(Kind.B, of, units=pieces if layout.recomputes else ())
        first_pass = found.passes(ops).min(axis=2)
        ledger.add(Value.GRADIENTS, size[:, None], home[of], first_pass, step[of], (step[of],))
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


def _counts(ledger: _Ledger, found: Found, ranks: Ints) -> None:
    """What the last stage shares with its replicas: the count before its first backward pass, the loss at the end."""
    layout = found.layout
    final = [layout.plan.pp - 1]
    home = np.repeat(ranks[final], found.steps, axis=1)
    if layout.counts:
        count = found.shared(Kind.COUNT, final)
        first = found.passes(found.backward(final, final=False)).min(axis=2)
        ledger.add(Value.TOKEN, 0, home, count, first, (first,))
    if layout.plan.dp > 1:
        loss = found.shared(Kind.LOSS, final)
        ledger.add(Value.TOKEN, 0, home, found.passes(found.ops(Kind.F, final)).max(axis=2), loss, (loss,))


def _edges(ledger: _Ledger, found: Found, homes: Ints, payload: Ints) -> None:
    """A message there, and where gradients flow one back."""
    profile, layout = found.layout.profile, found.layout
    edges = layout.edges
    source, target = [e.source for e in edges], [e.target for e in edges]
    send, take = found.ops(Kind.SEND_F, source, target), found.ops(Kind.RECV_F, target, source)
    # What the sender keeps anyway is not counted a second time.
    fresh = [tuple(n for n in e.crossings if not _keeps(layout, profile.crossings[n])) for e in edges]
    out = found.by_size(lambda e, n: message_bytes(profile, fresh[e], n), len(edges))
    ledger.add(Value.BOUNDARY, out, homes[source], found.ops(Kind.F, source), send, (send,))
    ledger.add(Value.MESSAGE, payload[send], -1, send, take, (take,))
    final = found.backward(target, final=True)
    arrived = ledger.add(
        Value.BOUNDARY, payload[take], homes[target], take, final, (found.ops(Kind.F, target), final)
    )  # fmt: skip
    if layout.recomputes:
        again = [(number, block) for number, e in enumerate(edges) for block in range(*layout.plan.bounds[e.target])]
        stages = [target[number] for number, _ in again]
        ledger.reads(found.ops(Kind.R, stages, units=[b for _, b in again]), arrived[[number for number, _ in again]])
    back = [number for number, e in enumerate(edges) if e.gradients]
    source, target = [source[number] for number in back], [target[number] for number in back]
    give, get = found.ops(Kind.SEND_B, target, source), found.ops(Kind.RECV_B, source, target)
    begin, over = found.backward(source, final=False), found.backward(source, final=True)
    ledger.add(Value.BOUNDARY, payload[give], homes[target], final[back], give, (give,))
    ledger.add(Value.MESSAGE, payload[give], -1, give, get, (get,))
    readers = (begin, np.where(over != begin, over, -1))
    ledger.add(Value.BOUNDARY, payload[get], homes[source], get, over, readers)
