"""What worker processes run in test_memory.py: real steps of the engine, with the allocator watched."""

from __future__ import annotations

import gc
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from tests.profiling.models import of
from trainplan.engine import parcels, sharded
from trainplan.engine.sharded import Pieces
from trainplan.engine.trainer import Trainer
from trainplan.plan.plan import Plan
from trainplan.profile.capture.captured import Captured, capture
from trainplan.profile.capture.tensors import values_of
from trainplan.profile.memory import watch
from trainplan.profile.profile import Profile
from trainplan.profile.structure import structure
from trainplan.profile.update import state_bytes
from trainplan.workload.batch import tensors
from trainplan.workload.load import load
from trainplan.workload.workload import Batch, Workload

WARM_UP = 2  # the first step makes the optimizer's state, before the second DDP makes its buckets
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Seen:
    """Bytes of one rank."""

    start: int  # before the step
    ops: list[tuple[str, int, int]]  # of every operation in order: most bytes while it runs, bytes after it


def mlp() -> Workload:
    """More weights than activations, of which half are in place."""
    layers = [layer for _ in range(5) for layer in (nn.Linear(192, 192), nn.ReLU())]
    return of(nn.Sequential(*layers, nn.Linear(192, 4)), (192,), optimizer="adamw", batch=64)


def wide() -> Workload:
    """Nearly all of its bytes are inputs."""
    return of(nn.Sequential(nn.Linear(4096, 16), nn.ReLU(), nn.Linear(16, 4)), (4096,), batch=64)


@cache
def built(name: str) -> tuple[Workload, nn.Module, Captured]:
    own = {"mlp": mlp, "wide": wide}
    workload = own[name]() if name in own else load(name)
    torch.manual_seed(0)
    model = workload.build()
    return workload, model, capture(model, workload.inputs(2, 0), workload.loss)


@cache
def shape_of(name: str) -> Profile:
    """What plans are lowered with: found once, not by every trainer."""
    workload, _, captured = built(name)
    return structure(captured, workload, workload.inputs(2, 0))


def _trainer(name: str, plan: Plan) -> Trainer:
    workload, model, captured = built(name)
    values = {key: _copy(value) for key, value in values_of(model).items()}
    return Trainer(plan, workload, captured, lambda names: values, shape=shape_of(name))


def _copy(value: torch.Tensor) -> torch.Tensor:
    copied = value.detach().clone()
    return nn.Parameter(copied, value.requires_grad) if isinstance(value, nn.Parameter) else copied


def _close(trainer: Trainer) -> None:
    if trainer.plan.world > 1:
        dist.barrier()
        trainer.close()


def track(rank: int, world: int, name: str, plan: Plan, batch: int) -> Seen:
    """Train a few steps; the memory of the last one, operation by operation."""
    trainer = _trainer(name, plan)
    data = trainer.workload.inputs(batch, 0)
    for _ in range(WARM_UP):
        trainer.step(data)
    runner = trainer._runner(batch)
    run, names = runner._run, []
    with _by_threads(runner), watch(CPU) as seen:
        within = []

        def watched(place, state):
            if within:  # what is due in the middle of a pass
                return run(place, state)
            names.append(runner.program.name(runner.list[place].op))
            within.append(place)
            with seen.part(f"{len(names) - 1}"):
                taken = run(place, state)
            within.clear()
            return taken

        runner._run = watched
        with seen.part("before"):
            torch.zeros(1)
        trainer.step(data)
    start = _start(trainer, data, batch)
    base = seen.levels["before"].start
    levels = [seen.levels[str(number)] for number in range(len(names))]
    _close(trainer)
    return Seen(
        start, [(n, start + at.peak - base, start + at.end - base) for n, at in zip(names, levels, strict=True)]
    )


def whole(rank: int, world: int, name: str, plan: Plan, batch: int) -> tuple[int, int]:
    """Bytes before a step, and the most while it runs: of steps whose parts go on behind the host's back. What threads
    of ours do there is done at once, so nothing waits for a message."""
    trainer = _trainer(name, plan)
    data = trainer.workload.inputs(batch, 0)
    for _ in range(WARM_UP):
        trainer.step(data)
    trainer.settle()
    with _by_threads(trainer._runner(batch)), watch(CPU) as seen:
        with seen.part("before"):
            torch.zeros(1)
        with seen.part("step"):
            trainer.step(data)
            trainer.settle()
    start = _start(trainer, data, batch)
    _close(trainer)
    return start, start + seen.levels["step"].peak - seen.levels["before"].start


def _start(trainer: Trainer, data: Batch, batch: int) -> int:
    """Bytes before a step."""
    plan, shard = trainer.plan, trainer.part.shard
    if shard is not None:  # of a server
        return sum(p.nbytes for p in shard.parameters.values()) + state_bytes(shard.optimizer)
    weights = _shared_out(trainer) if plan.zero else trainer.parameters.values()
    lasting = [*weights, *trainer.buffers.values()]
    own = trainer.inputs.own(data, batch, already=False)
    start = sum(t.nbytes for t in [*lasting, *tensors(own).values()]) + sum(
        state_bytes(held.optimizer) for held in trainer.part.held.values()
    )
    if plan.dp > 1 and not plan.zero:  # buckets, ours or DDP's
        start += sum(p.nbytes for p in trainer.parameters.values() if p.requires_grad)
    return start


def by_operation(name: str, plan: Plan, batch: int) -> tuple[int, dict[str, int], dict[tuple[int, int], int]]:
    """A step on one device whose passes come in sections: bytes before it, most bytes beyond them while each section
    computes, and the bytes that were copied of each (micro-batch, section)."""
    trainer = _trainer(name, plan)
    data = trainer.workload.inputs(batch, 0)
    for _ in range(WARM_UP):
        trainer.step(data)
    runner, copied = trainer._runner(batch), {}
    start_copy = parcels._start

    def noted(run, op, parcel):
        copied[op.micro, op.unit] = parcel.size
        start_copy(run, op, parcel)

    with watch(CPU) as seen:

        class Watched(Pieces):
            """A pass, with the allocator watched section by section."""

            def __init__(self, run, place) -> None:
                super().__init__(run, place)
                self._open()

            def _open(self) -> None:
                self.part = seen.part(runner.program.name(self.run.list[self.at].op))
                self.part.__enter__()

            def _over(self) -> None:
                self.part.__exit__(None, None, None)
                super()._over()

            def _next(self) -> None:
                super()._next()
                self._open()

        with mock.patch.object(sharded, "Pieces", Watched), mock.patch.object(parcels, "_start", noted):
            with seen.part("before"):
                torch.zeros(1)
            trainer.step(data)
    base = seen.levels.pop("before").start
    return _start(trainer, data, batch), {name: level.peak - base for name, level in seen.levels.items()}, copied


@contextmanager
def _by_threads(runner):
    """A thread that adds up what came is not watched."""
    if runner.part.chain is None:
        yield
        return
    with mock.patch.object(runner.part, "chain", Here()):
        yield


class Here:
    """What would be done behind the host's back, done at once."""

    def then(self, work):
        work()
        return self

    def wait(self) -> None: ...


def _shared_out(trainer: Trainer) -> list[torch.Tensor]:
    """The weights and gradients that are there all the time: whole, or this rank's share."""
    found: list[torch.Tensor] = []
    for held in trainer.part.held.values():
        assert held.shards is not None
        found += held.shards.own if trainer.plan.zero == 3 else held.shards.flat
        found += held.shards.gradients
    return found


def ahead(name: str, plan: Plan, batch: int) -> dict[str, int]:
    """Bytes that are there more than before: once the first batch was loaded, the second, and after the first step."""
    trainer = _trainer(name, plan)
    data = trainer.workload.inputs(batch, 0)
    for _ in range(WARM_UP):
        trainer.step(data)

    def here(copy) -> Future:  # what would be copied by a thread that is not watched
        made = Future()
        made.set_result(copy())
        made.result().span.over = 0.0
        return made

    with mock.patch.object(trainer.inputs, "start", here), watch(CPU) as seen:
        with seen.part("before"):
            torch.zeros(1)
        for what, act in (("first", trainer.preload), ("second", trainer.preload), ("stepped", None)):
            with seen.part(what):
                act(data) if act else trainer.step()
    base = seen.levels.pop("before").start
    return {what: level.end - base for what, level in seen.levels.items()}


def growth(rank: int, world: int, name: str, plan: Plan, batch: int) -> int:
    """How many more bytes there are after four steps than after one. Nothing is collected meanwhile."""
    trainer = _trainer(name, plan)
    data = trainer.workload.inputs(batch, 0)
    for _ in range(WARM_UP):
        trainer.step(data)
    gc.collect()
    gc.disable()
    with watch(CPU) as seen:
        for step in range(4):
            with seen.part(str(step)):
                trainer.step(data)
    gc.enable()
    _close(trainer)
    return seen.levels["3"].end - seen.levels["0"].end
