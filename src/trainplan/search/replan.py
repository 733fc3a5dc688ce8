"""The best plan for the workers that there are now, where training began with more of them, or fewer.

How many replicas there are follows from the workers, so words that count them (`dp`, `ratio`, `shard` …) are kept only
where there are as many as at the beginning. The others that were asked for are kept where there is a plan that has them
and fits; where there is none, words are left out in the order of `GROUPS`, and those that go again are taken back, so
that no more is left out than must be. The batch stays what it was: so the steps are those of training that nobody
interrupted, under whatever plan they are made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from trainplan.cluster.cluster import Cluster
from trainplan.cluster.part import part
from trainplan.errors import PlanError, RunError
from trainplan.plan.plan import EXCHANGE_FIELDS, Plan, Request
from trainplan.plan.text import brief, text, title
from trainplan.predict.predict import Prediction, predict
from trainplan.profile.profile import Profile
from trainplan.search.columns import FIELDS, space
from trainplan.search.recommend import recommend
from trainplan.search.space import device_counts
from trainplan.search.wishes import Wishes
from trainplan.solve.limits import limited
from trainplan.solve.resolve import solve
from trainplan.units import percent, seconds, significant, some

COUNTED = ("dp", "spread", "ratio", "shard", "node")  # words that say how many workers there are, and of which kind
# What is left out next where nothing goes: first where things are, last how a step is trained. Never `memory`, which is
# a limit, and what would train another model (`precision`, `updates`).
GROUPS: tuple[tuple[str, ...], ...] = (
    ("stages", "placement", "partition", "away"),
    ("pp", "order", "slices", "tp", "sequence"),
    ("micro",),
    ("schedule", "chunks", "pairs"),
    ("exchange", "bucket", "servers", "bound", "split", *sorted({n for f in EXCHANGE_FIELDS.values() for n in f})),
    ("zero",),
    ("recompute", "preload", "offload", "overlap"),
)
WORTH = 0.01  # a step that is not shorter by so much is not worth starting again


@dataclass(frozen=True)
class Asked:
    """What a run was asked to do, before any worker came or went."""

    request: Request
    profile: Profile
    cluster: Cluster  # all devices that may have a worker
    batch: int
    workers: int  # that it was for

    def on(self, ranks: Sequence[int]) -> Cluster:
        """The cluster of the devices that have one."""
        return limited(part(self.cluster, ranks), self.request.memory)


@dataclass(frozen=True)
class Left:
    """Words that were asked for and are not kept, and why."""

    words: str
    why: str


@dataclass(frozen=True)
class Replanned:
    """What changes when workers come or go."""

    before: Prediction
    after: Prediction
    workers: tuple[int, int]  # before and now
    left: tuple[Left, ...]
    steps_lost: int = 0  # that were trained after the last checkpoint, and are trained again
    restart_s: float = 0.0  # that starting took the last time

    @property
    def plan(self) -> Plan:
        return self.after.plan

    @property
    def is_other(self) -> bool:
        """Whether there is a reason to train under another plan, while the one before still has all its workers."""
        if self.before.plan.world > self.workers[1]:
            return True
        return self.plan != self.before.plan and self.after.step_s < self.before.step_s * (1 - WORTH)

    @cached_property
    def lost_s(self) -> float:
        """Seconds that the change takes from training."""
        return self.steps_lost * self.before.step_s + self.restart_s

    def __str__(self) -> str:
        before, after, (was, now) = self.before, self.after, self.workers
        lines = [f"{row.words} is not kept: {row.why}" for row in self.left]
        used = f" on {after.plan.world} of them" if after.plan.world < now else ""
        change = after.step_s / before.step_s - 1
        word = "longer" if change > 0 else "shorter"
        lines.append(
            f"{was} → {some(now, 'worker')}: from {title(before.plan)} to {title(after.plan)}{used}, predicted "
            f"{seconds(before.step_s)} → {seconds(after.step_s)} a step ({percent(abs(change))} {word}); "
            f"the batch stays {some(after.batch, 'sample')}"
        )
        if self.steps_lost or self.restart_s:
            again = f"{some(self.steps_lost, 'step')} since the last checkpoint to train again"
            lines.append(f"that takes about {seconds(self.lost_s)}: {again}, and {seconds(self.restart_s)} to start")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        return {
            "workers": list(self.workers), "before": self.before.to_json(), "after": self.after.to_json(),
            "left": [{"words": row.words, "why": row.why} for row in self.left], "steps_lost": self.steps_lost,
            "restart_s": self.restart_s, "lost_s": self.lost_s,
        }  # fmt: skip


def replan(
    asked: Asked, before: Plan, was: Sequence[int], now: Sequence[int], steps_lost: int = 0, restart_s: float = 0.0
) -> Replanned:
    """The plan to go on with on the devices `now`, after `before` on those that there were.

    Refused where nothing fits on them, with the plan that comes nearest.
    """
    here, first = asked.on(now), predict(before, asked.profile, asked.on(was), asked.batch)
    counted = _words(asked.request, COUNTED)
    kept, left = asked.request, list[Left]()
    found = _best(asked, kept, here) if len(now) == asked.workers else None
    if not isinstance(found, Prediction):
        if counted:
            left = [Left(counted, _reason(found) if found else f"it was for {some(asked.workers, 'worker')}")]
        kept = replace(kept, **_without(COUNTED))
        found = _best(asked, kept, here)
    out, why = list[tuple[str, ...]](), dict[tuple[str, ...], PlanError]()
    while not isinstance(found, Prediction):
        rest = [group for group in GROUPS if group not in out and _words(kept, group)]
        if not rest:
            asking = f"going on with {some(len(now), 'worker')} and a batch of {asked.batch}"
            raise RunError(asking, f"no plan fits: {found.why or found.asked}", found.instead)
        why[rest[0]] = found
        out.append(rest[0])
        kept = replace(kept, key="", **_without(rest[0]))
        found = _best(asked, kept, here)
    for group in list(out[:-1]):  # the last one had to go
        again = replace(kept, **{field: getattr(asked.request, field) for field in group})
        other = _best(asked, again, here)
        if isinstance(other, Prediction):
            found, kept = other, again
            out.remove(group)
        else:
            why[group] = other
    left += [Left(_words(asked.request, group), _reason(why[group])) for group in out]
    return Replanned(first, found, (len(was), len(now)), tuple(left), steps_lost, restart_s)


def request_of(plan: Plan) -> Request:
    """What asks for a plan as it is, with nothing left open."""
    from trainplan.plan.text import parse

    return parse(text(plan))


def _best(asked: Asked, kept: Request, here: Cluster) -> Prediction | PlanError:
    """The fastest plan that fits and has all the words that are kept; or why there is none."""
    profile, batch = asked.profile, asked.batch
    given = {f.name: getattr(kept, f.name) for f in fields(kept) if f.name not in ("key", "memory")}
    given = {field: value for field, value in given.items() if value is not None}
    columns = [(field, value) for field, value in given.items() if field in FIELDS]
    most = here.world - (kept.servers or 0)
    if most < 1:
        why = f"{some(kept.servers or 0, 'server')} and somebody to serve, of {some(here.world, 'worker')} in all"
        return PlanError(f"servers={kept.servers}", why, "fewer servers")
    try:
        searched = _searched(asked, columns, here, most)
    except PlanError as error:
        return error
    if searched:
        try:
            found = recommend(profile, here, batch, wishes=Wishes(devices=most, fixed=tuple(columns)))
            best = found.best
        except PlanError as error:
            return error
        if len(columns) == len(given):
            return best
        shapes = [{field: getattr(row.prediction.plan, field) for field in FIELDS} for row in found.ranked]
    else:  # what is asked for is not searched: as many replicas of it as there can be
        shapes = [{"dp": count} for count in reversed(device_counts(here, most))]
    tried, refused = list[Prediction](), list[PlanError]()
    for shape in [{}, *shapes]:  # some solvers of cuts choose the rest themselves
        open_ones = {f: v for f, v in shape.items() if getattr(kept, f) is None and (v or f == "zero")}
        try:
            tried.append(solve(replace(kept, **open_ones), profile, here, batch))
        except PlanError as error:
            refused.append(error)
    fitting = sorted((p for p in tried if p.fits), key=lambda p: p.step_s)
    if fitting:
        return fitting[0]
    if not tried:
        return refused[-1]
    least = min(tried, key=lambda p: p.fullness)
    share = significant(least.fullness)
    why = f"its fullest device would need {share} × the memory that it may use"
    less = "recompute=full, or more workers" if least.plan.recompute == "none" else "more workers, or a smaller batch"
    return PlanError(brief(least.plan), why, less)


def _searched(asked: Asked, columns: Sequence[tuple[str, Any]], here: Cluster, most: int) -> bool:
    """Whether the search has plans with all these values."""
    whole = space(asked.profile, here, asked.batch, most_devices=most)
    for field, value in columns:
        keep = whole.having(field, value)
        if not keep.any():
            return False
        whole = whole.only(keep)
    return True


def _without(names: Sequence[str]) -> dict[str, Any]:
    return dict.fromkeys(names)


def _words(request: Request, names: Sequence[str]) -> str:
    """What a request says of these fields, in its own words."""
    none = {f.name: None for f in fields(request) if f.name not in ("key", *names)}
    return text(replace(request, key="", **none)) if any(getattr(request, n) is not None for n in names) else ""


def _reason(error: PlanError) -> str:
    return error.why or error.asked
