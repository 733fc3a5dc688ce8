"""Memory of passes: what forward leaves for backward, and what either needs while it runs.

A backward pass is one operation (or one for each gradient bucket), and a long one: what was saved goes while it runs.
So of what it frees only what is there at its worst moment counts until its end (`profile.footprint`); the rest counts
until its start.
"""

from __future__ import annotations

import itertools
from functools import partial

import numpy as np

from trainplan.profile.footprint import footprints, weights_extra
from trainplan.profile.profile import Amount, Crossing, Portion, Profile
from trainplan.program.lower.buckets import kept as known
from trainplan.program.lower.found import Found
from trainplan.program.lower.layout import Layout
from trainplan.program.lower.ledger import Ledger
from trainplan.program.lower.offloaded import offloaded, offloaded_inputs
from trainplan.program.ops import Kind, Value
from trainplan.program.program import Bools, Ints, nonzero


def activations(ledger: Ledger, found: Found, homes: Ints) -> None:
    """Without recomputation."""
    if found.layout.offloads:
        offloaded(ledger, found, homes)
        return
    layout, profile, bounds = found.layout, found.layout.profile, found.layout.plan.bounds
    stages = layout.stages
    forward, begin, final = found.forward(stages), found.backward(stages, False), found.backward(stages, True)
    extra = found.by_size(lambda s, n: footprints(profile, n).forward_extra(*bounds[s]), len(stages), "extra")
    ledger.add_some(Value.WORKSPACE, extra, homes, forward, forward)
    kept = found.by_size(lambda s, n: footprints(profile, n).kept(*bounds[s]), len(stages), "kept")
    adds = found.adds(stages)

    def at_worst(adding: bool) -> list[Ints]:
        """Of every pass what is saved, and what passes, at its worst moment."""

        def of(stage: int, samples: Amount) -> tuple[int, int]:
            moment = footprints(profile, samples).worst(*bounds[stage], adding)
            return moment.saved, moment.passing

        return found.all_by_size(of, len(stages), ("worst", adding))

    there, passing = at_worst(True)
    if not adds.all():
        there, passing = (np.where(adds, *pair) for pair in zip((there, passing), at_worst(False), strict=True))
    split = found.ops(Kind.I, stages) >= 0 if layout.splits else np.zeros(forward.shape, dtype=bool)
    # Where nothing differentiable comes in, the first part does nothing, and the second is the whole pass.
    parts = split & np.array([any(e.gradients for e in edges) for edges in layout.incoming])[:, None]
    if parts.any():
        _in_two_parts(ledger, found, homes, forward, (begin, final), kept, parts)
        if parts.all():
            return
    cut = (begin != final) & ~split
    some = nonzero(cut.any(axis=1)).tolist()
    if some:
        left = _in_pieces(ledger, found, homes, some, forward, kept)
        there[some] = np.where(cut[some], left, there[some])
    # The value that the engine keeps the graph under comes first.
    columns = (there, homes, forward, final, begin, np.where(cut | split, final, -1))
    size, rank, maker, end, *readers = [column[~parts] for column in columns] if parts.any() else columns
    graphs = ledger.add(Value.SAVED, size, rank, maker, end, tuple(readers))
    if layout.plan.slices and not layout.recomputes:
        _carried(ledger, found, homes, graphs, forward, begin)
    whole = np.where(cut | parts, -1, np.where(split, final, begin))
    ledger.add_some(Value.SAVED, kept - there, homes, np.where(cut | parts, -1, forward), whole, early=True)
    ledger.add_some(Value.WORKSPACE, passing, homes, whole, whole)


def _carried(ledger: Ledger, found: Found, homes: Ints, graphs: Ints, forward: Ints, backward: Ints) -> None:
    """Slices of a sequence: the forward pass of each reads the keys and values that earlier ones hold. Their gradients
    gather beside them, from the backward pass of the last slice until that of the slice whose they are."""
    profile, bounds = found.layout.profile, found.layout.plan.bounds
    count = len(found.layout.plan.slices)
    passes, reads, back, home = (a.reshape(len(a), -1, count) for a in (graphs, forward, backward, homes))
    for earlier in range(count - 1):
        for later in range(earlier + 1, count):
            ledger.reads(reads[:, :, later], passes[:, :, earlier])

    def carried(stage: int, portion: Portion) -> float:
        blocks = profile.blocks[slice(*bounds[stage])]
        return sum(block.carried_bytes for block in blocks) * portion.samples * portion.share

    size = found.by_size(carried, len(graphs)).reshape(passes.shape)
    made = np.broadcast_to(back[:, :, -1:], back.shape)
    ledger.add_some(Value.SAVED, size[:, :, :-1], home[:, :, :-1], made[:, :, :-1], back[:, :, :-1])


def _in_two_parts(
    ledger: Ledger, found: Found, homes: Ints, forward: Ints, parts: tuple[Ints, Ints], kept: Ints, chosen: Bools
) -> None:
    """Passes that are split into I and W: what was saved stays until the second part is over, and so do the gradients
    that the first part leaves for the second (`profile.footprint`). The second part makes the gradients of one operator
    after the other, before it adds them to what is there."""
    profile, bounds = found.layout.profile, found.layout.plan.bounds
    left = found.by_size(lambda s, n: footprints(profile, n).halfway(*bounds[s]), len(bounds))
    extra = found.by_size(lambda s, n: footprints(profile, n).input_extra(*bounds[s]), len(bounds))
    made = np.array([weights_extra(profile, *bound) for bound in bounds], dtype=np.int64)[:, None]
    # What the loss keeps goes with the first part: no weights are behind it.
    final = len(bounds) - 1
    loss = found.by_size(lambda s, n: footprints(profile, n).loss if s == final else 0, len(bounds))
    rank, maker, first, second, saved = (array[chosen] for array in (homes, forward, *parts, kept - loss))
    ledger.add(Value.SAVED, saved, rank, maker, second, (first, second))
    ledger.add_some(Value.SAVED, loss[chosen], rank, maker, first)
    ledger.add(Value.SAVED, left[chosen], rank, first, second, (second,))
    ledger.add_some(Value.WORKSPACE, extra[chosen], rank, first, first)
    adds = found.adds(found.layout.stages)
    ledger.add_some(Value.WORKSPACE, np.where(adds, made, 0)[chosen], rank, second, second)


def _in_pieces(ledger: Ledger, found: Found, homes: Ints, stages: list[int], forward: Ints, kept: Ints) -> Ints:
    """Passes of some stages that are cut where buckets become ready: each piece frees what the blocks that it goes
    through saved.

    Gives what is left at the worst moment of the last piece of each stage.
    """
    layout, profile, bounds = found.layout, found.layout.profile, found.layout.plan.bounds
    pieces: list[tuple[int, int, int, int]] = []  # stage, number, and the blocks that it goes through: from … to
    for stage in stages:
        ends = [first for first, _ in reversed(layout.sections[stage])] or [b.block for b in layout.buckets[stage]]
        low = [*itertools.accumulate(ends[:-1], min), bounds[stage][0]]
        high = [bounds[stage][1] - 1, *low[:-1]]
        pieces += [(stage, number, *own) for number, own in enumerate(zip(low, high, strict=True))]
    of = [stage for stage, _, _, _ in pieces]
    adds, where = layout.plan.zero < 2, tuple(pieces)

    def at_piece(piece: int, samples: Amount) -> tuple[int, int]:
        stage, _, *own = pieces[piece]
        moment = footprints(profile, samples).worst(*bounds[stage], adds, *own)
        return moment.saved, moment.passing

    saved, passing = found.all_by_size(at_piece, len(pieces), ("worst by piece", adds, where))
    first, final = np.searchsorted(of, stages), np.searchsorted(of, stages, side="right") - 1
    ops = found.ops(Kind.B, of, units=[number for _, number, _, _ in pieces])
    ops[np.repeat(ops[final] < 0, final - first + 1, axis=0)] = -1  # passes in one piece
    before = np.roll(saved, 1, axis=0)
    before[first] = kept[stages]
    maker = np.where(ops >= 0, forward[of], -1)
    ledger.add_some(Value.SAVED, before - saved, homes[of], maker, ops, early=True)
    ledger.add_some(Value.WORKSPACE, passing, homes[of], ops, ops)
    return np.asarray(saved[final])


def recomputed_activations(ledger: Ledger, found: Found, homes: Ints) -> None:
    """The forward pass keeps what each block reads; R makes the rest again, for the backward of one block."""
    layout, profile, bounds = found.layout, found.layout.profile, found.layout.plan.bounds
    blocks, stages = layout.blocks, layout.stage_of
    kept, made, flows = crossings_of(layout)
    home = homes[stages]
    again, back = found.ops(Kind.R, stages, units=blocks), found.ops(Kind.B, stages, units=blocks)
    if layout.offloads:  # what blocks read is on its way, but for what other stages read as well
        kept = [[c for c in own if stages[c.consumers[-1]] != stages[c.producer]] for own in kept]
        offloaded_inputs(ledger, found, homes)
    name = "inputs", layout.offloads
    inputs = found.by_size(lambda b, n: sum(c.bytes(n) for c in kept[b]), len(blocks), name)
    if layout.partitions:  # of which ranks gather the whole before they make the rest again
        share = -(-inputs // layout.plan.tp)
        ledger.add(Value.SAVED, share, home, found.forward(stages), back, (again, back))
        ledger.add(Value.SAVED, inputs, home, again, back, (back,))
    else:
        ledger.add(Value.SAVED, inputs, home, found.forward(stages), back, (again, back))

    def inside(block: int, samples: int) -> int:
        return footprints(profile, samples).saved[block] + sum(c.bytes(samples) for c in made[block])

    ledger.add(Value.SAVED, found.by_size(inside, len(blocks), "inside"), home, again, back, (back,))
    if flows:
        start, end = back[[last for _, last, _ in flows]], back[[until for _, _, until in flows]]
        size = found.by_size(lambda f, n: flows[f][0].bytes(n), len(flows), "flows")
        ledger.add(
            Value.BOUNDARY, size, home[[last for _, last, _ in flows]], start, end, (np.where(end != start, end, -1),)
        )  # fmt: skip
    forward = found.forward(layout.stages)
    if not layout.offloads:
        alone = lambda s, n: footprints(profile, n).forward_alone_extra(*bounds[s])  # noqa: E731
        extra = found.by_size(alone, len(layout.stages), "extra alone")
        ledger.add_some(Value.WORKSPACE, extra, homes, forward, forward)
    workspace = found.by_size(lambda b, n: footprints(profile, n).forward_workspace[b], len(blocks), "workspace")
    ledger.add_some(Value.WORKSPACE, workspace, home, again, again)
    first, later = (
        found.by_size(partial(_one_block, profile, adds), len(blocks), ("one block", adds)) for adds in (False, True)
    )
    ledger.add_some(Value.WORKSPACE, np.where(found.adds(stages), later, first), home, back, back)


def _one_block(profile: Profile, adds: bool, block: int, samples: Amount) -> int:
    return footprints(profile, samples).one_block(block, adds)


Crossings = tuple[list[list[Crossing]], list[list[Crossing]], list[tuple[Crossing, int, int]]]


def crossings_of(layout: Layout) -> Crossings:
    """By block: what it is the first of its stage to read, so that its backward is the last; and what it makes. And the
    gradients within a stage: from the backward of the last reader, to …"""
    found: Crossings = known(layout.profile, ("crossings", layout.plan.bounds), lambda: _crossings_of(layout))
    return found


def _crossings_of(layout: Layout) -> Crossings:
    stages, bounds = layout.stage_of, layout.plan.bounds
    kept: list[list[Crossing]] = [[] for _ in layout.blocks]
    made: list[list[Crossing]] = [[] for _ in layout.blocks]
    flows: list[tuple[Crossing, int, int]] = []
    for c in layout.profile.crossings:
        made[c.producer].append(c)
        readers = [block for block in c.consumers if stages[block] == stages[c.producer]]
        if readers:
            kept[readers[0]].append(c)
        for stage in sorted({stages[block] for block in c.consumers}) if c.needs_grad else ():
            last = max(block for block in c.consumers if stages[block] == stage)
            flows.append((c, last, c.producer if stage == stages[c.producer] else bounds[stage][0]))
    return kept, made, flows


def carried_apart(ledger: Ledger, found: Found, homes: Ints) -> None:
    """Slices of a sequence that are recomputed: beside what blocks read, the keys and values of every slice stay for
    later ones, whose passes read them there and, run again, on their way back. Their gradients gather beside them,
    block by block, from the backward pass of the last slice until that of the slice whose they are."""
    layout, profile = found.layout, found.layout.profile
    blocks = [block for block in layout.blocks if profile.blocks[block].carried_bytes]
    stages, count = [layout.stage_of[block] for block in blocks], len(layout.plan.slices)

    def by_slice(ops: Ints) -> Ints:
        return ops.reshape(len(blocks), found.places // count, count)

    forward, again = by_slice(found.ops(Kind.F, stages)), by_slice(found.ops(Kind.R, stages, units=blocks))
    back, home = by_slice(found.ops(Kind.B, stages, units=blocks)), by_slice(homes[stages])

    def carried(number: int, portion: Portion) -> float:
        return profile.blocks[blocks[number]].carried_bytes * portion.samples * portion.share

    size = by_slice(found.by_size(carried, len(blocks)))
    before = np.s_[:, :, :-1]  # all slices but the last, which nobody reads
    kept = ledger.add(Value.SAVED, size[before], home[before], forward[before], back[before])
    for earlier in range(count - 1):
        for later in range(earlier + 1, count):
            ledger.reads(forward[:, :, later], kept[:, :, earlier])
            ledger.reads(again[:, :, later], kept[:, :, earlier])
    # The last slice of all may go back in one piece.
    whole = by_slice(found.ops(Kind.B, stages))
    made = np.broadcast_to(np.where(again >= 0, back, whole)[:, :, -1:], back.shape)
    ledger.add_some(Value.SAVED, size[before], home[before], made[before], back[before])
