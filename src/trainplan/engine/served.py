"""What workers and servers do with loads: push gradients, step with what has arrived, send weights."""

from __future__ import annotations

from torch import tensor

from trainplan.engine.held import Held
from trainplan.engine.instructions import Instruction
from trainplan.engine.pending import send_now
from trainplan.engine.runner import Runner
from trainplan.engine.serving import Shard, joined


def push(run: Runner, op: Instruction, place: int) -> None:
    """Send a load of gradients to where the optimizer is."""
    load, reducer = run.load(op), run.part.held[op.stage].reducer
    assert reducer is not None  # which has the buckets
    flat = reducer.flat[load.bucket(op.stage)]
    tensors = [flat[first:last] for first, last in load.segments]
    if load.numbered:
        tensors.insert(0, tensor([run.current.number], device=run.part.device))
    send_now(run, op, tensors)


def give(run: Runner, op: Instruction, place: int) -> None:
    """Send a load of weights to a worker."""
    holder = run.part.shard or run.part.weights[op.stage]
    send_now(run, op, holder.tensors(run.load(op)))


def step_of_server(run: Runner, shard: Shard, op: Instruction) -> None:
    """One step with the sum of what all workers have pushed of a load."""
    pushes = run.current.received.pop(op.unit)
    total = joined(pushes.pop(0))
    while pushes:  # one after the other: what was added is gone before the optimizer needs room
        total.add_(joined(pushes.pop(0)))
    shard.step({op.unit: total}, last=op.unit == shard.loads[-1].unit)


def add_received(run: Runner, held: Held) -> None:
    """Add what the other workers have pushed to the root's own gradients."""
    for unit, pushes in run.current.received.items():  # of the other workers, at the root
        assert held.reducer is not None
        load = run.part.layout.service.loads[unit]  # type: ignore[union-attr]
        for tensors in pushes:
            held.reducer.flat[load.bucket(held.number)].add_(joined(tensors))
    run.current.received.clear()
