"""What we know of our own error: read from the measurements that are kept with the package."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files as package_files

from trainplan.plan.plan import Plan, Request
from trainplan.profile.profile import MIXED, Profile
from trainplan.units import seconds

ELSEWHERE = "machines of others"
HALF = ("bf16", "fp16")
FAR = 2.0  # times the largest micro-batch of a profile
APART = 3.0  # times shorter or longer than any step that was measured: what takes its time there is something else


@dataclass(frozen=True)
class Accuracy:
    """How far predictions of this kind were off where we measured them."""

    kind: str  # single, dp, or the order of work of a pipeline
    median: float | None  # relative; None: never measured
    worst: float | None
    runs: int
    source: str
    within: float | None = None  # nine of ten are no further off; None: told only of steps on machines of others

    @property
    def numbers(self) -> str:
        """Without the source."""
        if self.median is None or self.worst is None:
            return "not measured"
        if self.within is not None:
            return f"half within {self.median:.0%}, nine of ten within {self.within:.0%}, over {self.runs} steps"
        return f"median {self.median:.0%}, worst {self.worst:.0%} over {self.runs} runs"

    def __str__(self) -> str:
        return f"{self.numbers} ({self.source})"


def plan_kind(plan: Plan | Request) -> str:
    """The kind of plan that errors are grouped by: what is known of one order of work says nothing of another.

    >>> from trainplan.plan.text import parse
    >>> plan_kind(parse("dp=4")), plan_kind(parse("pp=2 schedule=1f1b")), plan_kind(parse("dp=2 pp=2 schedule=gpipe"))
    ('dp', '1f1b', 'dp × gpipe')
    >>> plan_kind(parse("dp=2,1,1 pp=3 schedule=1f1b")), plan_kind(parse("pp=2 schedule=gpipe recompute=full"))
    ('1f1b with replicated stages', 'gpipe with recompute')
    >>> plan_kind(parse("dp=4 zero=2"))
    'dp with zero=2'
    >>> plan_kind(parse("p3 dp=4"))
    'dp with exchange=p3'
    >>> plan_kind(parse("dp=4 zero=3 shard=2")), plan_kind(parse("zero-r dp=2")), plan_kind(parse("preload dp=2"))
    ('dp with zero=3 and shard', 'dp with zero=3 and offload', 'dp with preload')
    >>> plan_kind(parse("tp=8 precision=bf16"))
    'single with tp and precision=bf16'
    """
    replicas = (plan.dp or 1) > 1
    if (plan.pp or 1) == 1:
        kind = "dp" if replicas else "single"
    else:
        kind = f"dp × {plan.schedule}" if replicas else str(plan.schedule)
    how = plan.exchange or "all-reduce"
    more = [f"exchange={how}"] * (how != "all-reduce")
    more += ["replicated stages"] * bool(plan.spread) + ["recompute"] * ((plan.recompute or "none") != "none")
    more += ["tp"] * ((plan.tp or 1) > 1) + [f"precision={plan.precision}"] * ((plan.precision or "fp32") != "fp32")
    more += [f"zero={plan.zero}"] * bool(plan.zero) + ["shard"] * bool(plan.shard)
    more += ["offload"] * ((plan.offload or "none") != "none") + ["preload"] * (plan.preload == "on")
    return with_more(kind, *more)


def with_more(kind: str, *more: str) -> str:
    """A kind of plan with what is more of it; what is empty says nothing.

    >>> with_more("dp"), with_more("dp", "tp", ""), with_more("dp with tp", "preload")
    ('dp', 'dp with tp', 'dp with tp and preload')
    """
    words = [word for word in more if word]
    if not words:
        return kind
    return f"{kind} {'and' if ' with ' in kind else 'with'} {' and '.join(words)}"


def own_precision(profile: Profile, plan: Plan) -> str:
    """What a model computes in by itself, where that is not what the plan says: errors were measured of each apart."""
    if plan.precision in HALF:  # it says; and the profile may be that of a rank of the plan already
        return ""
    lowered = [precision for precision in (profile.products_in, profile.convolutions_in) if precision in HALF]
    if profile.precision in HALF or profile.precision.startswith(MIXED):
        return f"weights in {profile.precision}"
    if lowered:
        return f"autocast to {lowered[0]}"
    # What a measured profile multiplied in is the machine's own setting, and was the same in runs of its kind.
    tf32 = profile.kind == "estimated" and profile.products_in == "tf32"
    return "precision=tf32" if tf32 and plan.precision == "fp32" else ""


@cache
def _table() -> dict[str, dict[str, object]]:
    path = package_files("trainplan").joinpath("bench", "accuracy.json")
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def beyond(plan: Plan, profile: Profile, batch: int) -> Accuracy | None:
    """That nothing is known where micro-batches are far larger than any that was measured."""
    largest, measured = -(-batch // (plan.dp * plan.micro)), profile.samples[-1]
    if profile.kind != "measured" or largest <= FAR * measured:
        return None
    why = f"micro-batches of {largest}, and the profile is of {measured} at most (trainplan profile --batch {largest})"
    return Accuracy(plan_kind(plan), None, None, 0, why)


def known_error(
    plan: Plan, profile_kind: str, device: str = "cpu", compiled: bool = False, backend: str = "gloo", own: str = "",
    step_s: float | None = None,
) -> Accuracy:  # fmt: skip
    """The error that we measured for plans of this kind with such profiles: what was measured on CPUs says nothing of
    GPUs, eager blocks nothing of compiled ones, and one precision nothing of another. `own` is what the model computes
    in by itself (`own_precision`), `step_s` what a step is predicted to take: far from all that were measured their
    errors say nothing, since in short steps it is hosts and latencies that take the time.

    Nobody here has measured NCCL between devices, nor estimates but of one H200. What is told then is how far off
    predictions were for machines of others, as these have published them (`bench/published/elsewhere.py`). Of one
    device that was measured in other precisions it is said that it was not in this one.
    """
    kind = with_more(plan_kind(plan), own)
    way = f"{profile_kind} {device} {'compiled' if compiled else 'eager'} "
    row = _table().get(way + kind)
    apart = backend == "nccl" and plan.world > 1
    if (row is None or apart) and device != "cpu" and not compiled and (apart or profile_kind.startswith("estimated")):
        like = sorted(key.removeprefix(way) for key in _table() if key.startswith(way))
        if like and not apart:
            return Accuracy(kind, None, None, 0, f"such a profile ({device}: only {', '.join(like)})")
        row = _table().get(ELSEWHERE)
    if row is None:
        return Accuracy(kind, None, None, 0, "such a profile")
    if step_s is not None and (unlike := _unlike(row, step_s)):
        return Accuracy(kind, None, None, 0, unlike)
    within = float(row["within"]) if "within" in row else None  # type: ignore[arg-type]
    return Accuracy(kind, float(row["median"]), float(row["worst"]), int(row["runs"]), str(row["source"]), within)  # type: ignore[arg-type, call-overload]


def _unlike(row: dict[str, object], step_s: float) -> str:
    """Which steps were not measured, where this is one of them. (Of steps on machines of others it is not kept.)"""
    if "shortest_s" not in row:
        return ""
    shortest, longest = float(row["shortest_s"]), float(row["longest_s"])  # type: ignore[arg-type]
    if step_s < shortest / APART:
        return f"steps under {seconds(shortest / APART)}: the shortest took {seconds(shortest)}"
    if step_s > longest * APART:
        return f"steps over {seconds(longest * APART)}: the longest took {seconds(longest)}"
    return ""
