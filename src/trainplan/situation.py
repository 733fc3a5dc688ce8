"""What every question is about: a model on a cluster, with its batch, and the plan that is meant.

The one place where profiles come from: a saved one, a measured one, an estimated one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainplan.errors import InputError, PlanError, RunError

if TYPE_CHECKING:
    from trainplan.cluster.cluster import Cluster
    from trainplan.plan.plan import Plan, Request
    from trainplan.profile.profile import Profile

Changes = Sequence[str] | Mapping[str, str]


@dataclass(frozen=True)
class Situation:
    """A model on a cluster, with its batch: what every question is about."""

    workload: str  # its name; "" where it has none that another process could load
    profile: Profile
    cluster: Cluster
    batch: int


def cluster_for(cluster: str | Cluster, set: Changes = (), refresh: bool = False) -> Cluster:
    """The cluster that is meant, with the changes that were asked for."""
    from trainplan.cluster.overrides import with_overrides
    from trainplan.cluster.parse import cluster as parse
    from trainplan.report.progress import progress

    if isinstance(cluster, str):
        with progress() as report:
            cluster = parse(cluster, progress=report, refresh=refresh)
    changes = dict(set) if isinstance(set, Mapping) else dict(_change(word) for word in set)
    return with_overrides(cluster, changes) if changes else cluster


def _change(word: str) -> tuple[str, str]:
    key, equals, value = word.partition("=")
    if not equals or not value:
        raise InputError(f"--set {word}", "a change has the form KEY=VALUE", "--set link=25GB/s")
    return key.strip(), value.strip()


def profile_for(
    model: Any, cluster: Cluster, batch: int | None = None, *, compile: bool = False, refresh: bool = False
) -> Profile:
    """The profile of a model on a cluster's devices: measured if the device is here, estimated if not.

    A profile that was measured before on this machine with the same versions is taken from the cache.
    """
    from trainplan.report.progress import progress
    from trainplan.workload.load import load

    workload = load(model, **({"batch": batch} if batch else {}))
    names = {device.name for node in cluster.nodes for device in node.devices}
    if len(names) > 1:
        why = f"its devices are {', '.join(sorted(names))}, and plans for mixed devices are not there yet"
        raise PlanError(f"cluster {cluster.name}", why, f"the {sorted(names)[0]} alone")
    with progress() as report:
        here = device_here(names.pop())
        if here is None:
            from trainplan.profile.estimate import estimate

            if compile:
                why = f"{cluster.device(0).name} is not here, and estimates are of eager execution"
                raise InputError("--compile", why, "leaving it out")
            return estimate(workload, cluster.device(0), progress=report)
        from trainplan.profile.cache import measured

        return measured(workload, device=here, compile=compile, refresh=refresh, progress=report)


def device_here(name: str) -> str | None:
    """The torch device of this machine that is of this kind, or None."""
    if name == "cpu":
        return "cpu"
    import torch

    from trainplan.profile.machine import name_of

    if torch.cuda.is_available() and name_of(torch.device("cuda", 0)) == name:
        return "cuda"
    return None


def situation(
    model: Any, cluster: str | Cluster, batch: int | None, profile: str | Profile | None, set: Changes, compile: bool
) -> Situation:
    from trainplan.profile.profile import Profile

    if batch is not None and batch < 1:
        raise PlanError(f"batch {batch}", "a batch has at least one sample", "--batch 32")
    there = cluster_for(cluster, set)
    known: Any = profile
    if known is None and (isinstance(model, Profile) or _is_profile(model)):
        known = model
    if known is not None:
        found = known if isinstance(known, Profile) else Profile.load(known)
        name = model if isinstance(model, str) and known is not model else found.workload
        return Situation(name, found, there, batch or found.batch)
    found = profile_for(model, there, batch, compile=compile)
    return Situation(found.workload, found, there, batch or found.batch)


def _is_profile(model: Any) -> bool:
    return isinstance(model, Path) or (isinstance(model, str) and model.endswith(".json") and ":" not in model)


def plan_for(plan: str | Plan | Request, s: Situation) -> tuple[Plan, Cluster]:
    """The plan that is meant, and the cluster with the memory that it may use."""
    from trainplan.plan.plan import Plan
    from trainplan.plan.text import parse, text
    from trainplan.solve.limits import limited
    from trainplan.solve.resolve import resolve

    if isinstance(plan, Plan):
        if plan.blocks != len(s.profile.blocks):
            why = f"it was made for {plan.blocks} blocks, and the model has {len(s.profile.blocks)}"
            raise PlanError(f"plan {text(plan)!r}", why, "making the plan again")
        return plan, s.cluster
    request = parse(plan) if isinstance(plan, str) else plan
    return resolve(request, s.profile, s.cluster, s.batch), limited(s.cluster, request.memory)


def name_of(s: Situation) -> str:
    if not s.workload or s.workload.startswith("module"):
        raise RunError(
            "running a model that was made in Python",
            "the processes of a run load it by its name, and it has none",
            "path/file.py:function, or trainplan.build in your own training loop",
        )
    return s.workload


def torch_device(s: Situation) -> str:
    here = device_here(s.profile.device)
    if here is None:
        why = f"the plan is for {s.profile.device}, and this machine has none"
        raise RunError(f"running on {s.cluster.name}", why, "--cluster local")
    return here
