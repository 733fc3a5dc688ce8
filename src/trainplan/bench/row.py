"""One plan that was predicted and run: the row that measurements are kept as. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Difference:
    """One operation of one rank: predicted beside measured, in seconds of the step that only it accounts for."""

    name: str
    rank: int
    predicted_s: float
    measured_s: float


@dataclass(frozen=True)
class Row:
    """One plan of one workload: predicted beside measured."""

    workload: str
    plan: str
    kind: str
    ranks: int
    batch: int
    predicted_s: float
    measured_s: float
    error: float  # at the speed that the reference kernel shows: (predicted − measured) / measured
    raw_error: float
    noise_floor: float
    steps: int
    by_kind: dict[str, tuple[float, float]]  # kind of operation → predicted and measured seconds a step, mean rank
    asked: str = ""  # the request that the plan was made from
    rounds: tuple[float, ...] = ()  # the error of every round by itself
    worst: tuple[Difference, ...] = ()  # the operations that are furthest off
    drift: float = 0.0  # how much longer the reference kernel took than when the profile was made; 0: not kept
    # By kind of operation, measured seconds a step and a mean rank, whatever else went on meanwhile; none: not kept.
    spent: dict[str, float] = field(default_factory=dict)
