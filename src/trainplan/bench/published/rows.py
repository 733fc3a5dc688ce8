"""Rows of tables that have a plan each, and constants of a device fitted to some of them.

What is fitted are constants of the device and its host (`profile/efficiency.py`), to a few labelled rows, and never
reported on these. No constant is keyed by slices, width or micro-batch; shares stay below measured ceilings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from statistics import mean, median

import numpy as np
from scipy.optimize import least_squares
from torch.optim import AdamW

from trainplan.cluster.cluster import Cluster
from trainplan.cluster.parse import cluster
from trainplan.errors import PlanError
from trainplan.plan.plan import Plan
from trainplan.predict.predict import predict
from trainplan.profile.estimate import priced, traced
from trainplan.profile.profile import Profile
from trainplan.profile.repeated import TRACED, expanded
from trainplan.profile.roofline import speed_of
from trainplan.profile.traced import Traced
from trainplan.search.recommend import recommend
from trainplan.workload.load import load

Constants = dict[str, float]
# Constants that are fitted, with their bounds and what is thought of them beforehand (a mean, and how sure).
FITTED: dict[str, tuple[float, float, float, float]] = {
    "product": (0.6, 0.87, 0.85, 0.02),
    "stream": (0.5, 0.9, 0.72, 0.06),
    "misaligned": (0.2, 1.0, 0.36, 0.05),
    "issue_s": (20e-6, 100e-6, 55e-6, 20e-6),
    "sharing": (0.0, 0.2, 0.04, 0.04),
    "overlap": (1.5, 10.0, 4.0, 2.0),
    "overlap_sharing": (1.5, 10.0, 2.2, 0.6),
    "step_s": (0.0, 8e-3, 2e-3, 2e-3),
    "loss_issue_s": (0.0, 8e-3, 3e-3, 3e-3),
}
PRIOR = 0.02  # a constant one deviation off weighs as much as an error of 2 % in one row


@dataclass(frozen=True)
class Row:
    """A published step, and the plan that it ran."""

    group: tuple[int, ...]  # rows that answer the same question: layers, width, devices, batch
    seconds: float
    plan: Plan
    profile: Profile
    cluster: Cluster
    batch: int
    micro: int
    width: int
    layers: int  # or, of sharded rows, tokens

    def predicted(self, constants: Constants) -> float:
        there = _with(self.cluster.name, tuple(sorted(constants.items())))
        return predict(self.plan, self.profile, there, self.batch).step_s


@lru_cache(maxsize=64)
def _with(name: str, constants: tuple[tuple[str, float], ...]) -> Cluster:
    """A cluster whose devices have these constants."""
    place = cluster(name)
    nodes = tuple(
        replace(node, devices=tuple(replace(d, efficiency=dict(constants)) for d in node.devices))
        for node in place.nodes
    )
    return replace(place, nodes=nodes)


@cache
def layer(width: int, heads: int, tokens: int, words: int, attention: str) -> Traced:
    """A GPT of few layers, traced."""
    name = f"gpt:layers={TRACED},hidden={width},heads={heads},seq={tokens},vocab={words},attention={attention}"
    workload = load(f"{name},dropout={0.1 if attention == 'eager' else 0.0}")
    fused = replace(workload, optimizer=lambda parameters: AdamW(parameters, fused=True))
    return traced(fused, (1, 2, 4, 8), gpu=True)


def gpts(shapes: Sequence[tuple[int, int, int, int, int, str]], device: str) -> dict[tuple[int, ...], Profile]:
    """Profiles of GPTs by (layers, width, heads, tokens, words), each kind of layer traced once."""
    made: dict[tuple[int, ...], Profile] = {}
    place = cluster(f"1x{device}").device(0)
    speed = speed_of(place, "fp32")
    for layers, width, heads, tokens, words, attention in shapes:
        many = expanded(layer(width, heads, tokens, words, attention), "h", layers)
        made[layers, width, heads, tokens, words] = priced(many, place, speed, (1, 2, 4, 8, 16, 32, 64))
    return made


def fit(rows: Sequence[Row], names: Sequence[str], start: Constants, prior: float = PRIOR) -> Constants:
    """The constants with which these rows come out best, in logarithms and with little weight on outliers."""
    seconds = np.array([row.seconds for row in rows])

    def constants(place: np.ndarray) -> Constants:
        values = {n: FITTED[n][0] + (FITTED[n][1] - FITTED[n][0]) * float(x) for n, x in zip(names, place, strict=True)}
        return start | values

    def off(place: np.ndarray) -> np.ndarray:
        now = constants(place)
        errors = np.log(np.array([row.predicted(now) for row in rows]) / seconds)
        beliefs = [prior * (now[n] - FITTED[n][2]) / FITTED[n][3] for n in names]
        return np.concatenate([errors, beliefs])

    begin = [(start.get(n, FITTED[n][2]) - FITTED[n][0]) / (FITTED[n][1] - FITTED[n][0]) for n in names]
    best = least_squares(
        off, np.clip(begin, 0.02, 0.98), bounds=(0, 1), loss="soft_l1", f_scale=0.05, diff_step=0.01, max_nfev=12
    )
    return constants(best.x)


def score(rows: Sequence[Row], constants: Constants) -> dict[str, float]:
    """Errors of the rows."""
    errors = [row.predicted(constants) / row.seconds - 1 for row in rows]
    sizes = [abs(error) for error in errors]
    return {
        "rows": len(rows), "mean": mean(sizes), "median": median(sizes), "worst": max(sizes), "bias": mean(errors),
    }  # fmt: skip


def as_asked(rows: Sequence[Row]) -> dict[str, object]:
    """Errors of the rows as for anybody who asks: no constant is given, so a device is scaled from the package's file.
    All of them are kept, since they say how sure predictions for such machines are (`elsewhere.py`)."""
    errors = [round(row.predicted({}) / row.seconds - 1, 4) for row in rows]
    return {**score(rows, {}), "errors": errors}


def regrets(rows: Sequence[Row], constants: Constants) -> dict[str, float]:
    """What it costs, group by group, to run the plan that is recommended among those that were measured: its measured
    seconds over the least, less 1."""
    found = []
    for group in sorted({row.group for row in rows}):
        own = [row for row in rows if row.group == group]
        found.append(recommended(own, constants).seconds / min(row.seconds for row in own) - 1)
    return {"regret": mean(found), "worst_regret": max(found)}


def recommended(rows: Sequence[Row], constants: Constants) -> Row:
    """Of rows that answer the same question, the one whose plan `recommend` puts first. It cuts stages itself. (Where
    slices pad a vocabulary, models differ with them: then each model is asked for, and the fastest taken.)"""
    best: tuple[float, Row] | None = None
    for profile in {id(row.profile): row.profile for row in rows}.values():
        own = {_choices(row.plan): row for row in rows if row.profile is profile}
        first = next(iter(own.values()))
        there, plans = _with(first.cluster.name, tuple(sorted(constants.items()))), [row.plan for row in own.values()]
        found = recommend(profile, there, first.batch, predicted=first.plan.precision, among=plans)
        if found.ranked and (best is None or found.best.step_s < best[0]):
            best = found.best.step_s, own[_choices(found.best.plan)]
    if best is None:
        group = f"{rows[0].profile.workload} on {rows[0].cluster.name}"
        raise PlanError(f"the best of {len(rows)} plans for {group}", "none fits, and all ran", "a larger memory")
    return best[1]


def _choices(plan: Plan) -> tuple[int, ...]:
    """What tells the plans of a question apart."""
    return plan.dp, plan.tp, plan.pp, plan.micro
