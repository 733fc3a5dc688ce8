"""Starting a run on real processes: torchrun does it, and we gather what the ranks leave.

A failing rank stops all of them: torchrun ends the others as soon as one has gone, and the traceback of the first that
failed is the last thing that the user sees.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainplan import files
from trainplan.engine.faults import failure
from trainplan.engine.job import Job
from trainplan.errors import RunError
from trainplan.plan import text as plan_text
from trainplan.plan.plan import Plan
from trainplan.program.timeline import Event, Timeline

_PATIENCE = 8  # seconds for processes to end after they were asked to


@dataclass(frozen=True)
class RunResult:
    """What a run did."""

    out: str
    step_seconds: list[float]  # of the slowest rank, every step
    losses: list[float]
    peak_bytes: list[int]  # of every rank
    references: list[float]  # seconds of the reference kernel beside the recorded steps
    timeline: Timeline
    warm_up: int

    @property
    def steady_seconds(self) -> list[float]:
        """Step times after the warm-up."""
        return self.step_seconds[self.warm_up :]


def run(
    workload_text: str,
    plan: Plan,
    *,
    steps: int,
    batch: int,
    backend: str = "gloo",
    device: str = "cpu",
    out: str | Path | None = None,
    nnodes: str = "1",
    endpoint: str = "",
    show: bool = True,
    **fields: Any,
) -> RunResult:
    """Train under a plan on real processes, on this machine or (with `nnodes` and `endpoint`) on several."""
    folder = Path(out) if out else Path(tempfile.mkdtemp(prefix="trainplan-run-"))
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob("rank-*"):
        stale.unlink()
    job = Job(
        workload_text, plan_text.to_json(plan), batch, steps, str(folder.resolve()), backend=backend, device=device,
        **fields,
    )  # fmt: skip
    command = torchrun(job.save(), plan.world, nnodes, endpoint)
    code = _wait(command, folder, show)
    if code != 0:
        raise failure(folder, f"running {plan_text.text(plan)!r}", code)
    return gather(job, plan)


def torchrun(job: Path, world: int, nnodes: str = "1", endpoint: str = "") -> list[str]:
    """The command that starts the ranks of this machine."""
    nodes = int(nnodes.split(":")[0])
    if world % nodes:
        raise RunError(f"{world} ranks on {nodes} nodes", "every node must run as many", f"a divisor of {world}")
    place = ["--standalone"] if nnodes == "1" else ["--nnodes", nnodes, "--rdzv-backend", "c10d"]
    if nnodes != "1":
        if not endpoint:
            raise RunError(f"a run on {nnodes} nodes", "the nodes must know where to meet", "--endpoint HOST:PORT")
        place += ["--rdzv-endpoint", endpoint]
    return [
        sys.executable, "-m", "torch.distributed.run", *place, "--nproc-per-node", str(world // nodes), "-m",
        "trainplan.run", str(job),
    ]  # fmt: skip


def _wait(command: list[str], folder: Path, show: bool) -> int:
    """Run the command in a process group of its own; whatever happens here, none of its processes stays."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONUNBUFFERED": "1"}
    package = str(Path(__file__).parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH", "")]))
    with (folder / "torchrun.log").open("w") as log:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True, env=environment
        )
        try:
            assert process.stdout is not None
            for line in process.stdout:
                log.write(line)
                if show:
                    print(line, end="", flush=True)
            return process.wait()
        finally:
            _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    """End the process group, politely first."""
    for how, patience in ((signal.SIGTERM, _PATIENCE), (signal.SIGKILL, _PATIENCE)):
        if process.poll() is not None:
            break
        try:
            os.killpg(process.pid, how)
            process.wait(patience)
        except ProcessLookupError:
            break
        except subprocess.TimeoutExpired:
            continue
    try:  # workers that outlived torchrun
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def gather(job: Job, plan: Plan) -> RunResult:
    """Join what the ranks left to one result."""
    folder = Path(job.out)
    ranks = [files.read(folder / f"rank-{rank}.json", "rank") for rank in range(plan.world)]
    last = next(r for r in ranks if r["stage"] == plan.pp - 1 and r["replica"] == 0)
    result = RunResult(
        out=str(folder),
        step_seconds=[max(step) for step in zip(*(r["seconds"] for r in ranks), strict=True)],
        losses=[float(loss) for loss in last["losses"]],
        peak_bytes=[r["peak_bytes"] for r in ranks],
        references=[s for s in ranks[0]["references"] if s > 0],
        timeline=merge([[files.from_json(Event, e) for e in r["events"]] for r in ranks], plan),
        warm_up=job.warm_up,
    )
    result.timeline.save(folder / "timeline.json")
    return result


def merge(ranks: list[list[Event]], plan: Plan) -> Timeline:
    """One timeline from the events of all ranks, starting at zero.

    The end of a SEND is when its host was free again, not when the message had arrived: only the receiver knows that.
    """
    events = [event for rank in ranks for event in rank]
    begin = min((event.start for event in events), default=0.0)
    steps = 1 + max((int(event.name.rpartition("@")[2]) for event in events if "@" in event.name), default=0)
    moved = tuple(
        Event(e.name, e.kind, e.rank, e.start - begin, e.end - begin, e.bytes)
        for e in sorted(events, key=lambda e: (e.start, e.rank))
    )
    return Timeline("measured", len(ranks), steps, moved, plan_text.text(plan))
