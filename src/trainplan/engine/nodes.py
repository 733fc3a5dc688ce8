"""Several nodes that share nothing but a port: one job for all ranks, and all results on the node of rank 0.

Every node makes the job by itself, from the same command line. Before anything is trained the ranks hold their jobs
against each other; what the command line left open (where to cut) may have been chosen differently where profiles were
measured, so the plan is rank 0's. Afterwards rank 0 gets what all ranks measured and writes it into its own folder; the
other nodes keep their logs, and a note that says where the results are.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from trainplan import files
from trainplan.engine.job import Job
from trainplan.engine.measurement import Measurement, merge
from trainplan.engine.world import host_group
from trainplan.errors import RunError
from trainplan.plan import text as plan_text
from trainplan.plan.plan import Plan


@dataclass(frozen=True)
class Elsewhere:
    """Where the results of a run are, if not on this node."""

    host: str
    folder: str


def agree(job: Job) -> Job:
    """The job of all ranks, with this node's folder; all ranks call this."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return job
    jobs: list[dict[str, Any]] = _all(files.to_json(job))
    first = jobs[0]
    for rank, other in enumerate(jobs):
        unlike = [key for key in first if key not in ("plan", "out") and other[key] != first[key]]
        if unlike:
            ours, theirs = (", ".join(f"{key}={data[key]!r}" for key in unlike) for data in (first, other))
            why = f"the node of rank 0 has {ours}, and that of rank {rank} has {theirs}"
            raise RunError("a run on several nodes", why, "the same command on every node")
    if job.save_every and not _all_see(Path(job.out)):
        raise RunError(
            f"checkpoints every {job.save_every} steps on several nodes",
            "each node would keep only the stages of its own ranks: their folders are not one",
            "--out in a folder that all nodes share, or no --save-every",
        )
    agreed = dataclasses.replace(job, plan=first["plan"])
    if agreed.plan != job.plan and os.environ.get("LOCAL_RANK", "0") == "0":
        ours, theirs = (plan_text.text(j.the_plan()) for j in (job, agreed))
        print(f"the plan is that of rank 0, {theirs!r}, not {ours!r} as this node has chosen", flush=True)
    return agreed


def hand_over(measured: Measurement, plan: Plan, out: Path) -> None:
    """Bring what all ranks measured to rank 0, which writes it down; all ranks call this."""
    if plan.world == 1:
        _write([measured], plan, out)
        return
    first = dist.get_rank() == 0
    found: list[Any] | None = [None] * plan.world if first else None
    with host_group() as group:
        dist.gather_object(measured, found, dst=0, group=group)
    if found is not None:
        _write(found, plan, out)
    place = _all(Elsewhere(socket.gethostname(), str(out)))[0]
    if os.environ.get("LOCAL_RANK", "0") == "0" and not (out / "rank-0.json").exists():
        files.write(out / "elsewhere.json", "elsewhere", files.to_json(place))


def _write(ranks: list[Measurement], plan: Plan, out: Path) -> None:
    for row in ranks:
        files.write(out / f"rank-{row.rank}.json", "rank", files.to_json(row))
    merge(ranks, plan).save(out / "timeline.json")


def elsewhere(out: Path) -> Elsewhere | None:
    """Where the results of a run are, if this node's folder does not have them."""
    note = out / "elsewhere.json"
    return files.from_json(Elsewhere, files.read(note, "elsewhere")) if note.exists() else None


def _all(value: Any) -> list[Any]:
    """What every rank has, in rank order."""
    found: list[Any] = [None] * dist.get_world_size()
    with host_group() as group:
        dist.all_gather_object(found, value, group=group)
    return found


def _all_see(folder: Path) -> bool:
    """Whether this folder of ours is the same for all ranks: all see what rank 0 puts there."""
    name = _all(f".{uuid.uuid4()}")[0]
    if dist.get_rank() == 0:
        (folder / name).touch()
    _all(None)
    seen = all(_all((folder / name).exists()))
    if dist.get_rank() == 0:
        (folder / name).unlink()
    return seen
