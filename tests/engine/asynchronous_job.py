"""What worker and server processes run in the tests of asynchronous servers."""

import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from tests.engine import jobs
from trainplan.engine.asynchronous import Applied
from trainplan.engine.oracle import optimizer_state
from trainplan.engine.trainer import Trainer
from trainplan.plan.plan import Plan
from trainplan.program.staleness import NO_END, State, bound_of
from trainplan.program.timeline import Event


@dataclass
class Found:
    """What a rank has in the end."""

    weights: dict[str, torch.Tensor]
    losses: list[float | None]
    state: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    record: list[Applied] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    sent: dict[int, int] = field(default_factory=dict)  # bytes, by operation


def train(
    rank: int, world: int, name: str, optimizer: str, plan: Plan, sizes: list[int], fields: dict, pauses: list[float],
    records: list[list[Applied]] | None, backend: str = "gloo", device: str = "cpu",
) -> Found:  # fmt: skip
    """Train some steps, every worker with a pause of its own before each; servers repeat a record, if there is one."""
    job, model, captured = jobs.built(name, optimizer, **fields)
    values = jobs.values_of(model)
    shape = jobs.shape_of(name, **fields)
    trainer = Trainer(plan, job, captured, lambda names: values, shape=shape, seed=7, backend=backend, device=device)
    if records and trainer.is_server:
        trainer.record_again = records[rank - plan.workers]
    losses = []
    for number, samples in enumerate(sizes):
        if number == len(sizes) - 2:
            trainer.record()
        if rank < plan.workers:
            time.sleep(pauses[rank])
        losses.append(trainer.step(job.inputs(samples, seed=number)).loss)
    dist.barrier()
    found = Found({n: p.detach().cpu().clone() for n, p in trainer.parameters.items()}, losses)
    found.events, found.sent = trainer.events(sizes[-1]), dict(trainer.part.transport.sent)
    trainer.close()
    if trainer.server is not None and trainer.part.shard is not None:
        shard = trainer.part.shard
        state, found.record = optimizer_state(shard.optimizer, shard.parameters), trainer.server.applied
        found.state = {n: {key: value.cpu() for key, value in entries.items()} for n, entries in state.items()}
    return found


def by_the_rule(plan: Plan, record: list[Applied]) -> None:
    """Whoever was released is whom the rule releases, told the same moments, also when workers left; and nobody was
    further ahead than the bound says."""
    bound = bound_of(plan.exchange, plan.bound)
    state = State(plan.dp)
    for entry in record:
        if entry.worker >= 0:
            released = state.push(entry.worker, entry.moment, bound)
        else:
            released = state.lose(entry.left, bound)
        assert tuple(released) == entry.released
        slowest = state.clock[state.alive].min(initial=NO_END)
        assert all(state.clock[worker] - slowest <= bound[1] for worker in entry.released)
