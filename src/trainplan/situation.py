"""What every question is about: a model on a cluster, with its batch, and the plan that is meant.

The one place where profiles come from: a saved one, a measured one, an estimated one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainplan.errors import InputError, PlanError, RunError, TrainplanError
from trainplan.saved import batch_in, refuse_others, refuse_otherwise

if TYPE_CHECKING:
    from trainplan.cluster.cluster import Cluster
    from trainplan.plan.plan import Plan, Request
    from trainplan.profile.profile import Profile
    from trainplan.workload.workload import Workload

MOST_SAMPLES = 10**8  # of a step: beyond it a number was mistyped, and ways to cut it would take all memory
Changes = Sequence[str] | Mapping[str, str]


@dataclass(frozen=True)
class Situation:
    """A model on a cluster, with its batch: what every question is about."""

    workload: str  # its name; "" where it has none that another process could load
    profile: Profile
    cluster: Cluster
    batch: int
    made: Workload | None = None  # in Python; None: it came as a name or a profile


def cluster_for(cluster: str | Cluster, set: Changes = (), refresh: bool = False) -> Cluster:
    """The cluster that is meant, with the changes that were asked for."""
    from trainplan.cluster.overrides import with_overrides
    from trainplan.cluster.parse import cluster as parse
    from trainplan.cluster.sound import checked
    from trainplan.engine.probe import probe
    from trainplan.report.progress import progress

    if isinstance(cluster, str):
        with progress() as report:
            cluster = parse(cluster, progress=report, refresh=refresh, probe=probe)
    else:
        cluster = checked(cluster, "cluster")
    changes = _changes(set)
    return with_overrides(cluster, changes) if changes else cluster


def _changes(set: Changes) -> dict[str, str]:
    return dict(set) if isinstance(set, Mapping) else dict(_change(word) for word in set)


def _change(word: str) -> tuple[str, str]:
    key, equals, value = word.partition("=")
    if not equals or not value:
        raise InputError(f"--set {word}", "a change has the form KEY=VALUE", "--set link=25GB/s")
    return key.strip(), value.strip()


def refuse_fixed(profile: Profile, set: Changes, saved: bool) -> None:
    """Refuse changes that a profile does not follow: seconds that were measured, or saved, are of the device as it was.

    What is priced anew for every plan (links, memory, prices …) may change with any profile.
    """
    if saved or profile.kind == "measured":
        name = profile.workload or "the model"
        instead = f"{name} by its name, not its profile, on a device that is not here (--cluster 1xA100-80)"
        refuse_changed(profile.device, set, "saved" if saved else "measured here", instead)


def refuse_changed(device: str, set: Changes, how: str, instead: str) -> None:
    """Refuse changes of what seconds of passes follow from, on a device where these are `measured here` or `saved`."""
    from trainplan.cluster.overrides import OF_PASSES

    changes = _changes(set)
    for key in changes:
        if key in OF_PASSES:
            why = f"the profile's seconds on {device} were {how}, and would not change with it"
            raise InputError(f"--set {key}={changes[key]}", why, instead)


def profile_for(
    model: Any, cluster: Cluster, batch: int | None = None, *, compile: bool = False, refresh: bool = False
) -> Profile:
    """The profile of a model on a cluster's devices: measured if the device is here, estimated if not.

    A profile that was measured before on this machine with the same versions is taken from the cache.
    """
    from trainplan.report.progress import progress

    # Of several kinds of devices one stands for all, and the others are scaled: one that is here, or the first. What
    # names a device file is estimated by it, here or not.
    names = dict.fromkeys(device.name for node in cluster.nodes for device in node.devices if not device.file)
    here = next(filter(None, map(device_here, names)), None)
    if here is not None:
        return profile_here(model, here, batch, compile=compile, refresh=refresh)
    from trainplan.profile.device.known import model_of
    from trainplan.profile.estimate import estimate

    if compile:
        why = f"{cluster.device(0).name} is not here, and estimates are of eager execution"
        raise InputError("--compile", why, "leaving it out")
    with progress() as report:
        known = model_of(cluster.device(0), measured_here=True)
        return estimate(_loaded(model, batch), cluster.device(0), progress=report, model=known)


def profile_here(
    model: Any, device: str, batch: int | None = None, *, compile: bool = False, refresh: bool = False
) -> Profile:
    """The profile of a model on a device of this machine."""
    from trainplan.profile.cache import measured
    from trainplan.report.progress import progress

    with progress() as report:
        return measured(_loaded(model, batch), device=device, compile=compile, refresh=refresh, progress=report)


def _loaded(model: Any, batch: int | None) -> Workload:
    from trainplan.workload.load import load

    return load(model, **({"batch": batch} if batch else {}))


def device_here(name: str) -> str | None:
    """The torch device of this machine that is of this kind, or None."""
    if name == "cpu":
        return "cpu"
    from trainplan.cluster.probe.machine import torch_knows_cuda

    if not torch_knows_cuda():  # so it need not be imported, which takes longer than most answers
        return None
    import torch

    from trainplan.profile.machine import name_of

    if torch.cuda.is_available() and name_of(torch.device("cuda", 0)) == name:
        return "cuda"
    return None


def parts(inputs: Any, loss: Any, optimizer: Any) -> dict[str, Any]:
    """What was given from Python beside the model."""
    given = {"inputs": inputs, "loss": loss, "optimizer": optimizer}
    return {key: value for key, value in given.items() if value is not None}


def situation(
    model: Any, cluster: str | Cluster, batch: int | None, profile: str | Profile | None, set: Changes,
    compile: bool | None, given: Mapping[str, Any] = {}, runs: bool = False,
) -> Situation:  # fmt: skip
    """The model on the cluster; `given` are its `parts`. `runs`: other processes must be able to load it.

    `compile` must be as in a profile that is given; None: whatever that says, or eager.
    """
    from trainplan.profile.profile import Profile
    from trainplan.profile.sound import checked

    if batch is not None and batch < 1:
        raise PlanError(f"batch {batch}", "a batch has at least one sample", "--batch 32")
    if batch is not None and batch > MOST_SAMPLES:
        raise PlanError(f"batch {batch:,}", f"a step of more than {MOST_SAMPLES:,} samples is none", "--batch 32")
    known: Any = profile
    if known is None and has_profile(model, None):
        known = model
    if known is not None and given:
        why = "a profile was made with inputs, loss and optimizer, and cannot take others"
        raise InputError(f"{', '.join(f'{key}=' for key in given)} with a profile", why, "leaving them out")
    made = made_in_python(model, given, runs) if known is None else None
    if known is not None:
        found = checked(known, "profile") if isinstance(known, Profile) else Profile.load(known)
        where = cluster if isinstance(cluster, str) else cluster.name
        name = _named(model, found) if known is not model else found.workload
        if known is not model or runs:  # else the profile is all that is asked about, wherever its model may be
            refuse_others(found, name, where, bool(compile))
        if compile is not None:
            refuse_otherwise(found, compile, name, where, here=device_here(found.device) is not None)
        there = cluster_for(cluster, set)  # only now: this machine would be probed
        refuse_fixed(found, set, saved=True)
        return Situation(name, found, there, batch or batch_in(name, found))
    there = cluster_for(cluster, set)
    found = profile_for(made or model, there, batch, compile=bool(compile))
    refuse_fixed(found, set, saved=False)
    return Situation(found.workload, found, there, batch or found.batch, made)


def _named(model: Any, profile: Profile) -> str:
    """The name of a model that a profile was given with; the profile's, where it is a module, which has none."""
    if has_profile(model, None):
        raise InputError("two profiles", "the model is given as a profile, and --profile is another", "one of the two")
    from trainplan.workload.workload import Workload

    if isinstance(model, Workload):
        return model.name
    return model if isinstance(model, str) else profile.workload


def made_in_python(model: Any, given: Mapping[str, Any] = {}, runs: bool = False) -> Workload | None:
    """The workload, where it is more than a name; `runs`: it is refused where other processes cannot make it again."""
    if isinstance(model, str) and not given:
        return None
    from torch import nn

    from trainplan.workload.load import load

    if runs and isinstance(model, nn.Module):
        raise _stays(f"{type(model).__name__}, which was made in Python", "a module has no name")
    made = load(model, **given)
    if runs and not _travels(made):
        why = f"what the name {made.name!r} stands for there is not this one"
        raise _stays(f"{made.name}, with parts that were given in Python", why)
    return made


def has_profile(model: Any, profile: Any) -> bool:
    """Whether a profile was given, instead of the model or beside it."""
    from trainplan.profile.profile import Profile

    return profile is not None or isinstance(model, Profile) or is_profile(model)


def is_profile(model: Any) -> bool:
    """Whether it is the name of a saved profile."""
    return isinstance(model, Path) or (isinstance(model, str) and model.endswith(".json") and ":" not in model)


def plan_for(plan: str | Plan | Request, s: Situation) -> tuple[Plan, Cluster]:
    """The plan that is meant, and the cluster with the memory that it may use."""
    from trainplan.plan.plan import Plan
    from trainplan.plan.text import brief, parse
    from trainplan.solve.limits import limited
    from trainplan.solve.resolve import resolve

    if isinstance(plan, Plan):
        if plan.blocks != len(s.profile.blocks):
            why = f"it was made for {plan.blocks} blocks, and the model has {len(s.profile.blocks)}"
            raise PlanError(f"plan {brief(plan)!r}", why, "making the plan again")
        return plan, s.cluster
    request = parse(_said(plan)) if isinstance(plan, str) else plan
    return resolve(request, s.profile, s.cluster, s.batch), limited(s.cluster, request.memory)


def _said(line: str) -> str:
    """A plan's line, refused where nothing is in it: that would quietly be one device."""
    if not line.strip():
        raise PlanError(
            f"--plan {line!r}", "it asks for nothing", "single for one device, dp=2, or what recommend says"
        )
    return line


def runnable(plan: str | Plan | Request) -> Plan | Request:
    """What is asked, refused where it can only be predicted."""
    from trainplan.plan.sliced import check_runs
    from trainplan.plan.text import parse

    asked = parse(_said(plan)) if isinstance(plan, str) else plan
    check_runs(asked)
    return asked


def name_of(s: Situation) -> str:
    """The name by which the processes of a run load the model."""
    if not s.workload or s.workload.startswith("module:"):
        raise _stays("a model that was made in Python", "it has none")
    return s.workload


def can_run(s: Situation) -> bool:
    """Whether other processes can load the model by its name."""
    return bool(s.workload) and not s.workload.startswith("module:") and (s.made is None or _travels(s.made))


def _travels(made: Workload) -> bool:
    """Whether its name brings a workload back in another process, with all that it was given."""
    from dataclasses import replace

    from trainplan.profile.cache import fingerprint
    from trainplan.workload.load import load

    try:
        again = load(made.name)
    except TrainplanError:
        return False
    return bool(fingerprint(replace(again, batch=made.batch)) == fingerprint(made))  # a run is told its batch


def _stays(what: str, why: str) -> RunError:
    return RunError(
        f"running {what}",
        f"a run starts new processes, which make the model anew by its name, and {why}",
        "a function in a file that returns it, named as path/file.py:function; or trainplan.build in your own loop",
    )


def torch_device(s: Situation) -> str:
    here = device_here(s.profile.device)
    if here is None:
        why = f"the plan is for {s.profile.device}, and this machine has none"
        raise RunError(f"running on {s.cluster.name}", why, "--cluster local")
    return here


def ranks(asked: Request, world: int, device: str) -> str:
    """The short form of the cluster that the ranks are on, as far as torchrun tells; refused where a plan needs several
    and it started none."""
    import os
    import warnings

    import torch

    from trainplan.cluster import catalogue
    from trainplan.profile.machine import name_of as device_name

    needs = _least_ranks(asked)
    if needs > 1 and "WORLD_SIZE" not in os.environ:
        from trainplan.plan.text import brief

        why = f"it needs {needs} ranks, and this process is alone: torchrun did not start it"
        instead = f"torchrun --nproc-per-node {needs} FILE, or a plan of 1, such as single"
        raise PlanError(f"plan {brief(asked)!r}", why, instead)
    name = device_name(torch.device(device))
    if name == "cpu":
        return f"{world}xcpu"
    if not catalogue.has("device", name):
        warnings.warn(
            f"{name} is not in the catalogue, so what the plan leaves open is chosen as on CPUs", stacklevel=3
        )
        return f"{world}xcpu"
    a_node = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    return f"{world // a_node}x{a_node}x{name}" if world % a_node == 0 else f"{world}x{name}"


def _least_ranks(asked: Request) -> int:
    """Ranks that a request cannot do without, whatever it leaves open."""
    from trainplan.plan.served import AT_SERVERS

    stages = sum(asked.spread) if asked.spread else asked.pp or 1
    servers = asked.servers or int(asked.exchange in AT_SERVERS)
    return (asked.dp or 1) * stages * (asked.tp or 1) + servers
