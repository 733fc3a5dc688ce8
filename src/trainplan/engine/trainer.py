"""Training under a plan, in the user's own loop.

    trainer = trainplan.build(plan, model, loss, optimizer, inputs=example)   # on every rank
    for batch in batches:                            # the whole batch, the same on every rank
        result = trainer.step(batch)                 # result.loss, result.seconds
    for result in trainer.run(batches): ...          # the same; with preload=on the next batch comes meanwhile
    trainer.evaluate(batch)
    trainer.save("checkpoint")
    trainer.close()

Each rank captures the model for itself (on the meta device), gets values only for its own stage, and runs its own list
of the program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainplan.engine import checkpoint
from trainplan.engine.agreed import agree
from trainplan.engine.ambient import refuse_autocast
from trainplan.engine.asynchronous import Applied, Server, say_goodbye
from trainplan.engine.crossing import agendas_of, begin, close, keep_agendas, replay, settle
from trainplan.engine.evaluation import Evaluation
from trainplan.engine.exchanges import Sums, sums_of
from trainplan.engine.held import bind, hold
from trainplan.engine.inputs import Inputs, steps_of
from trainplan.engine.observed import WARM_UP_STEPS
from trainplan.engine.parcels import Host
from trainplan.engine.recorder import Recorder, now
from trainplan.engine.runner import Part, Runner
from trainplan.engine.serving import Shard, Weights
from trainplan.engine.sharded import Chain
from trainplan.engine.tied import copies_of
from trainplan.engine.transport import transport
from trainplan.engine.verified import hold_against_eager
from trainplan.engine.world import groups_of
from trainplan.errors import PlanError, RunError
from trainplan.plan.plan import Plan
from trainplan.plan.rules import check as check_plan
from trainplan.plan.rules import check_model
from trainplan.plan.served import ASYNCHRONOUS
from trainplan.plan.sliced import check_runs
from trainplan.plan.text import brief
from trainplan.profile.capture.captured import Captured, capture
from trainplan.profile.capture.materialise import Skeleton
from trainplan.profile.capture.sliced import Slice, slices_of
from trainplan.profile.capture.stage import Stage
from trainplan.profile.capture.tensors import values_of
from trainplan.profile.capture.tokens import tokens_of
from trainplan.profile.profile import Profile
from trainplan.profile.structure import structure
from trainplan.program.agenda import Agendas
from trainplan.program.check import check
from trainplan.program.lower import lower
from trainplan.program.lower.backend import backend as find_backend
from trainplan.program.lower.layout import Layout
from trainplan.program.program import Program
from trainplan.program.timeline import Event
from trainplan.workload.batch import as_batch
from trainplan.workload.optimizer import Groups
from trainplan.workload.workload import Workload


@dataclass(frozen=True)
class StepResult:
    """What one step did, as this rank knows it."""

    step: int
    # Of the whole batch; of asynchronous servers what this worker adds to it; None on ranks without the last stage.
    loss: float | None
    seconds: float
    samples: int


class Trainer:
    """One rank of a run."""

    def __init__(
        self,
        plan: Plan,
        workload: Workload,
        captured: Captured,
        values: Callable[[set[str]], Mapping[str, Tensor]],
        *,
        shape: Profile | None = None,
        backend: str = "gloo",
        device: torch.device | str = "cpu",
        seed: int = 0,
        compiled: bool = False,
    ) -> None:
        self.plan, self.workload, self.captured, self.seed, self.backend = plan, workload, captured, seed, backend
        self.device = torch.device(device)
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        world = dist.get_world_size() if dist.is_initialized() else 1
        check_runs(plan)
        if plan.world != world:
            why = f"it needs {plan.world} ranks, and {world} {'was' if world == 1 else 'were'} started"
            fits = "single" if world == 1 else f"dp={world}"
            instead = f"torchrun --nproc-per-node {plan.world} FILE, or a plan of {world}, such as {fits}"
            raise PlanError(f"plan {brief(plan)!r}", why, instead)
        self.is_asynchronous = plan.exchange in ASYNCHRONOUS
        if self.is_asynchronous and backend == "nccl":
            why = f"exchange={plan.exchange} takes what comes first, and NCCL takes what was named first"
            raise PlanError(f"plan {brief(plan)!r}", why, "exchange=ps-bsp, or gloo")
        if plan.blocks != len(captured.blocks):
            why = f"it was made for {plan.blocks} blocks, and the model has {len(captured.blocks)}"
            raise PlanError(f"plan {brief(plan)!r}", why, "making the plan again")
        self.shape = shape or structure(captured, workload, workload.inputs(2, 0))
        self.slices = self._sliced(compiled)
        self.replica, numbers = self._place()
        self._values = values
        self.stages: dict[int, Stage] = {}  # by number
        for number in numbers:
            self.stages[number] = bind(self, number, values)
            if compiled:
                self.stages[number].compiled()
        self.steps_done = 0
        self.place: dict[str, Any] = {}  # in the data, as whoever feeds us knows it; saved and resumed with the rest
        self._steps_here = 0  # of `steps_done`, those that this process has run
        self._gathered = -1  # `steps_done` when all weights were whole here, where replicas share them out
        self.recorder = Recorder(self.device, alone=self.is_asynchronous)
        self.server: Server | None = None  # of a rank that serves whoever comes first
        self.record_again: Sequence[Applied] = ()  # that such a server is to repeat
        self._recorded_from = 0
        self._runners: dict[int, Runner] = {}
        self.groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}  # by their ranks
        self._sums: dict[tuple[int, ...], Sums] = {}
        self._part: Part | None = None
        self._transport = transport(backend, self.device)
        self.inputs = Inputs(self)
        self._evaluation: Evaluation | None = None

    def _sliced(self, compiled: bool) -> list[Slice]:
        """The slices of every sequence, where the plan has any."""
        if not self.plan.slices:
            return []
        check_model(self.plan, self.shape)
        if compiled:
            raise PlanError(f"plan {brief(self.plan)!r}", "compiled blocks take sequences whole", "leaving compile out")
        example = self.workload.inputs(2, 0)
        tokens = tokens_of(self.captured, self.workload.tokens_per_sample, self.workload.loss, example)
        return slices_of(tokens, self.plan.slices)

    def _place(self) -> tuple[int, list[int]]:
        """The replica of this rank, and the stages that it holds: of a server none."""
        if self.plan.workers <= self.rank < self.plan.world:
            return 0, []
        found = [
            (pipeline // self.plan.lines, number)
            for pipeline, stages in enumerate(self.plan.placement)
            for number, ranks in enumerate(stages)
            if self.rank in ranks
        ]
        if not found:
            why = f"it has no place for rank {self.rank}"
            raise PlanError(
                f"plan {brief(self.plan)!r}", why, f"a placement with every rank from 0 to {self.plan.world - 1}"
            )
        return found[0][0], sorted({number for _, number in found})

    # -- the program ------------------------------------------------------------------------------------------------

    def program(self, batch: int) -> Program:
        """The program of one step with a batch of so many samples."""
        return self._runner(batch).program

    def _runner(self, batch: int) -> Runner:
        if batch not in self._runners:
            check_plan(self.plan, batch)
            program = check(lower(self.plan, self.shape, batch, self.backend))
            self._runners[batch] = Runner(program, self.rank, self._part_for(program, batch), self.recorder)
        return self._runners[batch]

    def _part_for(self, program: Program, batch: int) -> Part:
        """What the runners of all batch sizes share, made with the first."""
        layout = Layout(self.plan, self.shape, batch, find_backend(self.backend), tuple(range(self.plan.dp)))
        for ranks, group in zip(program.groups, self._new_groups(program.groups), strict=True):
            self.groups.setdefault(ranks, group)
        groups = [self.groups[ranks] for ranks in program.groups]
        self._transport.connect(program.links)
        sums = sums_of(program, self.rank, self._transport, self.groups, self._sums)
        if self._part is not None:
            return Part(**{**vars(self._part), "layout": layout, "groups": groups, "sums": sums})
        held = {number: hold(self, number, layout) for number in self.stages}
        ties = {layout.first_tie + n: tie for n, tie in enumerate(layout.ties)}
        self._part = Part(
            layout=layout, replica=self.replica, held=held, loss=self.workload.loss,
            transport=self._transport, groups=groups, seed=self.seed, device=self.device,
            slices=self.slices, sums=sums, inputs=self.inputs,
            host=Host(self.device) if layout.offloads else None,
            chain=Chain(self.device, layout.backend.receives_wait) if self.plan.zero else None,
            tied={unit: copies_of(tie, held) for unit, tie in ties.items() if set(tie.stages) & set(held)},
            weights={n: Weights(own, layout.buckets[n]) for n, own in held.items()} if layout.service else {},
            shard=self._shard(layout) if self.is_server else None,
            exchanges=begin(layout, held, self.recorder, self.rank),
        )  # fmt: skip
        return self._part

    def _shard(self, layout: Layout) -> Shard:
        assert layout.service is not None  # or there would be no servers
        server = self.rank - self.plan.workers
        return Shard(layout.service, server, self._values, self.workload, self.captured.stand_ins(), self.device)

    @property
    def is_server(self) -> bool:
        """Whether this rank is a parameter server, which trains nothing itself."""
        return self.rank >= self.plan.workers

    def _new_groups(self, groups: tuple[tuple[int, ...], ...]) -> list[dist.ProcessGroup | None]:
        fresh = tuple(ranks for ranks in dict.fromkeys(groups) if ranks not in self.groups)
        made = dict(zip(fresh, groups_of(fresh), strict=True)) if fresh else {}
        return [made.get(ranks, self.groups.get(ranks)) for ranks in groups]

    @property
    def part(self) -> Part:
        """What this rank holds: its stage, its optimizer, its groups."""
        if self._part is None:
            self._runner(self.workload.batch)
        assert self._part is not None
        return self._part

    def gather(self) -> None:
        """Have all weights of this rank's stages whole, and as the last step left them, until the next step; all ranks
        call this. (It does something only where replicas share out their states.)"""
        for held in self.part.held.values():
            if held.shards is not None:
                held.shards.gather()
        self._gathered = self.steps_done

    @property
    def is_current(self) -> bool:
        """Whether the weights here are those after the last step: the root of `dataparallel` sends them only before
        the next one."""
        service = self.part.layout.service
        return service is None or not service.at_root or self.rank == service.rank(0)

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters on this rank, under the model's own names; of a server the pieces that it has. Where replicas
        share out their states, those that others have stepped are here after `gather`, which has to come first."""
        self.settle()
        shared = self._part is not None and any(held.shards is not None for held in self._part.held.values())
        if shared and self._gathered != self.steps_done:
            why = "each rank has stepped its share of the weights, and has those of the others as they were, if at all"
            raise RunError(f"weights under zero={self.plan.zero}", why, "trainer.gather() before, on all ranks")
        if self.is_server:
            assert self.part.shard is not None
            return self.part.shard.parameters
        return {name: p for stage in self.stages.values() for name, p in stage.named_parameters()}

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The buffers on this rank, under the model's own names."""
        return {name: b for stage in self.stages.values() for name, b in stage.named_buffers()}

    @property
    def optimizer_groups(self) -> Groups:
        """Names of the parameters in each group of the optimizer: of the whole model, so the same on every rank."""
        shard = self.part.shard
        return shard.groups if shard is not None else next(iter(self.part.held.values())).names

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of this rank's optimizers, to change their settings: a group comes once for every stage that the
        rank holds, and all ranks change the same ones. (A scheduler of the workload's changes them after every step.)
        """
        self.settle()
        optimizers = [own.optimizer for own in (self.part.shard, *self.part.held.values()) if own is not None]
        return [group for optimizer in optimizers for group in optimizer.param_groups]

    # -- training ---------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Finish what the last step left to the next (`crossing.py`), before anybody looks at weights; all ranks do."""
        if self._part is not None:
            settle(self._part, self.recorder)

    def replay(self, agendas: Sequence[Agendas]) -> None:
        """In the next steps exchange the gradients of every stage as its agenda says, instead of deciding; all ranks
        call this."""
        replay(self.part, agendas)

    @property
    def agendas(self) -> tuple[Agendas, ...]:
        """What of each stage of this rank was exchanged when in each recorded step, where that was decided while
        running."""
        self.settle()
        return agendas_of(self.part)

    def step(self, batch: Any = None, whole: int | None = None) -> StepResult:
        """One optimizer step.

        `batch` is a `Batch`, or (inputs, targets) as a loader gives them: the whole batch, of which this rank takes
        its replica's part; or, where `whole` is given, that part itself, out of a batch of `whole` samples. None: the
        batch that was preloaded first.
        """
        started = now()
        refuse_autocast(self.device)
        if batch is not None:
            self.inputs.refuse_another()
        fed = self.inputs.next() if batch is None else self.inputs.of(batch, whole)
        runner, total = self._runner(fed.total), fed.total
        if self.is_server:
            if self.is_asynchronous:
                self.server = self.server or Server(runner, self.record_again)
                self.server.serve(self.steps_done + 1)
            else:
                runner.step(self.steps_done, fed)
            self.steps_done += 1
            self._steps_here += 1
            return StepResult(self.steps_done - 1, None, now() - started, total)
        state = runner.step(self.steps_done, fed)
        self.steps_done += 1
        self._steps_here += 1
        loss = float(state.loss) if state.loss is not None else None
        return StepResult(self.steps_done - 1, loss, now() - started, total)

    def preload(self, batch: Any, whole: int | None = None) -> None:
        """Start to bring a batch to where it is read (preload=on): call this before the step of the batch before it,
        during which it comes; `step()` without a batch then takes what came first."""
        self.inputs.preload(batch, whole)

    def run(self, batches: Iterable[Any]) -> Iterator[StepResult]:
        """A step for every batch, as it is taken; with preload=on the next batch comes while this one is trained."""
        return (step() for step in steps_of(self, ((batch, None) for batch in batches)))

    # -- evaluation -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, batch: Any) -> float | None:
        """The loss of a batch in evaluation mode (on ranks with the last stage; None elsewhere). Nothing is updated.

        Replica 0 does it, with its running statistics.
        """
        refuse_autocast(self.device)
        self.settle()
        # All replicas, so that process groups are made by all: the first time that one is needed, it is here.
        runner = next(iter(self._runners.values()), None) or self._runner(self.workload.batch)
        self.gather()
        if self.replica or self.is_server:
            return None
        self._evaluation = self._evaluation or Evaluation(self)
        return self._evaluation(runner, as_batch(batch))

    def save(self, path: str | Path) -> None:
        """Write a checkpoint that any plan can resume from; all ranks call this."""
        checkpoint.save(self, path)

    def load(self, path: str | Path) -> None:
        """Take everything from a checkpoint, whatever plan it was saved under; all ranks call this."""
        checkpoint.load(self, path)
        self._gathered = -1

    def continue_from(self, step: int, seed: int, place: dict[str, Any]) -> None:
        """Go on as the run that had done so many steps with this seed: with its random numbers, from its place."""
        self.steps_done, self.seed, self.place = step, seed, place
        for part in (self.part, *(runner.part for runner in self._runners.values())):
            part.seed = seed

    def close(self) -> None:
        """Leave the process groups that this trainer made; of servers and their workers, each other."""
        if self._part is not None:
            close(self._part, self.recorder)
        self.inputs.close()
        for sums in self._sums.values():
            sums.close()
        if self.server is not None:
            self.server.close()
        elif self.is_asynchronous and not self.is_server:
            say_goodbye(next(iter(self._runners.values())))
        for group in self.groups.values():
            if group is not None:
                dist.destroy_process_group(group)
        self.groups, self._sums = {}, {}

    # -- the measured timeline --------------------------------------------------------------------------------------

    def record(self, on: bool = True) -> None:
        """Note when every operation runs, from the next step on; all ranks call this, since they compare clocks."""
        if on and self.part.layout.observed and self._steps_here < WARM_UP_STEPS:
            why = f"DDP's buckets are those of the program only after {WARM_UP_STEPS} step(s)"
            raise RunError("recording the first step", why, "recording from the second step on")
        if on:
            self._recorded_from = self.steps_done
        keep_agendas(self.part, self.recorder, on)
        self.recorder.switch(on)

    def events(self, batch: int) -> list[Event]:
        """What was noted on this rank; steps count from the first that was recorded."""
        if self.server is not None:
            first = self._recorded_from
            self.recorder.rows = [row for row in self.server.rows if row[0] >= first]
            self.recorder.arrived = [row for row in self.server.arrivals if row[0] >= first]
        self.settle()
        first = min((row[0] for row in self.recorder.rows), default=0)
        return self.recorder.events(self.program(batch), self.rank, first)


def build(
    plan: Plan,
    workload: Workload,
    *,
    backend: str = "gloo",
    device: torch.device | str = "cpu",
    seed: int = 0,
    compiled: bool = False,
    model: nn.Module | None = None,
    verified: bool = True,
) -> Trainer:
    """A trainer for this rank, with the values that `workload.build()` under `seed` has, or those of `model`. Unless it
    is `verified` that its capture does what the model does, that is found out first."""
    untested = find_backend(backend).untested(plan.world)
    if untested and not (dist.is_initialized() and dist.get_rank()):
        print(untested, flush=True)  # first: what was never seen to work may hang
    if model is not None:
        agree(model, device)
    skeleton = Skeleton(workload.build)
    captured = capture(skeleton.model, workload.inputs(2, 0), workload.loss, device="cpu")
    if not verified:
        hold_against_eager(captured, workload, sum(p.nbytes for p in skeleton.model.parameters()))

    def values(names: set[str]) -> Mapping[str, Any]:
        return values_of(model) if model is not None else skeleton.materialise(names, seed, device)

    return Trainer(plan, workload, captured, values, backend=backend, device=device, seed=seed, compiled=compiled)
