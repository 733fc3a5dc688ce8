"""The answer of a search: plans with reasons, what does not fit, and what was done to find them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from trainplan.cluster.cluster import Cluster
from trainplan.errors import PlanError
from trainplan.plan.text import brief
from trainplan.predict.predict import Prediction
from trainplan.profile.profile import Profile
from trainplan.search.objective import TIME
from trainplan.search.predicted import not_asked
from trainplan.search.space import ALSO_LEFT_OUT, LEFT_OUT
from trainplan.search.wishes import Wishes
from trainplan.units import gib

Progress = Callable[[str, float], None]
TOP = 8  # plans that are shown
REJECTED = 5  # of those that do not fit


@dataclass(frozen=True)
class Ranked:
    """A plan that fits."""

    prediction: Prediction
    why: str

    def to_json(self) -> dict[str, Any]:
        return {**self.prediction.to_json(), "why": self.why}


@dataclass(frozen=True)
class Rejected:
    """A plan that does not fit, the best of its shape in that respect."""

    prediction: Prediction
    why: str
    change: str  # the smallest that makes it fit

    @property
    def over_bytes(self) -> int:
        return self.prediction.over_bytes

    def to_json(self) -> dict[str, Any]:
        return {**self.prediction.to_json(), "over_bytes": self.over_bytes, "why": self.why, "change": self.change}


@dataclass(frozen=True)
class Missed:
    """A plan that fits, and does not keep to what was asked for: the nearest there is."""

    prediction: Prediction
    by: str

    def to_json(self) -> dict[str, Any]:
        return {**self.prediction.to_json(), "by": self.by}


@dataclass(frozen=True)
class Recommendation:
    """Plans, best first, and what was said about them."""

    ranked: tuple[Ranked, ...]
    rejected: tuple[Rejected, ...]
    single: Prediction  # one device, the baseline
    note: str
    considered: int
    simulated: int
    left: int  # plans that might have been among the best when the search stopped
    floor_s: float | None  # what none of those can beat; None: there are none
    seconds: float
    batch: int
    profile: Profile = field(repr=False)
    cluster: Cluster = field(repr=False)
    # How many values each field of a plan has in the space, how many plans do not fit by their bounds alone, what no
    # plan that fits can beat, in units of the objective (before other cuts, buckets and exchanges are tried out for
    # those in the table), and how many may be better than the best that was found.
    sizes: dict[str, int] = field(default_factory=dict)
    too_big: int = 0
    bound: float | None = None
    better: int = 0
    gap: float | None = None  # how much better than the best there may be a plan, at most: 0 where there is none
    predicted: str = ""  # the precision in which plans were searched that are not yet run
    wishes: Wishes = field(default_factory=Wishes)
    missed: tuple[Missed, ...] = ()

    @property
    def bound_s(self) -> float | None:
        """What no plan that fits can beat as it is first cut, in seconds; None: another objective, or none fits."""
        return self.bound if self.wishes.best is TIME else None

    @property
    def left_out(self) -> list[str]:
        """What a plan could say and was not searched for, each with the reason, or with how to ask for it."""
        unasked = [] if self.predicted else not_asked(self.profile, self.cluster)
        return [*unasked, *(f"schedule={word} ({why})" for word, why in LEFT_OUT.items()), *ALSO_LEFT_OUT]

    @property
    def pruned(self) -> int:
        """Plans that cannot be among the best, by their bounds."""
        return self.considered - self.simulated - self.left

    @property
    def best(self) -> Prediction:
        """The winner."""
        if not self.ranked:
            if self.missed:
                near = self.missed[0]
                raise PlanError(
                    f"{self.profile.workload} on {self.cluster.name}, {self.wishes.words}",
                    f"the nearest plan, {brief(near.prediction.plan)}, {near.by}",
                    "more time or money, or other machines (trainplan budget)",
                )
            nearest = self.rejected[0]
            raise PlanError(f"{self.profile.workload} on {self.cluster.name}", nearest.why, nearest.change)
        return self.ranked[0].prediction

    def to_json(self) -> dict[str, Any]:
        return {
            "workload": self.profile.workload,
            "cluster": self.cluster.name,
            "batch": self.batch,
            **self.profile.epoch,
            "plans": [row.to_json() for row in self.ranked],
            "rejected": [row.to_json() for row in self.rejected],
            "single": self.single.to_json(),
            "note": self.note,
            "notes": list(self.profile.notes),
            "considered": self.considered,
            "simulated": self.simulated,
            "pruned": self.pruned,
            "left": self.left,
            "floor_s": self.floor_s,
            "seconds": self.seconds,
            "space": self.sizes,
            "too_big": self.too_big,
            "left_out": self.left_out,
            "objective": self.wishes.objective,
            "asked": self.wishes.words,
            "bound": self.bound,
            "bound_s": self.bound_s,
            "better": self.better,
            "missed": [row.to_json() for row in self.missed],
            "gap": self.gap,
        }


def overfull(p: Prediction) -> str:
    """Why a plan does not fit: whose memory is too small, when, and what takes most of it."""
    if p.occupancy is not None and p.tensors_fit:
        return f"rank {p.peak.rank}: {p.occupancy.words}"
    parts = {**p.peak.breakdown, "for the device's own libraries": p.peak_bytes - p.peak.bytes}
    largest = max(parts, key=lambda kind: parts[kind])
    return (
        f"rank {p.peak.rank} needs {gib(p.peak_bytes)} at {p.peak.op or 'the start'}, {gib(parts[largest])} of it "
        f"{largest}, and has {gib(p.limit_bytes)}"
    )
