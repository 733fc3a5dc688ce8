"""Training that goes on when workers come or go: one attempt after the other, each under a plan for those there are.

An attempt is a torchrun of its own, so ranks meet in a store that no earlier one has written to. It ends

* because it is through;
* because a worker has gone: a rank was killed, or ended without a word. Those that are left get a plan of their own.
  Each loss leaves fewer, so between two changes that somebody asked for there are at most as many as `Bounds` allows;
* because a rank raised. That is no matter of workers: the same ones try again as often as `max_restarts` says, and the
  traceback is shown;
* because somebody asked for another number of workers (`workers.py`). The plan for them is found while training goes
  on, which then stops at the next checkpoint, or when `PATIENCE` is over. Where no other plan is worth it, nothing
  stops.

The next attempt goes on from the newest checkpoint of the run, under whatever plan that was saved, at its step, with
its random numbers and from its place in the data. What an attempt leaves is kept in `attempt-N`, beside the next.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Generic, Protocol, TypeVar

from trainplan import files
from trainplan.engine.checkpoint_folder import latest, put_back, read_about
from trainplan.engine.faults import failure, gone
from trainplan.engine.job import Job
from trainplan.engine.launch import end, for_torchrun, gather, torchrun
from trainplan.engine.measurement import RunResult, known_loss
from trainplan.engine.trainer import StepResult
from trainplan.engine.workers import Workers
from trainplan.errors import PlanError, RunError
from trainplan.plan import text as plan_text
from trainplan.plan.plan import Plan

LOOK = 0.1  # seconds between looks at what there is to see
PATIENCE = 60.0  # seconds that a change which was asked for waits for the next checkpoint
_LISTEN = 10.0  # seconds for what ended ranks have said to be read
_STEP = re.compile(r"step (\d+)/\d+ ")


@dataclass(frozen=True)
class Change:
    """Workers that have changed, while a plan was running."""

    plan: Plan
    was: tuple[int, ...]  # the devices that had a worker
    now: tuple[int, ...]
    steps_lost: int  # since the last checkpoint
    restart_s: float  # that starting took the last time


class Answer(Protocol):
    """What is to be done when workers have changed; in words, why."""

    @property
    def plan(self) -> Plan: ...

    @property
    def is_other(self) -> bool:
        """Whether it is worth starting again, where nobody has gone."""
        ...


A = TypeVar("A", bound=Answer)


@dataclass
class _Seen:
    """What is known of an attempt that is running, from what its ranks print."""

    started: float
    begun: float = 0.0  # when the first step was over
    step: int = 0  # the last that was over

    def note(self, line: str) -> None:
        if found := _STEP.match(line):
            self.begun, self.step = self.begun or time.monotonic(), int(found[1])

    @property
    def start_s(self) -> float:
        return self.begun - self.started if self.begun else 0.0


def train(
    job: Job, workers: Workers, replan: Callable[[Change], A], *, max_restarts: int = 0, show: bool = True
) -> tuple[RunResult, list[A]]:
    """Train to the end of a job, whoever comes or goes; and what has changed meanwhile."""
    training = _Training(job, workers, replan, max_restarts, show)
    return training.run(), training.changes


class _Training(Generic[A]):
    def __init__(
        self, job: Job, workers: Workers, replan: Callable[[Change], A], max_restarts: int, show: bool
    ) -> None:
        self.job, self.workers, self.replan = job, workers, replan
        self.changes: list[A] = []
        self.restarts_left, self.show = max_restarts, show
        self.folder, self.number = Path(job.out), 1
        for stale in self.folder.glob("attempt-*"):  # of an earlier run
            if re.fullmatch(r"attempt-\d+", stale.name):
                shutil.rmtree(stale)
        self.since = workers.begin(self.folder)
        self.first_resume = job.resume
        if job.resume:
            put_back(Path(job.resume))
        self.began = read_about(Path(job.resume)).step if job.resume else 0
        self.last = self.began + job.steps
        self.earlier: list[StepResult] = []
        self.seen = _Seen(time.monotonic())
        self.start_s = 0.0

    def run(self) -> RunResult:
        while True:
            plan = self.job.the_plan()
            self.job = dataclasses.replace(self.job, places=self.workers.places[: plan.world])
            code, planned = self._attempt(plan)
            self.start_s = self.seen.start_s or self.start_s
            if code == 0:
                break
            if planned is not None:
                self.workers.become(planned[1])
                self._go_on(self._changed(planned[0]))
            else:
                self._go_on(self._after_failure(plan, code))
        found = gather(self.job, plan)
        return dataclasses.replace(
            found,
            step_seconds=[*(step.seconds for step in self.earlier), *found.step_seconds],
            losses=[*(known_loss(step.loss) for step in self.earlier), *found.losses],
            warm_up=len(self.earlier) + found.warm_up,
        )

    def _changed(self, answer: A) -> Plan:
        self.changes.append(answer)
        return answer.plan

    # -- one attempt ------------------------------------------------------------------------------------------------

    def _attempt(self, plan: Plan) -> tuple[int, tuple[A, tuple[int, ...]] | None]:
        """The code that torchrun ended with; and the change for which it was ended, with its devices, if it was."""
        self.seen = _Seen(time.monotonic())
        with self._log.open("w") as log, for_torchrun() as own:
            process = subprocess.Popen(
                torchrun(self.job.save(), plan.world), stdout=subprocess.PIPE, stderr=log, text=True,
                start_new_session=True, env=own,
            )  # fmt: skip
            assert process.stdout is not None
            listener = threading.Thread(target=self._listen, args=(process.stdout, log), daemon=True)
            listener.start()
            try:
                planned = self._watch(process, plan)
            finally:
                end(process)
                listener.join(_LISTEN)
        if planned is not None and process.returncode == 0:  # it was through before it could be ended
            planned = None
        return process.returncode, planned

    @property
    def _log(self) -> Path:
        return self.folder / "torchrun.log"

    def _listen(self, said: IO[str], log: IO[str]) -> None:
        for line in said:
            log.write(line)
            self.seen.note(line)
            if self.show:
                print(line, end="", flush=True)

    def _watch(self, process: subprocess.Popen[str], plan: Plan) -> tuple[A, tuple[int, ...]] | None:
        """Wait for the end of an attempt, or for the moment to end it."""
        planned: tuple[A, tuple[int, ...]] | None = None
        wanted, until, saved = 0, 0.0, self._checkpoint()
        while process.poll() is None:
            asked = self.workers.asked() or 0
            if asked != wanted:  # also where somebody has thought better of it
                wanted, planned = asked, self._planned(plan, asked) if asked else None
                until, saved = time.monotonic() + PATIENCE, self._checkpoint()
            if planned is not None and (self._checkpoint() != saved or time.monotonic() > until):
                return planned
            time.sleep(LOOK)
        return None

    def _planned(self, plan: Plan, count: int) -> tuple[A, tuple[int, ...]] | None:
        """The plan for another number of workers, if it is worth ending this attempt."""
        places = self.workers.with_count(count)
        print(f"{count} workers are asked for, instead of {self.workers.count}", flush=True)
        try:
            # It stops at a checkpoint, so no step is trained again.
            answer = self.replan(Change(plan, self.workers.places, places, 0, self.seen.start_s or self.start_s))
        except (PlanError, RunError) as error:
            print(f"{error}\nso they stay {self.workers.count}", flush=True)
            self.workers.become(self.workers.places)
            return None
        print(answer, flush=True)
        if answer.is_other:
            return answer, places
        print(f"{plan_text.title(plan)} goes on: no other plan is worth starting again", flush=True)
        self.workers.become(places)
        return None

    # -- between attempts -------------------------------------------------------------------------------------------

    def _after_failure(self, plan: Plan, code: int) -> Plan:
        """Say what has happened; the plan to go on with."""
        error = failure(self.folder, f"running {plan_text.brief(plan)!r}", code, self._log)
        lost = gone(self.folder, self._log)
        if not lost:
            if not self.restarts_left:
                raise error
            self.restarts_left -= 1
            print(f"{error.asked}: {error.why}\nno worker has gone: the same ones try again", flush=True)
            return plan
        was, saved = self.workers.places, self._checkpoint()
        print(f"{error.asked}: {error.why}", flush=True)  # and no advice: it goes on
        least = f"{max(1, len(was) - len(lost))}:{self.workers.bounds.most}"
        again = f"--elastic {least}" + (f" --resume {saved}" if saved is not None else "")
        self.workers.lose(lost, error.why.partition(";")[0], again)
        steps = max(0, self.seen.step - self._step(saved))
        answer = self.replan(Change(plan, was, self.workers.places, steps, self.seen.start_s or self.start_s))
        print(answer, flush=True)
        return self._changed(answer)

    def _checkpoint(self) -> Path | None:
        """The newest that this run has left."""
        return latest(self.folder, since=self.since)

    def _step(self, saved: Path | None) -> int:
        return read_about(saved).step if saved is not None else self.began

    def _go_on(self, plan: Plan) -> None:
        """Put away what the attempt has left, and make the job of the next."""
        saved = self._checkpoint()
        step = self._step(saved)
        first = self.began + len(self.earlier)
        self.earlier += [row for row in _steps(self.folder) if first <= row.step < step]
        away = self.folder / f"attempt-{self.number}"
        away.mkdir(exist_ok=True)
        for path in (*self.folder.glob("rank-*"), self._log, self.folder / "job.json"):
            if path.exists():
                os.replace(path, away / path.name)
        self.number += 1
        resume = str(saved) if saved is not None else self.first_resume
        print(
            f"attempt {self.number}: {plan_text.brief(plan)}, after step {step} from {resume or 'the beginning'}; "
            f"what the one before has left is in {away}",
            flush=True,
        )
        data = plan_text.to_json(plan)
        self.job = dataclasses.replace(self.job, plan=data, steps=self.last - step, resume=resume)


def _steps(folder: Path) -> list[StepResult]:
    """The steps that the ranks of an attempt kept with its last checkpoint: each as long as on its slowest rank."""
    by_step: dict[int, list[StepResult]] = {}
    for path in sorted(folder.glob("rank-*.steps")):
        for row in files.read(path, "steps"):
            kept = files.from_json(StepResult, row)
            by_step.setdefault(kept.step, []).append(kept)
    return [
        StepResult(
            step,
            next((row.loss for row in rows if row.loss is not None), None),
            max(row.seconds for row in rows),
            rows[0].samples,
        )
        for step, rows in sorted(by_step.items())
    ]
