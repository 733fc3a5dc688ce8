"""What worker processes run in the engine's tests."""

from functools import cache

import torch
import torch.distributed as dist

from tests.engine.models import workload
from trainplan.engine.inputs import steps_of
from trainplan.engine.oracle import Trained, optimizer_state
from trainplan.engine.trainer import Trainer
from trainplan.engine.worker import gradients_kept, whole_state
from trainplan.plan.plan import Plan
from trainplan.profile.capture.captured import capture
from trainplan.profile.profile import Profile
from trainplan.profile.structure import structure


def values_of(model) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


@cache
def captured_once(name: str, single: bool):
    job = workload(name, single=single)
    with torch.device("meta"):
        model = job.build()
    return capture(model, job.inputs(2, 0), job.loss)


def built(name: str, optimizer: str, **fields):
    job = workload(name, optimizer, **fields)
    torch.manual_seed(3)
    return job, job.build(), captured_once(name, fields.get("single", False))


@cache
def shape_of(name: str, single: bool = False, clip_norm: float = 0.0, **fields) -> Profile:
    """What a plan is lowered with. A trainer that is not given it finds it by a step on the meta device, which takes
    longer than the steps of these models."""
    job = workload(name, single=single, clip_norm=clip_norm, **fields)
    return structure(captured_once(name, single), job, job.inputs(2, 0))


def train(
    rank: int,
    world: int,
    name: str,
    optimizer: str,
    plan: Plan,
    sizes: list[int],
    fields: dict,
    record: int = 0,
    backend: str = "gloo",
    device: str = "cpu",
):
    """Train some steps under a plan; what this rank holds afterwards, and its events."""
    job, model, captured = built(name, optimizer, **fields)
    values = values_of(model)
    shape = shape_of(name, **fields)
    trainer = Trainer(plan, job, captured, lambda names: values, shape=shape, seed=7, backend=backend, device=device)
    trained = Trained()
    copies = list(trainer.part.held.values())
    kept = gradients_kept(trainer)
    batches = ((job.inputs(samples, seed=number), None) for number, samples in enumerate(sizes))
    for number, step in enumerate(steps_of(trainer, batches)):
        if record and number == record:
            trainer.record()
        trained.losses.append(step().loss)
    trainer.settle()
    trained.agendas = list(trainer.agendas)
    trained.gradients = kept
    trainer.gather()
    current = trainer.parameters if trainer.is_current else {}
    trained.weights = {n: p.detach().cpu().clone() for n, p in current.items()}
    first = [held for held in copies if held.is_first_copy]  # running statistics are those of the first copy
    trained.buffers = {n: b.detach().cpu().clone() for held in first for n, b in held.stage.named_buffers()}
    shard = trainer.part.shard
    states = (
        [whole_state(held) for held in copies]
        if shard is None
        else [optimizer_state(shard.optimizer, shard.parameters)]
    )
    for state in states:
        trained.state |= {n: {key: value.cpu() for key, value in entries.items()} for n, entries in state.items()}
    events = trainer.events(sizes[-1]) if record else []
    place = (trainer.replica, tuple(trainer.stages))
    if world > 1:
        dist.barrier()
        trainer.close()
    return trained, events, place
