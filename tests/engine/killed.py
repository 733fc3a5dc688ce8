"""A rank of a run, of which one worker is killed (or stalls) at some operation: run instead of `trainplan.run`.

VICTIM=1 AT=17 python -m tests.engine.killed JOB      rank 1 is killed before its 17th operation
VICTIM=3 AT=2 …                                       … before the second push that it applies, if it is a server
VICTIM=1 AT=17 STALL=0.5 UNTIL=0:2 …                  … or stops there until rank 0 has begun its step 2, and for half
                                                      a second more

PATIENCE=8: seconds that ranks wait for each other.

Before its end the victim writes what it came to, and how many of its pushes were answered, beside its job.
"""

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

from trainplan.engine import asynchronous, handlers, runner, worker
from trainplan.engine.inputs import Fed
from trainplan.engine.instructions import Instruction
from trainplan.program.ops import Kind

LAST_WORDS = "last-words.json"
_run, _step, _push = runner.Runner._run, runner.Runner.step, handlers.push
_apply = asynchronous.Server._apply
_count = 0
_answered = 0  # pushes whose weights have begun to come back


def _come_to_grief(running: runner.Runner, op: Instruction) -> None:
    global _count
    _count += 1
    if _count == int(os.environ["AT"]):
        if "STALL" not in os.environ:
            words = {"operation": running.program.name(op.op), "step": running.current.number, "answered": _answered}
            Path(sys.argv[1]).with_name(LAST_WORDS).write_text(json.dumps(words))
            os.kill(os.getpid(), signal.SIGKILL)
        other, step = os.environ["UNTIL"].split(":")
        limit = time.monotonic() + 60
        while not _sign(other, int(step)).exists() and time.monotonic() < limit:
            time.sleep(0.01)
        time.sleep(float(os.environ["STALL"]))


def _sign(rank: str, step: int) -> Path:
    """What a rank that is not the victim leaves when it begins a step."""
    return Path(sys.argv[1]).with_name(f"begun-{rank}-{step}")


def step(self: runner.Runner, number: int, fed: Fed) -> runner.StepState:
    _sign(os.environ["RANK"], number).touch()
    return _step(self, number, fed)


def run(self: runner.Runner, place: int, state: runner.StepState) -> int:
    global _answered
    op = self.list[place]
    _come_to_grief(self, op)
    taken = _run(self, place, state)
    if op.kind is Kind.RECV_W:
        _answered = state.number + 1
    return taken


def push(running: runner.Runner, op: Instruction, place: int) -> None:
    """Pushes go out during backward, which is one call."""
    _come_to_grief(running, op)
    _push(running, op, place)


def apply(self: asynchronous.Server, arrived: asynchronous._Arrived) -> None:
    global _count
    _count += 1
    if _count == int(os.environ["AT"]):
        os.kill(os.getpid(), signal.SIGKILL)
    _apply(self, arrived)


if __name__ == "__main__":
    if os.environ["RANK"] == os.environ["VICTIM"]:
        runner.Runner._run, handlers.push = run, push  # type: ignore[method-assign]
        asynchronous.Server._apply = apply  # type: ignore[method-assign]
    elif "UNTIL" in os.environ:
        runner.Runner.step = step  # type: ignore[method-assign]
    if "PATIENCE" in os.environ:
        worker.TIMEOUT = asynchronous.TIMEOUT = timedelta(seconds=float(os.environ["PATIENCE"]))
    worker.main()
