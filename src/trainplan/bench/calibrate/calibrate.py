"""From measured runs to a cluster with better constants, and how much better it predicts what it has not seen.

The whole procedure (which constants, and how far) is gone through for every network that is held out, and for every
fourth of the systems, and each time what was held out is predicted with what the others taught. That is the error that
is told. The cluster itself is then calibrated by all runs. Where runs that were held out are predicted worse than
before, there is nothing that these runs could teach, and the cluster stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import numpy as np

from trainplan.bench.calibrate.constants import changed, constants
from trainplan.bench.calibrate.fit import LEAST_JOINS, Floats, Problem, Split, calibrated, splits
from trainplan.bench.calibrate.seen import Gathered
from trainplan.cluster.cluster import Cluster, Device, Link, Node
from trainplan.errors import InputError
from trainplan.units import some

Say = Callable[[str, float], None]


@dataclass(frozen=True)
class Change:
    """What became of one constant."""

    name: str
    what: str
    before: float
    after: float
    joins: int  # observations that answer to it
    told: tuple[str, str]  # both values in words
    why: str  # it did not move; "": it did

    @property
    def moved(self) -> bool:
        return self.after != self.before


@dataclass(frozen=True)
class Error:
    """Errors of the predicted steps of some runs, before and after."""

    of: str
    runs: int
    median: tuple[float, float]
    mean: tuple[float, float]
    worst: tuple[float, float]

    @property
    def worse(self) -> bool:
        return self.mean[1] > self.mean[0]


@dataclass(frozen=True)
class Calibration:
    """What measured runs say about the constants of a cluster."""

    cluster: Cluster  # with the new constants
    changes: tuple[Change, ...]
    fitted: Error
    held_out: tuple[Error, ...]
    splits: tuple[Error, ...]  # the same, one split after the other

    @property
    def helps(self) -> bool:
        """Whether anything moved, and runs that were held out are not predicted worse."""
        return any(change.moved for change in self.changes) and not any(error.worse for error in self.held_out)


def calibrate(gathered: Gathered, say: Say = lambda what, share: None) -> Calibration:
    """Fit the constants of a cluster to its runs."""
    runs = gathered.runs
    folds = splits(runs)
    if not folds:
        why = f"all {len(runs)} runs are of one network and one system: nothing could be held out to judge it by"
        raise InputError("calibrate", why, "runs of two networks, or under two plans")
    problem = Problem(gathered.cluster, runs, constants(gathered.cluster, {run.together for run in runs}))
    everybody = np.ones(len(runs), dtype=bool)
    found: list[tuple[Split, Floats]] = []
    for number, fold in enumerate(folds):
        say(f"without {fold.what}", number / (len(folds) + 1))
        found.append((fold, calibrated(problem, ~fold.held)[0]))
    say("with all runs", len(folds) / (len(folds) + 1))
    ways, chosen = calibrated(problem, everybody)
    held_out = [
        _error(problem, f"held out by {by}", [(fold, way) for fold, way in found if fold.by == by])
        for by in dict.fromkeys(fold.by for fold in folds)
    ]
    every = Split("", "", everybody)
    changes = [_change(problem, place, ways, place in chosen) for place in range(len(problem.constants))]
    return Calibration(
        _sourced(changed(gathered.cluster, problem.values(ways)), changes, gathered),
        tuple(changes), _error(problem, "fitted on", [(every, ways)]), tuple(held_out),
        tuple(_error(problem, fold.what, [(fold, way)]) for fold, way in found),
    )  # fmt: skip


def _error(problem: Problem, of: str, found: Sequence[tuple[Split, Floats]]) -> Error:
    before = np.concatenate([problem.error(problem.nowhere, fold.held) for fold, _ in found])
    after = np.concatenate([problem.error(ways, fold.held) for fold, ways in found])
    sizes = [np.abs(before), np.abs(after)]
    medians, means = [float(np.median(size)) for size in sizes], [float(size.mean()) for size in sizes]
    worst = [float(off[np.argmax(np.abs(off))]) for off in (before, after)]
    return Error(of, len(before), (medians[0], medians[1]), (means[0], means[1]), (worst[0], worst[1]))


def _change(problem: Problem, place: int, ways: Floats, chosen: bool) -> Change:
    constant, joins = problem.constants[place], int(problem.joins[place])
    after = constant.moved(float(ways[place])) if ways[place] else constant.value
    why = ""
    if not chosen:
        few = joins < LEAST_JOINS
        why = f"fewer than {LEAST_JOINS} observations answer" if few else "held-out runs gain nothing by it"
    elif np.isclose(ways[place], constant.ends).any():
        why = "it would go beyond what is possible"
    return Change(
        constant.name, constant.what, constant.value, after, joins,
        (constant.told(constant.value), constant.told(after)), why,
    )  # fmt: skip


# -- where the numbers are from ----------------------------------------------------------------------------------------


def _sourced(cluster: Cluster, changes: Sequence[Change], gathered: Gathered) -> Cluster:
    """The cluster, with a source for each number that was changed."""
    moved = {change.name: change for change in changes if change.moved}
    if not moved:
        return cluster
    networks = sorted({run.network for run in gathered.runs})
    when = f"calibrated {datetime.now(UTC):%Y-%m-%d}"
    from_ = f"{when} by {some(len(gathered.runs), 'run')} of {', '.join(networks)}"
    notes = [
        f"{when}: {name} {change.told[0]} → {change.told[1]}, by {some(change.joins, 'observation')}"
        for name, change in moved.items()
    ]

    def link(one: Link, names: Sequence[str]) -> Link:
        own = [name for name in names if name in moved]
        return replace(one, source=f"{', '.join(own)} {from_}; else {one.source}") if own else one

    def device(one: Device) -> Device:
        own: dict[str, str] = {name: from_ for name in ("memory_rate", "host_link") if name in moved}
        return replace(one, sources={**one.sources, **own}) if own else one

    def node(one: Node) -> Node:
        inside = ("inside.latency", "inside.rate", "messages.latency", "messages.bytes")
        return replace(
            one, devices=tuple(map(device, one.devices)), inside=link(one.inside, inside),
            network=one.network and link(one.network, ("network.latency", "network.rate")),
        )  # fmt: skip

    return replace(
        cluster, nodes=tuple(map(node, cluster.nodes)), notes=(*cluster.notes, *notes),
        source=f"{cluster.source}; {from_}",
    )  # fmt: skip
