"""Memory of weights: their gradients, how these are exchanged, and the step that uses them.

one replica           gradients come with the first backward pass of a step, and go with its STEP
buckets of our own    gradients are views of the buckets, which stay
                      (sums in rounds need room beside them for what arrives)
torch's DDP           the same; but passes before the last of a step gather gradients beside the buckets, and the
                      last one puts them in
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from trainplan.profile.footprint import footprints, update_workspace
from trainplan.profile.profile import Parameter
from trainplan.program.exchanges import BY_ROUNDS, rounds_of
from trainplan.program.exchanges.rounds import beside
from trainplan.program.lower.away import piece_of
from trainplan.program.lower.buckets import Bucket, kept
from trainplan.program.lower.found import NEVER, Found
from trainplan.program.lower.groups import stage_group
from trainplan.program.lower.layout import Holding, Layout
from trainplan.program.lower.ledger import Ledger
from trainplan.program.lower.passes import FINAL_BACK, GATHERING
from trainplan.program.lower.served import served
from trainplan.program.ops import Kind, Value
from trainplan.program.program import Ints


def gradients(ledger: Ledger, found: Found) -> None:
    """Gradients of the weights, and the facts that exchange, norm and step wait for."""
    layout = found.layout
    holdings = layout.holdings
    home = _home(found)
    step, norm = found.once(Kind.STEP, holdings), found.norm(holdings)
    _stored(ledger, found, holdings, home, step)
    if layout.service is not None:
        served(ledger, found, layout.service)
        return
    complete = found.latest(FINAL_BACK)
    if layout.clips:
        ledger.add(Value.TOKEN, 0, home, complete, norm, (norm,))
        ledger.add(Value.TOKEN, 0, home, norm, step, (step,))
    # Bucket k: the piece of backward that completes it → its exchange → the norm or the step.
    filled = [(number, unit) for number, h in enumerate(holdings) for unit in range(len(layout.buckets[h.stage]))]
    if filled and not layout.decides:  # else see `decided.py`
        of, units = [number for number, _ in filled], [unit for _, unit in filled]
        stages = [holdings[number].stage for number in of]
        piece = found.own(completing(found, stages, units), [holdings[number] for number in of]).max(axis=2)
        reduce = found.shared(Kind.REDUCE_GRAD, stages, units=units)
        ledger.add(Value.TOKEN, 0, home[of], piece, reduce, (reduce,))
        ledger.add(Value.TOKEN, 0, home[of], reduce, step[of], (norm[of], step[of]))
        if layout.sums_by in BY_ROUNDS and layout.backend.receives_on_device:
            room = np.array([_room(layout, holdings[n], layout.buckets[holdings[n].stage][unit]) for n, unit in filled])
            if layout.backend.host_computes:  # the host's memory is kept for the next sum
                most = {rank: int(room[home[of, 0] == rank].max()) for rank in np.unique(home[of, 0]).tolist()}
                ranks = np.array([rank for rank, size in most.items() if size], dtype=np.int64)
                never = np.full(len(ranks), -1, dtype=np.int64)
                ledger.add(Value.COMMUNICATION, np.array([most[rank] for rank in ranks.tolist()]), ranks, never, never)
            else:
                ledger.add_some(Value.COMMUNICATION, room[:, None], home[of], reduce, reduce)
    for number, tie in enumerate(layout.ties):
        holders = [n for n, h in enumerate(holdings) if h.stage in tie.stages]
        exchange = found.shared(Kind.REDUCE_GRAD, [tie.stages[0]], [layout.first_tie + number])
        reduce = np.repeat(exchange, len(holders), axis=0)
        ledger.add(Value.TOKEN, 0, home[holders], complete[holders], reduce, (reduce,))
        ledger.add(Value.TOKEN, 0, home[holders], reduce, step[holders], (norm[holders], step[holders]))
        # They are put side by side for the exchange; the sum takes the place of the gradients when it is used.
        ledger.add(Value.COMMUNICATION, tie.bytes, home[holders], reduce, step[holders], early=True)


def _room(layout: Layout, holding: Holding, bucket: Bucket) -> int:
    """Bytes beside a bucket for what arrives while it is summed in rounds. (Where one replica stands for all, for that
    which needs most.)"""
    _, members = stage_group(layout, (holding.stage,))
    rounds = rounds_of(layout.sums_by, members, bucket.bytes // bucket.element, layout.plan.node)
    room = beside(rounds, len(members))
    own = room[members.index(layout.rank(holding.replica, holding.stage, holding.lines[0]))]
    return bucket.element * (own if len(layout.replicas) == layout.plan.dp else max(room))


def completing(found: Found, stages: list[int], units: list[int]) -> Ints:
    """The operation of every place that completes these buckets, if it is the last to add to them."""
    layout = found.layout
    pairs = list(zip(stages, units, strict=True))
    piece = [0 if stage in layout.late else unit for stage, unit in pairs]
    if layout.offloads:  # the section that its block is in
        piece = [piece_of(layout, stage, layout.buckets[stage][unit].block) for stage, unit in pairs]
    whole = found.ops(Kind.B, stages, units=piece)
    if layout.recomputes:
        by_block = found.ops(Kind.B, stages, units=[layout.buckets[stage][unit].block for stage, unit in pairs])
        whole = np.where(found.recomputed, by_block, whole)
    if not layout.splits:
        return whole
    second = found.ops(Kind.W, stages)  # after which all buckets are complete
    return np.where(second >= 0, second, whole)


def _home(found: Found) -> Ints:
    """The rank of every copy, in every step."""
    _, _, rank = found.layout.held
    return np.repeat(rank[:, None], found.steps, axis=1)


def _stored(ledger: Ledger, found: Found, holdings: list[Holding], home: Ints, step: Ints) -> None:
    """The bytes of gradients: those in buckets are there all the time, the others come and go with every step."""
    layout = found.layout
    trainable = list(layout.trainable)
    stays = [number for number, h in enumerate(holdings) if layout.buckets[h.stage]]
    if stays:
        sizes = [sum(bucket.bytes for bucket in layout.buckets[holdings[number].stage]) for number in stays]
        never = np.full(len(stays), -1, dtype=np.int64)
        ledger.add(Value.GRADIENTS, np.array(sizes), home[stays, 0], never, never)
        if layout.gathers:
            _beside_the_buckets(ledger, found, home, trainable[0])
    # Weights that several stages hold are in no bucket, unless servers sum them, and are not shared out.
    tied = _tied(layout) if layout.service is None and layout.ties else None
    for s in layout.stages:
        if layout.bucketed(s):
            trainable[s] = tied[s] if tied else []
    coming = [number for number, h in enumerate(holdings) if trainable[h.stage]]
    if not coming:
        return
    first = found.piece[found.first_place[coming, 0]]  # the first pass of each copy
    again = layout.recomputed[first] | layout.offloads
    for put, chosen in ((_block_by_block, again), (_by_first_pass, ~again)):
        own = [number for number, mine in zip(coming, chosen, strict=True) if mine]
        if own:
            put(ledger, found, own, home[own], step[own], trainable)


def _tied(layout: Layout) -> list[list[Parameter]]:
    """Of the weights that each stage trains those that others hold as well."""

    def made() -> list[list[Parameter]]:
        names = {name for tie in layout.ties for name in tie.names}
        return [[p for p in own if p.name in names] for own in layout.trainable]

    found: list[list[Parameter]] = kept(layout.profile, ("tied", layout.plan.bounds), made)
    return found


def updates(ledger: Ledger, found: Found) -> None:
    """What the norm of the gradients and the optimizer's step need while they run."""
    layout, profile = found.layout, found.layout.profile
    holdings = layout.holdings
    (stage, _, _), home = layout.held, _home(found)
    if layout.crosses:
        for block in (block for own in layout.stepping for block in own):  # elsewhere it has no step
            step = found.once(Kind.STEP, holdings, block)
            size = np.full(step.shape, update_workspace(profile, block, block + 1), dtype=np.int64)
            ledger.add_some(Value.WORKSPACE, size, home, step, step)
        return
    step = found.once(Kind.STEP, holdings)
    workspaces = [update_workspace(profile, *bound) for bound in layout.plan.bounds]
    update = [round(size * layout.shared_share(stage)) for stage, size in enumerate(workspaces)]
    if profile.clip_norm > 0:
        norm: list[int] = kept(
            profile, ("squares", layout.plan.bounds),
            lambda: [max((_squared(p) for p in own), default=0) for own in layout.trainable],
        )  # fmt: skip
        if layout.clips:
            ops = found.norm(holdings)
            ledger.add_some(Value.WORKSPACE, np.array(norm)[stage][:, None], home, ops, ops)
        else:  # one stage: it is worked out where it is used
            update = [max(pair) for pair in zip(update, norm, strict=True)]
    ledger.add_some(Value.WORKSPACE, np.array(update, dtype=np.int64)[stage][:, None], home, step, step)


def _squared(parameter: Parameter) -> int:
    """A gradient in double precision, and its square."""
    double = 8 * parameter.count
    return double + (double if parameter.bytes < double else 0)


def _by_first_pass(
    ledger: Ledger, found: Found, copies: list[int], home: Ints, step: Ints, parameters: list[list[Parameter]]
) -> None:  # fmt: skip
    """Gradients that the first backward pass of a step makes: those that are there at its worst moment, and the rest
    when it is over."""
    sizes = [_bytes_by_block(found.layout, s, own) for s, own in enumerate(parameters)]
    stage, _, _ = found.layout.held
    total = np.array([sum(own.values()) for own in sizes], dtype=np.int64)[stage[copies]]
    # Which of its parameters a stage has here follows from whether it has buckets (`_stored`).
    name = "first pass", tuple(map(found.layout.bucketed, found.layout.stages)), found.layout.service is None
    ops, there = found.earliest(GATHERING)[copies], _at_first_pass(found, copies, sizes, name)
    ledger.add(Value.GRADIENTS, there, home, ops, step, (step,))
    ledger.add_some(Value.GRADIENTS, total[:, None] - there, home, ops, step, late=True)


def _beside_the_buckets(ledger: Ledger, found: Found, home: Ints, parameters: list[Parameter]) -> None:
    """What DDP's passes before the last of a step gather: each bucket's goes when the bucket is filled."""
    layout = found.layout
    known, copies, ops = {p.name: p for p in parameters}, range(len(home)), found.earliest(GATHERING)
    for unit, bucket in enumerate(layout.buckets[0]):
        own = _bytes_by_block(layout, 0, [known[name] for name in bucket.names])
        there = _at_first_pass(found, copies, [own])
        full = found.own(found.ops(Kind.B, [0], units=[unit]), layout.holdings).max(axis=2)
        ledger.add_some(Value.GRADIENTS, there, home, ops, full)
        ledger.add_some(Value.GRADIENTS, bucket.bytes - there, home, ops, full, late=True)


def _at_first_pass(
    found: Found, copies: Sequence[int], sizes: list[dict[int, int]], name: Hashable = None
) -> Ints:  # fmt: skip
    """Of gradients that blocks (of a stage) make, how many bytes are there at the worst moment of the first pass of
    every step that adds to those of every copy."""
    profile, bounds = found.layout.profile, found.layout.plan.bounds

    def there(stage: int, samples: int) -> int:
        moment = footprints(profile, samples).worst(*bounds[stage], adds=False)
        return sum(size for block, size in sizes[stage].items() if block >= moment.block)

    stage, _, _ = found.layout.held
    return found.by_size(there, len(sizes), name)[stage[copies][:, None], found.first_place[copies]]


def _bytes_by_block(layout: Layout, stage: int, parameters: list[Parameter]) -> dict[int, int]:
    """Bytes of gradients by the block of a stage that makes them: backward comes to the last block first, and what it
    finds there the others add to."""
    first, last = layout.plan.bounds[stage]

    def made() -> dict[int, int]:
        found: dict[int, int] = {}
        for parameter in parameters:
            block = max(b for b in parameter.blocks if first <= b < last)
            found[block] = found.get(block, 0) + parameter.bytes
        return found

    if parameters is not layout.trainable[stage]:
        return made()
    every: dict[int, int] = kept(layout.profile, ("gradients", first, last), made)  # as many plans have it
    return every


def _block_by_block(
    ledger: Ledger, found: Found, copies: list[int], home: Ints, step: Ints, parameters: list[list[Parameter]]
) -> None:  # fmt: skip
    """The same where blocks (with recomputation) or sections of them go back by themselves."""
    layout, holdings = found.layout, [found.layout.holdings[number] for number in copies]
    rows = [
        (number, block, size)
        for number, h in enumerate(holdings)
        for block, size in _bytes_by_block(layout, h.stage, parameters[h.stage]).items()
    ]
    of, blocks = [number for number, _, _ in rows], [block for _, block, _ in rows]
    stages = [holdings[number].stage for number in of]
    ops = np.where(found.recomputed, found.ops(Kind.B, stages, units=blocks), -1)
    if layout.offloads:
        pieces = [piece_of(layout, stage, block) for stage, block in zip(stages, blocks, strict=True)]
        ops = np.where(found.recomputed, ops, found.ops(Kind.B, stages, units=pieces))
    first = found.own(ops, [holdings[number] for number in of], empty=NEVER).min(axis=2)
    size = np.array([[size] for _, _, size in rows], dtype=np.int64)
    ledger.add(Value.GRADIENTS, size, home[of], first, step[of], (step[of],))
