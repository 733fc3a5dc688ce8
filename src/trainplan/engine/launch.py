"""Starting a run on real processes: torchrun does it, and we gather what the ranks leave.

A failing rank stops all of them: torchrun ends the others as soon as one has gone, and the traceback of the first that
failed is the last thing that the user sees.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainplan import files
from trainplan.engine.agendas import check_again
from trainplan.engine.checkpoint_servers import refuse_asynchronous
from trainplan.engine.endpoint import check
from trainplan.engine.faults import failure
from trainplan.engine.independent import refuse, run_each
from trainplan.engine.job import Job
from trainplan.engine.measurement import Measurement, RunResult, one_by_one, together
from trainplan.engine.nodes import Elsewhere, elsewhere
from trainplan.errors import InputError, RunError, TrainplanError
from trainplan.plan import text as plan_text
from trainplan.plan.plan import Plan
from trainplan.plan.served import ASYNCHRONOUS

LOOKED_AT = 16  # samples of data, from all over it, that are read before ranks are started
_PATIENCE = 8  # seconds for processes to end after they were asked to


def run(workload_text: str, plan: Plan, **fields: Any) -> RunResult:
    """Train under a plan on real processes of this machine; the arguments are those of `start`."""
    result = start(workload_text, plan, **fields)
    assert isinstance(result, RunResult)  # there is no other node that could have it
    return result


def start(
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
    max_restarts: int = 0,
    show: bool = True,
    **fields: Any,
) -> RunResult | Elsewhere:
    """Train under a plan on real processes, on this machine or (with `nnodes` and `endpoint`) on several.

    On several, each starts its own ranks, and the results are gathered on one: the others get to know which.
    """
    _meeting(plan.world, nnodes, endpoint, max_restarts)
    check_request(out, **fields)
    if fields.get("save_every") or fields.get("resume"):
        refuse_asynchronous(plan)
    check_again(plan, fields.get("again", ""), steps, out, nnodes, bool(fields.get("resume")))
    check_data(workload_text, batch, **fields)
    folder = fresh(out)
    job = Job(
        workload_text, plan_text.to_json(plan), batch, steps, str(folder.resolve()), backend=backend, device=device,
        **fields,
    )  # fmt: skip
    if plan.exchange in ASYNCHRONOUS:
        refuse(plan, nnodes, max_restarts)
        lost = run_each(job.save(), plan, folder / "ranks.log", environment(), show)
        return gather(job, plan, lost)
    command = torchrun(job.save(), plan.world, nnodes, endpoint, max_restarts)
    if nnodes != "1":
        check(endpoint)
    # Several nodes may share the folder, and all their torchruns have something to say.
    log = folder / ("torchrun.log" if nnodes == "1" else f"torchrun-{socket.gethostname()}-{os.getpid()}.log")
    code = _wait(command, log, show)
    if code != 0:
        raise failure(folder, f"running {plan_text.brief(plan)!r}", code, log)
    return elsewhere(folder) or gather(job, plan)


def fresh(out: str | Path | None) -> Path:
    """The folder of a run, without what an earlier one has left there."""
    folder = Path(out) if out else Path(tempfile.mkdtemp(prefix="trainplan-run-"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out {folder}", f"it cannot be made ({error.strerror})", "--out trainplan-run") from None
    # Ranks start when all nodes are there, so nothing of this run is removed, also where nodes share the folder.
    for stale in (
        path for name in ("rank-*", "arrivals-*", "agendas-*", "elsewhere.json") for path in folder.glob(name)
    ):
        stale.unlink(missing_ok=True)
    return folder


# What is known to fail is refused before a process is started or a folder made.


def check_request(
    out: str | Path | None = None, resume: str = "", samples: int = 0, save_every: int = 0, steps: int = 1,
    timed_steps: int = 1, data: str = "", **_: Any,
) -> None:  # fmt: skip
    """Refuse what cannot be: a folder that is a file, a checkpoint that is not there, no steps, numbers below zero."""
    for option, value in (("--steps", steps), ("--timed-steps", timed_steps)):
        if value < 1:
            raise InputError(f"{option} {value}", "there is at least one", f"{option} 3")
    for option, value in (("--samples", samples), ("--save-every", save_every)):
        if value < 0:
            raise InputError(f"{option} {value}", "it counts something", f"{option} {-value}, or leaving it out")
    if samples and not data:
        why = "they are of a data set, and without one batches are made up, as many as there are steps"
        raise InputError(f"--samples {samples}", why, f"--data memory --samples {samples}, or leaving it out")
    if out:
        path = Path(out)
        found = next(place for place in (path, *path.parents) if place.exists())
        if not found.is_dir():
            raise InputError(f"--out {out}", f"{found} is a file, and a run needs a folder", "--out trainplan-run")
        if not os.access(found, os.W_OK):
            raise InputError(f"--out {out}", f"nothing can be written into {found}", "--out trainplan-run")
    if resume:
        from trainplan.engine.checkpoint_folder import read_about

        path = Path(resume)
        # Whoever was killed between the two renames of a save left the checkpoint here; rank 0 puts it back.
        if path.exists() or not path.with_name(f".{path.name}.old").exists():
            read_about(path)


def check_data(
    workload_text: str, batch: int, data: str = "", samples: int = 0, seed: int = 0,
    overrides: dict[str, Any] | None = None, **_: Any,
) -> None:  # fmt: skip
    """Refuse data that cannot be read, of which there is less than a batch, or which is not for this model."""
    if not data:
        return
    from trainplan.workload.datasets import open_data
    from trainplan.workload.load import load

    opened = open_data(data, load(workload_text, **(overrides or {})), samples=samples, seed=seed)
    found = len(opened)
    if found < batch:
        why = f"it has {found:,} samples, and a batch has {batch:,}"
        raise InputError(f"--data {data}", why, f"--batch {found}" if found else "data with samples in it")
    for index in range(0, found, -(-found // LOOKED_AT)):
        try:
            opened.fetch([index], 0, seed)
        except TrainplanError as error:
            raise InputError(f"--data {data}", f"{error.asked}: {error.why}", error.instead) from None
        except Exception:
            return  # of a function of the user's: the ranks show its traceback


def _meeting(world: int, nnodes: str, endpoint: str, max_restarts: int) -> list[str]:
    """The options that tell torchrun which ranks meet where."""
    first = nnodes.split(":")[0]
    if not first.isdigit() or first == "0":
        raise RunError(f"--nnodes {nnodes}", "it is the number of machines", "--nnodes 2")
    nodes = int(first)
    if world % nodes:
        raise RunError(f"{world} ranks on {nodes} nodes", "every node must run as many", f"a divisor of {world}")
    if max_restarts < 0:
        raise RunError(f"{max_restarts} restarts", "a run can be started again 0 times or more", "--max-restarts 0")
    place = ["--standalone"] if nnodes == "1" else ["--nnodes", nnodes, "--rdzv-backend", "c10d"]
    if nnodes != "1":
        if not endpoint:
            raise RunError(f"a run on {nnodes} nodes", "the nodes must know where to meet", "--endpoint HOST:PORT")
        place += ["--rdzv-endpoint", endpoint]
    place += ["--max-restarts", str(max_restarts)] if max_restarts else []
    return [*place, "--nproc-per-node", str(world // nodes)]


def torchrun(job: Path, world: int, nnodes: str = "1", endpoint: str = "", max_restarts: int = 0) -> list[str]:
    """The command that starts the ranks of this machine, and starts them again should one fail (`attempt.py`)."""
    place = _meeting(world, nnodes, endpoint, max_restarts)
    return [sys.executable, "-m", "torch.distributed.run", *place, "-m", "trainplan.run", str(job)]


def environment() -> dict[str, str]:
    """What ranks find in theirs."""
    found = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONUNBUFFERED": "1"}
    package = str(Path(__file__).parents[2])
    found["PYTHONPATH"] = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH", "")]))
    return found


@contextmanager
def for_torchrun() -> Iterator[dict[str, str]]:
    """The environment of a torchrun: it makes a folder for files of its own, and would leave it behind."""
    with tempfile.TemporaryDirectory(prefix="trainplan-torchrun-", ignore_cleanup_errors=True) as folder:
        yield {"PET_LOG_DIR": folder, **environment()}


def _wait(command: list[str], said: Path, show: bool) -> int:
    """Run the command in a process group of its own; whatever happens here, none of its processes stays."""
    with said.open("w") as log, for_torchrun() as own:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True, env=own
        )
        try:
            assert process.stdout is not None
            for line in process.stdout:
                log.write(line)
                if show:
                    print(line, end="", flush=True)
            return process.wait()
        finally:
            end(process)


def end(process: subprocess.Popen[str]) -> None:
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


def gather(job: Job, plan: Plan, lost: Sequence[int] = ()) -> RunResult:
    """What rank 0 has left of all ranks, as one result; of ranks that go on without each other, what each has left."""
    folder = Path(job.out)
    there = [rank for rank in range(plan.world) if rank not in lost]
    ranks = [files.from_json(Measurement, files.read(folder / f"rank-{r}.json", "rank")) for r in there]
    if plan.exchange in ASYNCHRONOUS:
        result = one_by_one(ranks, plan, job.batch, job.warm_up, str(folder), list(lost))
        result.timeline.save(folder / "timeline.json")
        return result
    return together(ranks, plan, job.warm_up, str(folder))
