"""Memory: what every operation makes, reads and frees.

For a micro-batch on a stage, without and with recomputation:

    RECV_F ─ in ─┬─ F ─ out ─ SEND_F             RECV_F ─ in ─┬─ F ─ out ─ SEND_F
                 │  └─ saved ─┐                               │  └─ inputs of blocks ─ R ─ saved ─┐
                 └────────────┴─ B ─ gout ─ SEND_B            └───────────────────────────────────┴─ B ─ gout ─ SEND_B
    RECV_B ─ gin ─────────────┘                  RECV_B ─ gin ────────────────────────────────────┘

Weights, optimizer state and running statistics are there from the start. Gradients are there from the start where
buckets keep them, and otherwise from the first backward pass of a step to its STEP.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numba import njit

from trainplan.program.lower.edges import Edge, bytes_of, message_bytes
from trainplan.program.lower.found import Found
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
        self, kind: Value, size: Ints | int, rank: Ints | int, maker: Ints, end: Ints, readers: tuple[Ints, ...]
    ) -> None:
        """One value for each entry of `maker`; `readers` are arrays of the same length, -1 where nobody reads."""
        n = len(maker)
        if not n:
            return
        numbers = np.arange(self.count, self.count + n)
        self.count += n
        self.kinds.append(np.full(n, kind, dtype=np.uint8))
        self.sizes.append(np.broadcast_to(np.asarray(size, dtype=np.int64), n))
        self.ranks.append(np.broadcast_to(np.asarray(rank, dtype=np.int64), n))
        self.makers.append(maker)
        self.ends.append(end)
        for reader in readers:
            self.readers.append(reader)
            self.read.append(numbers)

    def close(self, ops: int) -> Values:
        readers, read = np.concatenate(self.readers), np.concatenate(self.read)
        start, items = _group(readers, read, ops)
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


def values(found: Found, rank: Ints, group: Ints, groups: tuple[tuple[int, ...], ...], size: Ints) -> Values:
    """The values of a program whose operations are `found`; `size` is the payload of messages and collectives."""
    ledger = _Ledger()
    layout = found.layout
    ranks = np.array([[layout.local(r, s) for r in layout.replicas] for s in range(layout.plan.pp)])
    for stage in range(layout.plan.pp):
        home = ranks[stage][found.replica]
        samples = np.array(layout.sizes, dtype=np.int64)[found.replica, found.micro]
        _states(ledger, found, stage, ranks[stage])
        _activations(ledger, found, stage, home, samples)
        _workspace(ledger, found, stage, home, samples)
        _gradients(ledger, found, stage, ranks[stage], group, groups)
    for edge in layout.edges:
        _edge(ledger, found, edge, ranks[edge.source][found.replica], ranks[edge.target][found.replica], size)
    return ledger.close(len(rank))


def _states(ledger: _Ledger, found: Found, stage: int, homes: Ints) -> None:
    """What is there before the first step."""
    profile, layout = found.layout.profile, found.layout
    first, last = layout.plan.bounds[stage]
    parameters = profile.parameters_of(first, last)
    trainable = [p for p in parameters if p.trainable]
    local_batch = np.array([sum(sizes) for sizes in layout.sizes])[list(layout.replicas)]
    sizes: dict[Value, Ints | int] = {
        Value.WEIGHTS: sum(p.bytes for p in parameters),
        Value.OPTIMIZER: round(sum(p.count for p in trainable) * profile.state_bytes_per_parameter),
        Value.BUFFERS: sum(block.buffer_bytes for block in profile.blocks[first:last]),
        Value.INPUT: np.round(profile.input_bytes_per_sample * local_batch).astype(np.int64) if stage == 0 else 0,
    }
    never = np.full(len(homes), -1, dtype=np.int64)
    for kind, size in sizes.items():
        ledger.add(kind, size, homes, never, never, ())


def _activations(ledger: _Ledger, found: Found, stage: int, home: Ints, samples: Ints) -> None:
    layout = found.layout
    first, last = layout.plan.bounds[stage]
    forward, final = found.ops(Kind.F, stage), found.backward(stage, final=True)
    begin = found.backward(stage, final=False)
    if not layout.recomputes:
        held = _by_size(samples, lambda n: stage_saved_bytes(found, stage, n))
        ledger.add(Value.SAVED, held, home, forward, final, (begin, np.where(final != begin, final, -1)))
        return
    profile = layout.profile
    for block in range(first, last):
        again, back = found.ops(Kind.R, stage, unit=block), found.ops(Kind.B, stage, unit=block)
        # The forward pass keeps what each block reads from the blocks before it on this stage.
        kept = [
            c for c in profile.crossings if first <= c.producer < block and _first_reader(c.consumers, first) == block
        ]
        inputs = _by_size(samples, lambda n, kept=kept: sum(bytes_of(c, n) for c in kept))
        ledger.add(Value.SAVED, inputs, home, forward, back, (again, back))
        inside = _by_size(samples, lambda n, b=block: round(profile.total("saved_bytes", b, b + 1, n)))
        ledger.add(Value.SAVED, inside, home, again, back, (back,))
        if block > first:  # the gradient that its backward hands to the block before
            before = found.ops(Kind.B, stage, unit=block - 1)
            flows = [c for c in profile.crossings if c.needs_grad and first <= c.producer < block <= max(c.consumers)]
            between = _by_size(samples, lambda n, flows=flows: sum(bytes_of(c, n) for c in flows))
            ledger.add(Value.BOUNDARY, between, home, back, before, (before,))


def _first_reader(consumers: tuple[int, ...], first: int) -> int:
    return min((c for c in consumers if c >= first), default=-1)


def stage_saved_bytes(found: Found, stage: int, samples: int) -> int:
    """Bytes that the forward pass of a stage leaves for its backward: inside blocks, and crossings that stay within.

    What came in over an edge is counted where it arrives.
    """
    profile = found.layout.profile
    first, last = found.layout.plan.bounds[stage]
    inside = round(profile.total("saved_bytes", first, last, samples))
    between = sum(
        bytes_of(c, samples)
        for c in profile.crossings
        if first <= c.producer < last and any(first <= block < last for block in c.saved_by)
    )
    return inside + between


def _workspace(ledger: _Ledger, found: Found, stage: int, home: Ints, samples: Ints) -> None:
    """Alive only while an operation runs: the worst block of those that it covers."""
    profile, layout = found.layout.profile, found.layout
    first, last = layout.plan.bounds[stage]

    def worst(quantity: str, low: int, high: int) -> Ints:
        blocks = range(low, high)
        return _by_size(samples, lambda n: round(max(profile.total(quantity, b, b + 1, n) for b in blocks)))

    pairs = [(found.ops(Kind.F, stage), worst("forward_workspace_bytes", first, last))]
    if layout.recomputes:
        for block in range(first, last):
            pairs.append((found.ops(Kind.B, stage, unit=block), worst("backward_workspace_bytes", block, block + 1)))
    else:
        heavy = worst("backward_workspace_bytes", first, last)
        pairs += [(found.ops(Kind.B, stage, unit=u), heavy) for u in range(max(1, len(layout.buckets[stage])))]
    for op, size in pairs:
        there = (op >= 0) & (size > 0)
        ledger.add(Value.WORKSPACE, size[there], home[there], op[there], op[there], ())


def _gradients(
    ledger: _Ledger, found: Found, stage: int, homes: Ints, group: Ints, groups: tuple[tuple[int, ...], ...]
) -> None:
    """Gradients of the weights, and the facts that exchange, norm and step wait for."""
    layout = found.layout
    plan = layout.plan
    first, last = plan.bounds[stage]
    size = sum(p.bytes for p in layout.profile.parameters_of(first, last) if p.trainable)
    step = found.once(Kind.STEP, stage)
    home = np.repeat(homes, found.steps)
    passes = found.backward(stage, final=True).reshape(-1, plan.micro)
    norm = found.once(Kind.NORM, stage) if (found.ops(Kind.NORM, stage) >= 0).any() else None
    if plan.dp > 1:  # buckets keep the gradients from step to step
        never = np.full(len(homes), -1, dtype=np.int64)
        ledger.add(Value.GRADIENTS, size, homes, never, never, ())
    else:
        ledger.add(Value.GRADIENTS, size, home, passes.min(axis=1), step, (step,))
    # Bucket k: the piece of backward that completes it → its exchange → the norm or the step.
    readers = (step,) if norm is None else (norm, step)
    for unit, bucket in enumerate(layout.buckets[stage]):
        piece = found.ops(Kind.B, stage, unit=bucket.block if layout.recomputes else unit).reshape(-1, plan.micro)
        complete = piece.max(axis=1)  # of the last pass: its operations have the highest numbers on their rank
        reduce = _collective(found, Kind.REDUCE_GRAD, stage, unit, home)
        ledger.add(Value.TOKEN, 0, home, complete, reduce, (reduce,))
        ledger.add(Value.TOKEN, 0, home, reduce, step, readers)
    most = max((len(buckets) for buckets in layout.buckets), default=0)
    for number, tie in enumerate(layout.ties):
        if stage in tie.stages:
            reduce = _collective(found, Kind.REDUCE_GRAD, tie.stages[0], most + number, home)
            ledger.add(Value.TOKEN, 0, home, passes.max(axis=1), reduce, (reduce,))
            ledger.add(Value.TOKEN, 0, home, reduce, step, readers)
    if norm is not None:
        everywhere = np.tile(found.once(Kind.NORM, 0), 1)
        ledger.add(Value.TOKEN, 0, home, everywhere, step, (step,))


def _collective(found: Found, kind: Kind, stage: int, unit: int, home: Ints) -> Ints:
    """A collective is one operation for all replicas, found under the first; repeated for each of its members."""
    per_step = found.once(kind, stage, unit).reshape(-1, found.steps)[0]
    return np.tile(per_step, len(home) // found.steps)


def _edge(ledger: _Ledger, found: Found, edge: Edge, source: Ints, target: Ints, size: Ints) -> None:
    """A message there, and where gradients flow one back."""
    profile, layout = found.layout.profile, found.layout
    first, last = layout.plan.bounds[edge.source]
    send, take = found.ops(Kind.SEND_F, edge.source, edge.target), found.ops(Kind.RECV_F, edge.target, edge.source)
    forward, then = found.ops(Kind.F, edge.source), found.ops(Kind.F, edge.target)
    final = found.backward(edge.target, final=True)
    samples = np.array(layout.sizes, dtype=np.int64)[found.replica, found.micro]
    # What the sender's own backward keeps anyway is not counted a second time.
    fresh = tuple(n for n in edge.crossings if not any(first <= b < last for b in profile.crossings[n].saved_by))
    out = _by_size(samples, lambda n: message_bytes(profile, fresh, n))
    ledger.add(Value.BOUNDARY, out, source, forward, send, (send,))
    ledger.add(Value.MESSAGE, size[send], -1, send, take, (take,))
    again = (
        ()
        if not layout.recomputes
        else tuple(found.ops(Kind.R, edge.target, unit=block) for block in range(*layout.plan.bounds[edge.target]))
    )
    ledger.add(Value.BOUNDARY, size[take], target, take, final, (then, *again, final))
    if not edge.gradients:
        return
    give, get = found.ops(Kind.SEND_B, edge.target, edge.source), found.ops(Kind.RECV_B, edge.source, edge.target)
    begin, over = found.backward(edge.source, final=False), found.backward(edge.source, final=True)
    ledger.add(Value.BOUNDARY, size[give], target, final, give, (give,))
    ledger.add(Value.MESSAGE, size[give], -1, give, get, (get,))
    ledger.add(Value.BOUNDARY, size[get], source, get, over, (begin, np.where(over != begin, over, -1)))


def _by_size(samples: Ints, bytes_for) -> Ints:  # type: ignore[no-untyped-def]
    """A function of the micro-batch size, worked out once for each size that occurs."""
    found = np.zeros(len(samples), dtype=np.int64)
    for size in np.unique(samples):
        found[samples == size] = bytes_for(int(size))
    return found
