"""The oracle of asynchronous servers: one process that is given the order in which pushes were applied.

Each worker's gradients are worked out with the weights that it was given when it was released, by each server at its
own time, and applied one push after the other, as the servers recorded it. So every run has an oracle of its own, and
must end with the same weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trainplan.engine.asynchronous import Applied
from trainplan.engine.oracle import optimizer_state
from trainplan.engine.seeds import reseed
from trainplan.engine.serving import Shard
from trainplan.engine.weights import weights_of
from trainplan.errors import RunError
from trainplan.plan.plan import Plan
from trainplan.plan.rules import micro_batches, of_replicas
from trainplan.profile.capture.captured import Captured
from trainplan.profile.profile import Profile
from trainplan.program.lower.backend import backend
from trainplan.program.lower.layout import Layout
from trainplan.program.lower.service import Service
from trainplan.workload.batch import split as split_batch
from trainplan.workload.workload import Batch, Workload


@dataclass
class Replayed:
    """Where training arrived, of every server: its pieces, and what its optimizer keeps for them."""

    weights: list[dict[str, Tensor]] = field(default_factory=list)
    state: list[dict[str, dict[str, Tensor]]] = field(default_factory=list)
    losses: dict[tuple[int, int], float] = field(default_factory=dict)  # (worker, number of its push) → loss
    pulled: list[dict[str, Tensor]] = field(default_factory=list)  # the weights that each worker was given last


class _Process:
    """Everybody in one: the workers' weights and the servers."""

    def __init__(
        self, plan: Plan, workload: Workload, captured: Captured, shape: Profile, values: Mapping[str, Tensor],
        batch: Callable[[int], Batch], seed: int,
    ) -> None:  # fmt: skip
        self.plan, self.workload, self.batch, self.seed = plan, workload, batch, seed
        values = {name: tensor.detach().clone() for name, tensor in values.items()}
        layout = Layout(plan, shape, batch(0).samples, backend("gloo"), tuple(range(plan.dp)))
        assert layout.service is not None
        self.service: Service = layout.service
        stand_ins, cpu = captured.stand_ins(), torch.device("cpu")
        self.shards = [
            Shard(self.service, server, lambda names: values, workload, stand_ins, cpu)
            for server in self.service.servers
        ]
        self.stage = captured.stage(0, len(captured.blocks)).bind(
            {name: torch.nn.Parameter(t.clone()) if t.is_floating_point() and name in stand_ins else t.clone()
             for name, t in values.items()}
        )  # fmt: skip
        self.others = {name for block in captured.blocks for name in block.writes}
        own = dict(self.stage.named_parameters())
        self.pulled = [{name: p.detach().clone() for name, p in own.items()} for _ in range(plan.dp)]
        self.gradients: dict[tuple[int, int], dict[str, Tensor]] = {}
        self.losses: dict[tuple[int, int], float] = {}

    def gradient(self, worker: int, number: int) -> dict[str, Tensor]:
        """What a worker pushes."""
        if (worker, number) in self.gradients:
            return self.gradients[worker, number]
        own = {name: p for name, p in self.stage.named_parameters() if p.requires_grad}
        with torch.no_grad():
            for name, parameter in self.stage.named_parameters():
                parameter.copy_(self.pulled[worker][name])
        batch = self.batch(number)
        part = split_batch(batch, of_replicas(self.plan, batch.samples))[worker]
        pieces = split_batch(part, micro_batches(self.plan, batch.samples)[worker])
        weights = weights_of(pieces, batch.samples, self.plan, self.workload.loss, ())
        whole = 0.0
        for micro, (piece, weight) in enumerate(zip(pieces, weights, strict=True)):

            def seeded(block: int, micro: int = micro) -> None:
                reseed(self.seed, number, worker, micro, block)

            with self.stage.buffers_kept(self.others) if worker else nullcontext():
                output = self.stage({}, piece, seeded)[1]
                loss = self.workload.loss.function(output, piece.targets) * weight
                loss.backward()
            whole += float(loss.detach())
        found = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in own.items()}
        for parameter in own.values():
            parameter.grad = None
        self.gradients[worker, number], self.losses[worker, number] = found, whole
        return found

    def push(self, server: int, worker: int, number: int, applied: int) -> None:
        """Apply what a server got of a push: the `applied`-th that it takes."""
        gradient, loads = self.gradient(worker, number), self.service.by_server[server]
        flat = {
            load.unit: torch.cat([gradient[p.name].reshape(-1)[p.first : p.last] for p in load.pieces])
            for load in loads
        }
        self.shards[server].step(flat, last=applied % self.plan.dp == 0)

    def pull(self, server: int, worker: int) -> None:
        """Give a worker what a server has."""
        for load in self.service.by_server[server]:
            for piece in load.pieces:
                own = self.shards[server].parameters[str(piece)].detach().reshape(-1)
                self.pulled[worker][piece.name].view(-1)[piece.first : piece.last] = own


def replay(
    plan: Plan, workload: Workload, captured: Captured, shape: Profile, values: Mapping[str, Tensor],
    batch: Callable[[int], Batch], seed: int, records: Sequence[Sequence[Applied]],
) -> Replayed:  # fmt: skip
    """Train in this process as servers recorded it. `batch`: the whole batch of a step."""
    every = _Process(plan, workload, captured, shape, values, batch, seed)
    place, applied = [0] * len(records), [0] * len(records)
    released = [[0] * plan.dp for _ in records]  # how often each server has released each worker
    going = True
    while going:
        going = False
        for server, record in enumerate(records):
            while place[server] < len(record):
                entry = record[place[server]]
                # A worker starts its step when all servers have given it their weights for it.
                if entry.worker >= 0 and any(counts[entry.worker] < entry.number for counts in released):
                    break
                if entry.worker >= 0:
                    applied[server] += 1
                    every.push(server, entry.worker, entry.number, applied[server])
                for worker in entry.released:
                    every.pull(server, worker)
                    released[server][worker] += 1
                place[server] += 1
                going = True
    left = [len(record) - at for record, at in zip(records, place, strict=True)]
    if any(left):
        why = f"{left} entries of the servers' records wait for each other"
        raise RunError("replaying what servers recorded", why, "the records of one run, whole")
    return Replayed(
        weights=[{n: p.detach().clone() for n, p in shard.parameters.items()} for shard in every.shards],
        state=[optimizer_state(shard.optimizer, shard.parameters) for shard in every.shards],
        losses=every.losses, pulled=every.pulled,
    )  # fmt: skip
