"""One rank of `trainplan run`, from its job file to its results.

Every rank writes into its node's folder: `rank-N.log` (what it printed), and, should it fail, `rank-N.error` with its
traceback. What the ranks measured ends up on the node of rank 0, as `rank-N.json` (`nodes.py`).
"""

from __future__ import annotations

import dataclasses
import math
import os
import shlex
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist

from trainplan import files, units
from trainplan.engine import agendas, checkpoint
from trainplan.engine.asynchronous import load as recorded
from trainplan.engine.attempt import Begun, attempt, begun, keep_steps, kept_steps
from trainplan.engine.exactness import by_descent, in_double
from trainplan.engine.faults import is_lost
from trainplan.engine.feed import batches
from trainplan.engine.held import Held
from trainplan.engine.job import Job
from trainplan.engine.measurement import Measurement, known_loss, measure, peak_bytes
from trainplan.engine.nodes import agree, hand_over
from trainplan.engine.recorder import now
from trainplan.engine.trainer import StepResult, Trainer, build
from trainplan.engine.world import TIMEOUT, join, leave, ready, tell, told
from trainplan.errors import InputError, TrainplanError
from trainplan.plan.decided import DECIDED
from trainplan.plan.plan import Plan
from trainplan.plan.rules import of_replicas
from trainplan.plan.served import ASYNCHRONOUS
from trainplan.profile.machine import keep_memory
from trainplan.profile.reference import Reference
from trainplan.workload.user import own_frames
from trainplan.workload.workload import Workload

# A rank that lost another waits so long before it ends, so that torchrun sees the other first (and then ends us).
_AFTER_YOU = 5.0
_LONGER = timedelta(seconds=30)  # that workers of asynchronous servers wait
_WITHOUT_END = timedelta(days=365)


def main(arguments: list[str] | None = None) -> None:
    """Run the job whose file is the only argument."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if len(arguments) != 1:
        sys.exit(
            f"usage: torchrun --nproc-per-node N -m trainplan.run FOLDER/job.json ({files.MADE_BY['job']} writes it)"
        )
    try:
        job = _job(arguments[0])
    except TrainplanError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    rank = os.environ.get("RANK", "0")
    out = Path(job.out)
    out.mkdir(parents=True, exist_ok=True)
    for stale in ("error", "lost"):  # of the attempt before this one; the log has it still
        (out / f"rank-{rank}.{stale}").unlink(missing_ok=True)
    with (out / f"rank-{rank}.log").open("a" if attempt() else "w", buffering=1) as log:
        plain = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = _Tee(sys.stdout, log), _Tee(sys.stderr, log)
        try:
            _run(job, out)
        except BaseException as error:
            text = _told(error)
            lost = is_lost(error)
            files.write_text(out / f"rank-{rank}.{'lost' if lost else 'error'}", text)
            _pass_on(text, lost, out)
            print(text, file=sys.stderr)
            log.flush()
            if lost:
                time.sleep(_AFTER_YOU)
            # At once: the others may wait for us in a collective, and leaving the group would wait for them.
            os._exit(2 if isinstance(error, TrainplanError) else 1)
        finally:
            sys.stdout, sys.stderr = plain


def _job(path: str) -> Job:
    """The job of a file; whoever names a model here is told what makes one."""
    if not path.endswith(".json"):
        line = files.MADE_BY["job"].replace("MODEL", shlex.quote(path))
        why = "it is not a job file, and that is what torchrun starts ranks with"
        raise InputError(path, why, f"{line}, which writes FOLDER/job.json and says how to start it")
    return Job.load(path)


def _told(error: BaseException) -> str:
    """What a rank says that fails: its traceback, or the sentence of an error of ours; and where the user's own code
    raised what led to that, its traceback after it."""
    if not isinstance(error, TrainplanError):
        return "".join(traceback.format_exception(error))
    text, cause = f"error: {error}\n", error.__cause__ or error.__context__
    while isinstance(cause, TrainplanError):
        cause = cause.__cause__ or cause.__context__
    if cause is None or not own_frames(cause):
        return text
    return text + "".join(traceback.format_exception(type(cause), cause, cause.__traceback__, chain=False))


def _pass_on(text: str, lost: bool, out: Path) -> None:
    """Tell the other nodes why this rank fails; or, if it only lost another, keep what that one has said."""
    if not lost:
        tell(text)
        return
    found = told()
    if found is not None:
        rank, host, reason = found
        path = out / f"rank-{rank}.error"
        if not path.exists():
            files.write_text(path, f"on {host}: {reason}")


class _Tee:
    """Prints to two places."""

    def __init__(self, *streams: IO[str]) -> None:
        self._streams = streams

    def write(self, text: str) -> int:
        for stream in self._streams:
            stream.write(text)
        return len(text)

    def flush(self) -> None:
        for stream in self._streams:
            stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._streams[0], name)


def _run(job: Job, out: Path) -> None:
    from trainplan.workload.load import load

    device = _device(job)
    plan = job.the_plan()
    if plan.world > 1:
        join(job.backend, _patience(plan))
        job = agree(job)
        plan = job.the_plan()
    workload = load(job.workload, **job.overrides)
    if job.double:
        workload = in_double(workload)
    if job.descent:
        workload = by_descent(workload)
    trainer = build(
        plan, workload, backend=job.backend, device=device, seed=job.seed, compiled=job.compiled, verified=job.verified
    )
    if trainer.is_server and job.again:
        trainer.record_again = recorded(Path(job.again) / f"arrivals-{trainer.rank - plan.workers}.json")
    start = _resume(trainer, job, out)
    gradients = gradients_kept(trainer) if job.keep_state and not trainer.is_asynchronous else []
    if job.again and plan.exchange in DECIDED:
        agendas.follow(trainer, job.again, start.step + job.steps)
    first = agendas.begin(trainer)
    if trainer.is_asynchronous:
        ready()
    measured = _train(trainer, job, out, start)
    agendas.save(trainer, first, out)
    if trainer.is_asynchronous:
        _leave_alone(trainer, measured, job, out)
        return
    hand_over(measured, plan, out)
    if job.keep_state:
        torch.save({**_state(trainer), "gradients": gradients}, out / f"rank-{trainer.rank}.pt")
    if plan.world > 1:
        dist.barrier()
        leave()


def _patience(plan: Plan) -> timedelta:
    """How long this rank waits for a message. An asynchronous server decides itself when it gives up a worker, and does
    so before those that must not go on without that worker (`ssp`) give up the server."""
    if plan.exchange not in ASYNCHRONOUS:
        return TIMEOUT
    return TIMEOUT + _LONGER if int(os.environ.get("RANK", "0")) < plan.workers else _WITHOUT_END


def _leave_alone(trainer: Trainer, measured: Measurement, job: Job, out: Path) -> None:
    """Write down what this rank has, and go: the others may not be there any longer, or not yet be through."""
    trainer.close()
    if trainer.server is not None:
        trainer.server.save(out / f"arrivals-{trainer.rank - trainer.plan.workers}.json")
    files.write(out / f"rank-{trainer.rank}.json", "rank", files.to_json(measured))
    if job.keep_state:
        torch.save(_state(trainer), out / f"rank-{trainer.rank}.pt")
    leave()
    # A thread may still wait for a message of a worker that is gone. An interpreter that ends may stop such a thread
    # within C++, which aborts the process: so the process ends at once, and the interpreter does not.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _resume(trainer: Trainer, job: Job, out: Path) -> Begun:
    """Take what there is to go on from: of an earlier attempt, or the checkpoint that was asked for."""
    before = begun(out)
    source = (before.checkpoint(out) if before else None) or job.resume
    if source:
        trainer.load(source)
    start = before or Begun.at(trainer.steps_done)
    if trainer.rank == 0:
        if before is None:
            start.save(out)
        else:
            print(f"attempt {attempt() + 1}, from {source or 'the beginning'}", flush=True)
        if trainer.seed != job.seed:
            print(f"seed {trainer.seed}, which is that of the checkpoint", flush=True)
    return start


def _device(job: Job) -> torch.device:
    keep_memory()  # which slices of a GPU exchange things through, too
    if job.device == "cpu":
        torch.set_num_threads(1)  # a worker is a core
        return torch.device("cpu")
    local = int(os.environ.get("LOCAL_RANK", "0"))
    local = job.places[local] if job.places else local
    device = torch.device(job.device, local % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _train(trainer: Trainer, job: Job, out: Path, start: Begun) -> Measurement:
    """Train to the end of the run; what this rank knows of all its steps."""
    # Where workers go on without each other, another may yet have to speak for the first (`independent.py`).
    speaks = (trainer.replica == 0 or trainer.is_asynchronous) and trainer.part.is_last
    first, last = trainer.steps_done, start.step + job.steps
    steps = kept_steps(out, trainer.rank, start, first)
    earlier, started = tuple(steps), now()

    def after(result: StepResult) -> None:
        steps.append(result)
        if speaks:
            done, memory = trainer.steps_done - first, peak_bytes(trainer.device)
            shown = dataclasses.replace(result, loss=own_loss(result, trainer))
            _say(shown, trainer.rank, trainer.workload, memory, last, started, done, last - first)
            if trainer.replica == 0 and not _finite(result) and all(map(_finite, steps[:-1])):
                _warn(result)
        if job.save_every and trainer.steps_done % job.save_every == 0:
            keep_steps(out, trainer.rank, steps)  # before: where there is a checkpoint, every rank has kept them
            checkpoint.save(trainer, out / f"checkpoint-{trainer.steps_done}")

    # The reference kernel would have ranks wait for each other.
    reference = Reference(trainer.device) if job.reference and not trainer.is_asynchronous else None
    source = batches(trainer, job, last - first)
    measured = measure(trainer, source, warm_up=job.warm_up, reference=reference, after=after)
    return dataclasses.replace(
        measured,
        seconds=(*(step.seconds for step in earlier), *measured.seconds),
        losses=(*(step.loss for step in earlier), *measured.losses),
    )


def own_loss(result: StepResult, trainer: Trainer) -> float | None:
    """The loss of a step. Workers of asynchronous servers have no steps in common, so of each it is that of its own
    samples, and what it adds to the loss of a batch is their share of that."""
    if result.loss is None or not trainer.is_asynchronous:
        return result.loss
    return result.loss * result.samples / of_replicas(trainer.plan, result.samples)[trainer.replica]


def _say(
    result: StepResult, rank: int, workload: Workload, memory: int, last: int, started: float, done: int, steps: int
) -> None:
    """A line of the log. Its seconds are this rank's own; the result of a run has those of each step's slowest rank."""
    left = (now() - started) / done * (steps - done)
    print(
        f"step {result.step + 1}/{last}  loss {result.loss:.4f}  {units.seconds(result.seconds)} on rank {rank}  "
        f"{result.samples / result.seconds:,.1f} {workload.sample}s/s  "
        f"memory {units.gib(memory)}  "
        f"eta {units.seconds(left)}",
        flush=True,
    )


def _finite(result: StepResult) -> bool:
    return math.isfinite(known_loss(result.loss))


def _warn(result: StepResult) -> None:
    """Say once where it went wrong: the lines after it look like those before."""
    print(
        f"warning: the loss of step {result.step + 1} is {result.loss}, the first that is no finite number; training "
        "goes on. A smaller lr or clip_norm=1 may keep it finite",
        flush=True,
    )


def _state(trainer: Trainer) -> dict[str, Any]:
    from trainplan.engine.oracle import optimizer_state

    copies, shard = list(trainer.part.held.values()), trainer.part.shard
    first = [held for held in copies if held.is_first_copy]
    state: dict[str, Any] = {}
    for held in copies:
        state |= whole_state(held)
    if shard is not None:
        state = optimizer_state(shard.optimizer, shard.parameters)
    trainer.gather()
    return {
        "weights": {name: p.detach().cpu() for name, p in trainer.parameters.items()} if trainer.is_current else {},
        # Running statistics are those of the first copy of a stage.
        "buffers": {name: b.detach().cpu() for held in first for name, b in held.stage.named_buffers()},
        "state": state,
    }


def whole_state(held: Held) -> dict[str, dict[str, torch.Tensor]]:
    """The tensors that an optimizer keeps of the weights of a stage; all who share these out call this."""
    from trainplan.engine.oracle import optimizer_state

    found = optimizer_state(held.optimizer, held.stepped)
    if held.shards is not None:
        for unit in range(len(held.shards.units)):
            for name, entries in held.shards.whole_state(unit, held.optimizer.state).items():
                found[name] = {key: value for key, value in entries.items() if isinstance(value, torch.Tensor)}
    return {name: entries for name, entries in found.items() if entries}


def gradients_kept(trainer: Trainer) -> list[dict[str, torch.Tensor]]:
    """A list that gets the gradients of every step, as they are when its optimizer runs."""
    kept: list[dict[str, torch.Tensor]] = []
    if trainer.part.shard is not None:
        trainer.part.shard.kept = kept
    crosses = trainer.part.layout.crosses
    for place, held in enumerate(trainer.part.held.values()):
        shards = held.shards
        whole = {n: p for n, p in held.parameters.items() if shards is None or n not in shards.names}

        def before(
            *_: Any, place: int = place, parameters: dict[str, torch.nn.Parameter] = whole, shards: Any = shards
        ) -> None:
            found = {n: p.grad.detach().cpu().clone() for n, p in parameters.items() if p.grad is not None}
            # The stages of a rank step one after the other, and where steps cross, blocks do.
            if not place and not (crosses and kept and kept[-1].keys().isdisjoint(found)):
                kept.append({})
            kept[-1] |= found
            if shards is not None:
                kept[-1] |= {name: gradient.cpu() for name, gradient in shards.whole_gradients().items()}

        held.optimizer.register_step_pre_hook(before)
    return kept
