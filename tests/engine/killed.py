"""A rank of a run, of which one worker is killed (or stalls) at some operation: run instead of `trainplan.run`.

VICTIM=1 AT=17 python -m tests.engine.killed JOB      rank 1 is killed before its 17th operation
VICTIM=1 AT=17 STALL=0.5 …                            … or stops there for half a second
"""

import os
import signal
import time
from typing import Any

from trainplan.engine import handlers, runner, worker

_run, _push = runner.Runner._run, handlers.push
_count = 0


def _come_to_grief() -> None:
    global _count
    _count += 1
    if _count == int(os.environ["AT"]):
        if "STALL" not in os.environ:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(float(os.environ["STALL"]))


def run(self: runner.Runner, place: int, state: runner.StepState) -> int:
    _come_to_grief()
    return _run(self, place, state)


def push(*arguments: Any) -> None:
    """Pushes go out during backward, which is one call."""
    _come_to_grief()
    _push(*arguments)


if __name__ == "__main__":
    if os.environ["RANK"] == os.environ["VICTIM"]:
        runner.Runner._run, handlers.push = run, push  # type: ignore[method-assign]
    worker.main()
