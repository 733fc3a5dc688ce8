"""What each kind of operation does: one function a kind.

A handler returns how many instructions it took care of (None: one). More than one happens where torch does several of
the program's operations in one call, and hooks note when each of them happened: a backward pass that completes gradient
buckets on its way.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from trainplan.engine import blockwise, crossing, loads, parcels, sharded, two_parts
from trainplan.engine.clocks import now
from trainplan.engine.instructions import Instruction
from trainplan.engine.norm import clip, norm
from trainplan.engine.observed import Observed
from trainplan.engine.pending import Returning, await_later, exchange, noted
from trainplan.engine.runner import Runner
from trainplan.engine.served import add_received, give, push, step_of_server
from trainplan.engine.tied import side_by_side
from trainplan.engine.transport import Works
from trainplan.errors import RunError
from trainplan.profile.capture.sliced import carrying
from trainplan.program.ops import SENDS, Kind

Handler = Callable[[Runner, Instruction, int], int | None]


@dataclass
class Pass:
    """What a forward pass leaves for its backward."""

    leaves: dict[str, Tensor]  # crossings that came in
    made: dict[str, Tensor]  # crossings that go out, with their graph
    loss: Tensor | None


def _forward(run: Runner, op: Instruction, place: int) -> int | None:
    layout = run.part.layout
    pieces = sharded.Pieces(run, place) if layout.units[op.stage] or layout.offloads else None
    if layout.recomputed[run.piece(op)]:
        blockwise.forward(run, op, pieces)
        return pieces.taken if pieces is not None else None
    state, held = run.current, run.part.held[op.stage]
    batch = run.batch(op)
    leaves = arrived(run, op)
    if layout.crosses:

        def finish(last: Instruction, made: dict[str, Tensor], output: Any) -> None:
            loss = weighted_loss(run, op, output) if held.is_last else None
            state.values[last.saved[0]] = Pass(leaves, made, loss)
            hand_out(run, last, made)

        with carrying(run.carry(op)):
            return crossing.forward(run, place, leaves, batch, finish)
    saving = parcels.saving(run, op, leaves)
    hooks = saving.hooks() if saving is not None else nullcontext()
    with nullcontext() if completes(run, op) else held.no_sync(), carrying(run.carry(op)), hooks:
        arguments = leaves, batch, run.seeder(op.micro), run.part_of(op)
        if pieces is None:
            made, output = held.module(*arguments)
        else:
            made, output = held.stage(*arguments, sharded.between(run, op, pieces, saving))
    if saving is not None:
        saving.over(len(layout.sections[op.stage]) - 1, made)
    loss = weighted_loss(run, op, output) if held.is_last else None
    if pieces is not None:
        op = pieces.finish()
    state.values[op.saved[0]] = Pass(leaves, made, loss)
    hand_out(run, op, made)
    return pieces.taken if pieces is not None else None


def arrived(run: Runner, op: Instruction) -> dict[str, Tensor]:
    """The crossings that came in, as leaves of a new graph."""
    found: dict[str, Tensor] = {}
    for value, source in op.inputs:
        needs = set(run.edge_names(Kind.SEND_B, source, op.stage))
        for name, tensor in run.current.values[value].items():
            found[name] = tensor.requires_grad_() if name in needs else tensor
    return found


def weighted_loss(run: Runner, op: Instruction, output: Any) -> Tensor:
    """The loss of a micro-batch (or of a slice of it) times its share in the mean of the whole batch."""
    state, part = run.current, run.part_of(op)
    weight, targets = state.weights[run.piece(op)], run.batch(op).targets
    if weight == 0:
        loss = _nothing_counts(output)
    else:
        loss = run.part.loss.function(output, part.targets(targets) if part else targets) * weight
    value = loss.detach()
    state.loss = value if state.loss is None else state.loss + value
    return loss


def _nothing_counts(output: Any) -> Tensor:
    """A loss of zero, with gradients of zero, for a micro-batch in which nothing counts: its mean is not a number."""
    leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    sound = [leaf for leaf in leaves if bool(leaf.isfinite().all())]
    if not sound:
        why = "no token of this micro-batch counts, and the model returns nothing but the mean over them"
        raise RunError("the loss of a micro-batch", why, "fewer micro-batches")
    return sound[0].sum() * 0.0


def hand_out(run: Runner, op: Instruction, made: dict[str, Tensor]) -> None:
    """Put what other stages read where SEND_F will find it, or another stage of this rank."""
    for value, target in op.outputs:
        names = run.edge_names(Kind.SEND_F, op.stage, target)
        run.current.values[value] = {name: made[name].detach() for name in names}


def gradients_in(run: Runner, op: Instruction) -> dict[str, Tensor]:
    """The gradients that came back, summed where a crossing went to several stages."""
    found: dict[str, Tensor] = {}
    for value, _ in op.gradients:
        for name, gradient in run.current.values[value].items():
            found[name] = found[name] + gradient if name in found else gradient
    return found


def give_back(run: Runner, op: Instruction, gradients: dict[str, Tensor | None], leaves: dict[str, Tensor]) -> None:
    """Put the gradients of what came in where SEND_B will find them, or another stage of this rank."""
    for value, source in op.backwards:
        found = {name: gradients[name] for name in run.edge_names(Kind.SEND_B, source, op.stage)}
        run.current.values[value] = {
            name: torch.zeros_like(leaves[name]) if gradient is None else gradient for name, gradient in found.items()
        }


def _backward(run: Runner, op: Instruction, place: int) -> int | None:
    if run.part.layout.recomputed[run.piece(op)]:
        blockwise.backward(run, op)
        crossing.backward_over(run, op, completes(run, op))
        return None
    held = run.part.held[op.stage]
    done: Pass = run.current.values[op.held[0]]
    roots, seeds = roots_of(run, op, done)
    if held.shards is not None or run.part.layout.offloads:
        return _backward_in_sections(run, op, place, done, roots, seeds)
    pieces = _pieces(run, place)
    last = completes(run, op)
    crossing.backward_begins(run, op, last)
    if isinstance(held.module, Observed) and last and len(pieces) == 1:
        raise AssertionError("DDP would exchange gradients, and the program has no exchange: they disagree")
    if len(pieces) > 1:
        _backward_in_pieces(run, roots, seeds, pieces)
        crossing.backward_ends(run, op.stage)
    else:
        with nullcontext() if last else held.no_sync():
            torch.autograd.backward(roots, seeds)
    run.current.carries.pop((op.stage, run.piece(op)), None)
    final = next(piece for piece in reversed(pieces) if piece.kind is Kind.B)
    give_back(run, final, {name: leaf.grad for name, leaf in done.leaves.items()}, done.leaves)
    return len(pieces) if len(pieces) > 1 else None


def _backward_in_sections(
    run: Runner, op: Instruction, place: int, done: Pass, roots: list[Tensor], seeds: list[Tensor | None]
) -> int:
    """A backward pass on whose way weights are gathered and gradients exchanged, and what was saved comes back."""
    pieces, count = sharded.Pieces(run, place), len(run.part.layout.sections[op.stage])
    run.boundary = lambda piece: pieces.reach(count - 1 - piece)
    torch.autograd.backward(roots, seeds)
    run.boundary = None
    run.current.parcels.pop((op.stage, run.piece(op)), None)
    give_back(run, pieces.finish(), {name: leaf.grad for name, leaf in done.leaves.items()}, done.leaves)
    return pieces.taken


def roots_of(run: Runner, op: Instruction, done: Pass) -> tuple[list[Tensor], list[Tensor | None]]:
    """Where a backward pass starts, and with which gradients."""
    roots: list[Tensor] = [] if done.loss is None else [done.loss]
    seeds: list[Tensor | None] = [None] * len(roots)
    for name, gradient in gradients_in(run, op).items():
        if done.made[name].requires_grad:
            roots.append(done.made[name])
            seeds.append(gradient)
    carry = run.carry(op)
    if carry is not None:
        carried, gathered = carry.roots()
        return [*roots, *carried], [*seeds, *gathered]
    return roots, seeds


def _pieces(run: Runner, place: int) -> list[Instruction]:
    """The operations that one backward call covers: B, REDUCE_GRAD, B.1, REDUCE_GRAD.1, …"""
    first = run.list[place]
    found, layout = [first], run.part.layout
    sums = layout.first_tie if layout.decides else len(layout.buckets[first.stage])
    for following in run.list[place + 1 :] if layout.buckets[first.stage] else ():
        same = following.kind is Kind.B and (following.micro, following.slice) == (first.micro, first.slice)
        pushed = following.kind is Kind.SEND_G and first.stage not in layout.late
        exchange = pushed or (following.kind is Kind.REDUCE_GRAD and following.unit < sums)
        exchange |= following.kind in (Kind.TICK, Kind.NEGOTIATE)
        if following.stage != first.stage or not (same or exchange):
            break
        found.append(following)
    return found


def _backward_in_pieces(
    run: Runner, roots: list[Tensor], seeds: list[Tensor | None], pieces: list[Instruction]
) -> None:
    """One backward pass; each bucket that becomes complete ends a piece and starts its exchange."""
    held = run.part.held[pieces[0].stage]
    compute = [p for p in pieces if p.kind is Kind.B]
    exchange = [p for p in pieces if p.kind is Kind.REDUCE_GRAD]
    pushes = [p for p in pieces if p.kind is Kind.SEND_G]
    since = run.recorder.mark()

    def ready(bucket: int) -> None:
        nonlocal since
        moment = run.recorder.mark()
        if bucket < len(compute):  # DDP's first step has other buckets than the later ones
            run.recorder.note(compute[bucket].op, since, moment)
        since = moment
        for load in (p for p in pushes if run.load(p).bucket(p.stage) == bucket):
            push(run, load, 0)
        if held.number in run.part.exchanges:
            run.part.exchanges[held.number].ready(bucket)
        elif held.reducer is not None and exchange:
            start_exchange(run, exchange[bucket], held.reducer.flat[bucket])

    if held.reducer is not None:
        held.reducer.watch(ready)
        torch.autograd.backward(roots, seeds)
        held.reducer.finish()
    else:
        assert isinstance(held.module, Observed)  # pure data parallelism
        ops = [p.op for p in exchange]
        note = run.recorder.note
        held.module.watch(ready, lambda bucket, start, end, size: note(ops[bucket], start, end, size))
        torch.autograd.backward(roots, seeds)


def start_exchange(run: Runner, op: Instruction, flat: Tensor) -> None:
    """Start the sum of a bucket over the replicas; whoever reads it waits for it."""
    await_later(run, op, exchange(run, op, flat))


def _recompute(run: Runner, op: Instruction, place: int) -> None:
    if op.unit == run.part.held[op.stage].stage.last - 1:  # with which a backward pass begins
        crossing.backward_begins(run, op, completes(run, op))
    blockwise.recompute(run, op)


def _send(run: Runner, op: Instruction, place: int) -> None:
    tensors = list(run.current.values[op.reads[0]].values())
    start = run.recorder.mark()  # a GPU's message begins when what it carries has been computed
    pending = run.part.transport.send(tensors, op.peer, run.tag(op), op.op)
    if op.waits:
        pending.wait()
    else:
        run.current.sending[op.reads[0]] = pending
    run.recorder.note(op.op, start, run.recorder.mark(), sum(tensor.nbytes for tensor in tensors))


def _reduce(run: Runner, op: Instruction, place: int) -> None:
    """A bucket by itself (after a recomputed block), or the gradients of tied weights."""
    if op.unit in run.part.tied:
        copies = run.part.tied[op.unit]
        flat = side_by_side(copies[0])
        for other in copies[1:]:
            flat += side_by_side(other)
        await_later(run, op, Returning(exchange(run, op, flat), flat, copies))
        return
    if run.part.held[op.stage].shards is not None:
        sharded.across(run, op)
        return
    if op.stage in run.part.exchanges:
        crossing.by_the_exchange(run, op, place)
        return
    reducer = run.part.held[op.stage].reducer
    if reducer is None:
        raise AssertionError("a bucket without a reducer: the program and the engine disagree")
    start_exchange(run, op, reducer.flat[op.unit])


def _count(run: Runner, op: Instruction, place: int) -> None:
    """Sum the number that the loss's mean is over; the weights were counts until now."""
    state = run.current
    # Each copy of the last stage counts what it sees itself.
    forwards = [i for i in run.list if i.kind is Kind.F and i.stage == op.stage]
    # Slices whose model returns their share of a mean have the count of their whole micro-batch each.
    own = {run.piece(i) for i in forwards if not i.slice or not run.part.slices[i.slice].tokens.mean}
    total = torch.tensor([sum(state.weights[piece] for piece in own)], dtype=torch.float64, device=run.part.device)
    exchange(run, op, total).wait()
    whole = float(total)
    if not whole:
        raise RunError("a batch in which nothing counts", "its mean loss is not a number", "leaving it out")
    state.weights = [weight / whole for weight in state.weights]


def _loss(run: Runner, op: Instruction, place: int) -> None:
    state = run.current
    assert state.loss is not None  # the last stage computes it before it sums it
    state.loss = state.loss.to(torch.float64)
    state.sent.append(exchange(run, op, state.loss))


def _barrier(run: Runner, op: Instruction, place: int) -> None:
    """Go on when all ranks of the replica are here, and the device of each has computed what it was given."""
    if run.part.device.type == "cuda":  # not the whole device: receives of later phases are posted there already
        torch.cuda.current_stream(run.part.device).synchronize()
    start = now()
    noted(run, op, lambda: start, Works([run.part.transport.barrier(run.part.groups[op.group])])).wait()


def _step(run: Runner, op: Instruction, place: int) -> None:
    if run.part.shard is not None:
        step_of_server(run, run.part.shard, op)
        return
    if run.part.layout.crosses:
        crossing.put_off(run, op)
        return
    held = run.part.held[op.stage]
    crossing.wait(run, [op.stage])
    add_received(run, held)
    limit = run.part.layout.profile.clip_norm
    if limit:
        clip(run, held, limit)
    held.optimizer.step()
    if held.scheduler is not None:
        held.scheduler.step()
    held.optimizer.zero_grad(set_to_none=True)
    if held.reducer is not None:
        held.reducer.zero()
    if held.shards is not None:
        held.shards.zero_gradients()


def completes(run: Runner, op: Instruction) -> bool:
    """Whether the backward pass of what an operation is about completes the gradients of its stage."""
    return run.piece(op) == run.completing[op.stage]


HANDLERS: dict[Kind, Handler] = {
    Kind.F: _forward,
    Kind.B: _backward,
    Kind.I: two_parts.of_input,
    Kind.W: two_parts.of_weights,
    Kind.R: _recompute,
    **{kind: _send for kind in SENDS if kind in (Kind.SEND_F, Kind.SEND_B)},
    Kind.SEND_G: push,
    Kind.SEND_W: give,
    Kind.REDUCE_GRAD: _reduce,
    Kind.COUNT: _count,
    Kind.LOSS: _loss,
    Kind.NORM: norm,
    Kind.STEP: _step,
    Kind.BARRIER: _barrier,
    Kind.SCATTER_GRAD: sharded.scatter,
    Kind.GATHER_F: sharded.gather,
    Kind.GATHER_B: sharded.gather,
    Kind.TICK: crossing.by_the_exchange,
    Kind.NEGOTIATE: crossing.by_the_exchange,
    Kind.LOAD: loads.load,
    Kind.SEND_INPUT: loads.scatter,
    Kind.OFFLOAD: parcels.offload,
    Kind.FETCH: parcels.fetch,
}
