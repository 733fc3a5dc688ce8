"""Which constants explain what was measured: least squares in logarithms, robust, and only what helps elsewhere.

What is explained are logarithms of ratios, predicted over measured: of every run's step, and of its kinds of operation,
each as far as it matters to the step. A few percent are noise, and a run that is far off says as little as one that is
a little off (soft L1). How an observation answers to a constant is found by playing all programs with that constant
moved, so nobody has to say which operation tells of which; where hardly any answers, the constant stays.

A constant is taken in only if, fitted without some networks (or systems), it makes the others more right. The best of
them goes first; with it all are fitted and looked at again, until none helps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from trainplan.bench.calibrate.constants import Constant, changed
from trainplan.bench.calibrate.seen import Seen
from trainplan.cluster.cluster import Cluster

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]

LEAST_JOINS = 5  # observations that answer to a constant, for it to be moved at all
ANSWERS = 0.02  # an observation answers if it moves by this share of what the constant does
LEAST_SHARE = 0.02  # of a step, below which a kind of operation tells nothing
OF_KINDS = 0.5  # a kind of operation that takes the whole step counts this much of the step itself
NOISE = 0.03  # at the least: what is nearer than this is right
DOUBTS = np.log(2.0)  # a constant that is twice what it was is as unlikely as one run that is off by its noise
GAIN = 0.02  # share of the error that a constant has to take away elsewhere
MUCH = 0.1  # the same, to be taken in before all are looked at again
EXACT = 1e-3  # an error that is not worth a constant
MOVED = 0.05  # of a logarithm, to see what answers
FOLDS = 4  # into which systems are dealt out


@dataclass(frozen=True)
class Split:
    """Runs that are held out together."""

    by: str  # networks or systems
    what: str
    held: Mask


@dataclass
class Problem:
    """Runs, and the constants that may explain them."""

    cluster: Cluster
    runs: Sequence[Seen]
    constants: Sequence[Constant]
    _known: dict[bytes, Floats] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        first = [run.replay.on(self.cluster) for run in self.runs]
        rows = []
        for number, (run, (_, kinds)) in enumerate(zip(self.runs, first, strict=True)):
            rows.append((number, "", run.step_s, 1.0))
            for kind, took in run.kinds.items():
                share = min(1.0, took / run.step_s)
                if share >= LEAST_SHARE and kinds.get(kind, 0.0) > LEAST_SHARE * run.step_s / 2:
                    rows.append((number, kind, took, OF_KINDS * share))
        self.run = np.array([row[0] for row in rows])
        self.kind = [row[1] for row in rows]
        self.measured = np.log(np.array([row[2] for row in rows]))
        noise = np.array([max(NOISE, run.noise) for run in self.runs])[self.run]
        self.weight = np.array([row[3] for row in rows]) / noise**2
        self.counts = np.array([row[3] for row in rows])
        self.noise = noise
        self.steps = np.array([not kind for kind in self.kind])

    # -- what is predicted -----------------------------------------------------------------------------------------

    def values(self, ways: Floats) -> dict[str, float]:
        """The constants that are other ones."""
        both = zip(self.constants, ways.tolist(), strict=True)
        return {constant.name: constant.moved(way) for constant, way in both if way}

    def off(self, ways: Floats) -> Floats:
        """Of every observation, predicted over measured, as a logarithm."""
        key = ways.tobytes()
        if key not in self._known:
            there = changed(self.cluster, self.values(ways))
            played = [run.replay.on(there) for run in self.runs]
            found = [
                kinds[kind] if kind else step
                for kind, (step, kinds) in zip(self.kind, (played[n] for n in self.run.tolist()), strict=True)
            ]
            self._known[key] = np.log(np.maximum(np.array(found), 1e-12)) - self.measured
        return self._known[key]

    def answers(self, ways: Floats, which: Sequence[int]) -> Floats:
        """How every observation moves with each constant."""
        here, found = self.off(ways), np.zeros((len(self.run), len(self.constants)))
        for place in which:
            low, high = self.constants[place].ends
            step = MOVED if ways[place] + MOVED <= high else -MOVED
            if not low <= ways[place] + step <= high:
                continue  # there is no room to move
            there = ways.copy()
            there[place] += step
            found[:, place] = (self.off(there) - here) / step
        return found

    @cached_property
    def nowhere(self) -> Floats:
        return np.zeros(len(self.constants))

    @cached_property
    def joins(self) -> NDArray[np.int64]:
        """How many observations answer to each constant."""
        every = self.answers(self.nowhere, range(len(self.constants)))
        return np.asarray((np.abs(every) >= ANSWERS).sum(axis=0))

    def error(self, ways: Floats, runs: Mask) -> Floats:
        """Relative errors of the steps of some runs."""
        return np.exp(self.off(ways)[self.steps & runs[self.run]]) - 1


def splits(runs: Sequence[Seen], among: Mask | None = None) -> list[Split]:
    """Every network held out, and every fourth of the systems; none where there is only one of them."""
    among = np.ones(len(runs), dtype=bool) if among is None else among
    found = []
    for by, names in (("networks", [run.network for run in runs]), ("systems", [run.system for run in runs])):
        kinds = sorted({name for name, there in zip(names, among, strict=True) if there})
        dealt = [[kind] for kind in kinds] if by == "networks" else [kinds[n::FOLDS] for n in range(FOLDS)]
        for own in (own for own in dealt if own):
            held = np.array([name in own for name in names]) & among
            if (among & ~held).any():
                found.append(Split(by, ", ".join(own), held))
    return found


def calibrated(problem: Problem, among: Mask) -> tuple[Floats, list[int]]:
    """How far each constant is to move, by some of the runs alone, and which do, the most helpful first."""
    ways, chosen = problem.nowhere.copy(), list[int]()
    inside = splits(problem.runs, among)
    worth = [place for place, joins in enumerate(problem.joins) if joins >= LEAST_JOINS]
    while worth and inside:
        judge = _Judge(problem, ways, problem.answers(ways, worth), inside, among)
        if not chosen:  # what helps in no way by itself is not looked at again
            worth = [place for place in worth if judge.score([place]) < judge.score([])]
        more = judge.helpful(chosen, worth)
        if not more:
            break
        chosen += more
        ways = fitted(problem, chosen, among, ways)
    return _without_the_needless(problem, ways, chosen, inside, among)


def _without_the_needless(
    problem: Problem, ways: Floats, chosen: Sequence[int], inside: Sequence[Split], among: Mask
) -> tuple[Floats, list[int]]:
    """What was taken in first may have stood for what came later: then it goes back to where it was."""
    left = list(chosen)
    judge = _Judge(problem, ways, problem.answers(ways, left), inside, among)
    for place in chosen:
        others = [other for other in left if other != place]
        if judge.score(others, nought=[place]) <= judge.score(left) * (1 + GAIN / 2):
            left = others
    if len(left) < len(chosen):
        ways = fitted(problem, left, among, np.where(np.isin(np.arange(len(ways)), left), ways, 0.0))
    return ways, [place for place in left if ways[place]]


@dataclass(frozen=True)
class _Judge:
    """Tells by straight lines, from where constants are now, how right runs would be that were held out."""

    problem: Problem
    ways: Floats
    every: Floats
    inside: Sequence[Split]
    among: Mask

    def helpful(self, chosen: Sequence[int], worth: Sequence[int]) -> list[int]:
        """Constants that make held-out runs more right beside those that are chosen, the best first: only those that
        matter much, since the lines are not so straight; or else one."""
        more, now = list[int](), self.score(chosen)
        while now > EXACT:
            rest = [place for place in worth if place not in chosen and place not in more]
            least, place = min(((self.score([*chosen, *more, place]), place) for place in rest), default=(now, -1))
            if least > now * (1 - (MUCH if more else GAIN)):
                break
            more, now = [*more, place], least
        return more

    def score(self, chosen: Sequence[int], nought: Sequence[int] = ()) -> float:
        """The error on runs that were held out, one split after the other; those in `nought` are where they began."""
        problem, errors, counts = self.problem, 0.0, 0.0
        start = self.ways.copy()
        start[list(nought)] = 0.0
        off = problem.off(self.ways) + self.every @ (start - self.ways)
        for split in self.inside:
            learned, held = (self.among & ~split.held)[problem.run], split.held[problem.run]
            there = _solved(problem, start, off, self.every, chosen, learned)
            left = off[held] + self.every[held] @ (there - start)
            errors += float(np.abs(left) @ problem.counts[held])
            counts += float(problem.counts[held].sum())
        return errors / counts


def fitted(problem: Problem, chosen: Sequence[int], among: Mask, start: Floats) -> Floats:
    """The constants that are chosen, fitted to some runs: by straight lines, again and again."""
    ways, learned = start, among[problem.run]
    for _ in range(6):
        off = problem.off(ways)
        there = _solved(problem, ways, off, problem.answers(ways, chosen), chosen, learned)
        now, share = _loss(problem, ways, learned), 1.0
        while share > 0.1 and _loss(problem, ways + share * (there - ways), learned) > now:
            share /= 2  # the lines were not so straight
        if share <= 0.1:
            break
        step = share * (there - ways)
        ways = ways + step
        if np.abs(step).max() < 5e-3:
            break
    return ways


def _loss(problem: Problem, ways: Floats, learned: Mask) -> float:
    """Soft L1 of what is left, and the doubts."""
    off = problem.off(ways)[learned] / problem.noise[learned]
    return float(problem.counts[learned] @ (2 * (np.sqrt(1 + off**2) - 1)) + ((ways / DOUBTS) ** 2).sum())


def _solved(problem: Problem, ways: Floats, off: Floats, every: Floats, chosen: Sequence[int], learned: Mask) -> Floats:
    """Where the chosen constants belong if all observations go by straight lines; within their bounds."""
    found = ways.copy()
    free = list(chosen)
    rows, left = every[learned], off[learned] - every[learned] @ ways
    weight, noise = problem.weight[learned], problem.noise[learned]
    while free:
        columns = rows[:, free]
        fixed = left + rows @ np.where(np.isin(np.arange(len(ways)), free), 0.0, found)
        own = found[free]
        for _ in range(6):  # soft L1 is least squares in which what is far off counts for less
            robust = weight / np.sqrt(1 + ((fixed + columns @ own) / noise) ** 2)
            normal = (columns.T * robust) @ columns + np.eye(len(free)) / DOUBTS**2
            own = np.linalg.solve(normal, -(columns.T * robust) @ fixed)
        found[free] = own
        ends = np.array([problem.constants[place].ends for place in free])
        beyond = [place for place, (low, high) in zip(free, ends, strict=True) if not low <= found[place] <= high]
        if not beyond:
            break
        for place in beyond:  # it stays at its bound, and the others are fitted anew
            low, high = problem.constants[place].ends
            found[place] = min(max(found[place], low), high)
        free = [place for place in free if place not in beyond]
    return found
