"""Runs that were measured, as a calibration sees them: a program that can be played again, and what it took.

Of each run there is the step, and the seconds of every kind of operation, whatever else went on meanwhile. Both are at
the speed that the machine had when the profile was made, as the reference kernel tells; a link with a rate of its own
is as fast as ever, so over one communication is taken as it was.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

from trainplan.bench.believed import believed
from trainplan.bench.results import Outcome, Result, steadied
from trainplan.bench.row import Row
from trainplan.cluster.cluster import Cluster, Device
from trainplan.errors import InputError, TrainplanError
from trainplan.plan.text import parse, text
from trainplan.predict.accuracy import plan_kind
from trainplan.predict.replay import Replay
from trainplan.program.ops import COMPUTES
from trainplan.solve.resolve import resolve
from trainplan.units import some

ALIKE = 1.5  # times: speeds of devices and networks of the same machines, measured twice, are not further apart
LEAST_RUNS = 6  # that are worth anything together
_COMPUTES = {kind.name for kind in COMPUTES}


@dataclass(frozen=True)
class Seen:
    """One run."""

    network: str
    system: str  # its kind of plan
    plan: str
    replay: Replay
    step_s: float
    kinds: dict[str, float]  # seconds of a step and a mean rank
    noise: float  # how far two halves of the measurement are apart

    @property
    def together(self) -> int:
        """Ranks that it has."""
        return self.replay.plan.world


@dataclass(frozen=True)
class Gathered:
    """All runs of one cluster."""

    cluster: Cluster
    runs: tuple[Seen, ...]
    machines: tuple[str, ...]
    left_out: tuple[str, ...]  # why, with how many


def gather(outcomes: Sequence[Outcome], cluster: Cluster | None = None) -> Gathered:
    """The runs of a cluster: of the one that is given, or of the only one that there is."""
    known = [(outcome, found) for outcome in outcomes if (found := believed(outcome))]
    ran = sum(len(outcome.ran) for outcome in outcomes)
    if not ran:
        raise InputError("calibrate", "nothing in these results has run", "trainplan bench run")
    if not known:
        why = f"none of the {some(ran, 'run')} has the profile and the cluster beside it that it was predicted from"
        raise InputError("calibrate", why, "results of trainplan run --out FOLDER, or of trainplan bench run")
    if cluster is None:
        cluster = _only([(outcome, there) for outcome, (_, there) in known])
    own = [(outcome, profile) for outcome, (profile, there) in known if same_machines(there, cluster)]
    if not own:
        theirs = ", ".join(sorted({there.name for _, (_, there) in known}))
        why = f"the runs were measured on other machines or links: {theirs}"
        raise InputError(f"calibrate --cluster {cluster.name}", why, "the cluster file that is beside the results")
    runs, failed = list[Seen](), Counter[str]()
    for outcome, profile in own:
        for result in steadied(outcome).ran:
            try:
                plan = resolve(parse(result.plan), profile, cluster, outcome.batch)
                replay = Replay(plan, profile, cluster, outcome.batch)
            except TrainplanError as error:  # such as a plan for more devices than there are
                failed[str(error)] += 1
                continue
            if (seen := _seen(outcome, result, replay, cluster)) is not None:
                runs.append(seen)
    elsewhere = ran - sum(len(outcome.ran) for outcome, _ in own)
    left_out = [f"{some(count, 'run')}: {why}" for why, count in failed.items()]
    left_out += [f"{some(elsewhere, 'run')}: of other machines, or without profile and cluster"] if elsewhere else []
    if len(runs) < LEAST_RUNS:
        why = f"there are {len(runs)} runs of {cluster.name}, and less than {LEAST_RUNS} say more about chance than it"
        raise InputError("calibrate", why, "trainplan bench run, with more systems or networks")
    return Gathered(cluster, tuple(runs), tuple(dict.fromkeys(o.machine for o, _ in own)), tuple(left_out))


def _only(known: Iterable[tuple[Outcome, Cluster]]) -> Cluster:
    """The cluster of all these results; where workers were probed in several numbers, that of the most."""
    files: dict[str, Cluster] = {}
    for outcome, there in known:
        files.setdefault(str(Path(outcome.at).parent / outcome.cluster), there)
    most = max(files.values(), key=lambda there: there.world)
    others = [name for name, there in files.items() if not same_machines(there, most)]
    if others:
        why = f"these results are of {some(len(files), 'cluster')}: {', '.join(sorted(files))}"
        raise InputError("calibrate", why, f"--cluster {others[0]}")
    return most


def same_machines(one: Cluster, other: Cluster) -> bool:
    """Whether two descriptions are of the same machines, of which one may have more devices: as many nodes, the same
    devices about as fast, and networks about as fast.

    >>> from trainplan.cluster.parse import cluster
    >>> same_machines(cluster("2xT4"), cluster("4xT4")), same_machines(cluster("2xT4"), cluster("2xL4"))
    (True, False)
    """
    if one.backend != other.backend or len(one.nodes) != len(other.nodes):
        return False
    for a, b in zip(one.nodes, other.nodes, strict=True):
        if (a.network is None) != (b.network is None):
            return False
        if a.network is not None and b.network is not None and not _near(a.network.rate, b.network.rate):
            return False
        if not all(_alike(x, y) for x, y in zip(a.devices, b.devices, strict=False)):
            return False
    return True


def _alike(one: Device, other: Device) -> bool:
    speeds = all(_near(one.flops[name], other.flops[name]) for name in one.flops.keys() & other.flops.keys())
    return one.name == other.name and speeds and _near(one.memory_rate, other.memory_rate)


def _near(one: float, other: float) -> bool:
    return one == other or (min(one, other) > 0 and max(one, other) / min(one, other) < ALIKE)


def _seen(outcome: Outcome, result: Result, replay: Replay, cluster: Cluster) -> Seen | None:
    """A run; None where what it took is not known."""
    row, step_s = result.row, result.measured_s
    if row is None or not step_s or not isfinite(step_s) or step_s <= 0:
        return None
    return Seen(
        outcome.network, plan_kind(replay.plan), text(replay.plan), replay, step_s, _kinds(row, cluster),
        row.noise_floor,
    )  # fmt: skip


def _kinds(row: Row, cluster: Cluster) -> dict[str, float]:
    """Seconds by kind. Of older rows only what a step cannot do without is known: there compute is as long as it is."""
    drift = row.drift or 1.0
    spent = row.spent or {kind: took for kind, (_, took) in row.by_kind.items() if kind in _COMPUTES}
    rated = len(cluster.nodes) > 1
    return {kind: took if rated and kind not in _COMPUTES else took / drift for kind, took in spent.items() if took > 0}
