"""What a run is told: a small file that the launcher writes and every rank reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainplan import files
from trainplan.errors import InputError
from trainplan.plan import text as plan_text
from trainplan.plan.plan import Plan


@dataclass(frozen=True)
class Job:
    """A run: what is trained, under which plan, for how long."""

    workload: str
    plan: dict[str, Any]
    batch: int
    steps: int
    out: str
    overrides: dict[str, Any] = field(default_factory=dict)  # of the workload
    backend: str = "gloo"
    device: str = "cpu"
    seed: int = 0
    warm_up: int = 2  # steps before the timeline is recorded
    compiled: bool = False
    verified: bool = False  # the model's capture was held against eager when it was profiled
    data: str = ""  # what workload.datasets.open_data takes; empty: a synthetic batch a step
    samples: int = 0  # of the data; 0: all
    resume: str = ""  # a checkpoint
    save_every: int = 0  # steps between checkpoints; 0: none
    reference: bool = True  # run the reference kernel between steps
    keep_state: bool = False  # leave weights and gradients in files, for `compare`
    double: bool = False  # compute in float64, for `compare`
    descent: bool = False  # step by SGD, for `compare` where float64 does not run
    places: tuple[int, ...] = ()  # which device of its machine each rank has; none: in their order
    again: str = ""  # the folder of a run whose order is repeated: of pushes to asynchronous servers, of decided sums

    def save(self) -> Path:
        path = Path(self.out) / "job.json"
        files.write(path, "job", files.to_json(self))
        return path

    @staticmethod
    def load(path: str | Path) -> Job:
        job = files.from_json(Job, files.read(path, "job"), f"job {path}")
        for name in ("batch", "steps"):
            if getattr(job, name) < 1:
                why = f"it is {getattr(job, name)}, and counts from 1"
                raise InputError(f"job {path}.{name}", why, files.made_by("job"))
        return job

    def the_plan(self) -> Plan:
        return plan_text.from_json(self.plan)
