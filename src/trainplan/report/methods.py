"""The answer of `recommend` by another method than ours: what it is, what it says, and what ours says of the same."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from trainplan.report.table import milliseconds, table


@dataclass(frozen=True)
class Proposal:
    """A plan as a method sees it."""

    plan: str
    step_s: float
    model_s: float  # by our own prediction
    why: str


@dataclass(frozen=True)
class Chosen:
    """Plans by one of the thesis's methods, the fastest first."""

    method: str
    how: str  # how it decides, and what it had to decide by
    workload: str
    cluster: str
    batch: int
    proposals: tuple[Proposal, ...]
    dropped: tuple[tuple[str, str], ...] = ()  # what was asked for, and why it is out
    next: tuple[str, ...] = ()  # commands

    def __str__(self) -> str:
        lines = [f"model    {self.workload}, batch {self.batch:,}", f"cluster  {self.cluster}"]
        lines += [f"method   {self.method}: {self.how}", ""]
        rows = [
            [str(place), p.plan, milliseconds(p.step_s), milliseconds(p.model_s), p.why]
            for place, p in enumerate(self.proposals, 1)
        ]
        lines.append(table([">#", "plan", ">step ms", ">by our model", "why"], rows, lines=True))
        ours = min(self.proposals, key=lambda p: p.model_s)
        if ours.plan != self.proposals[0].plan:
            lines += ["", f"of these, our model (--method model) takes {ours.plan} for the fastest"]
        lines += ["", "not considered"] * bool(self.dropped)
        for why in dict.fromkeys(why for _, why in self.dropped):
            lines.append(f"  {', '.join(asked for asked, its in self.dropped if its == why)}: {why}")
        return "\n".join([*lines, *(f"next     {line}" for line in self.next)])

    def to_json(self) -> dict[str, Any]:
        return {
            "method": self.method, "how": self.how, "workload": self.workload, "cluster": self.cluster,
            "batch": self.batch, "plans": [asdict(proposal) for proposal in self.proposals],
            "dropped": [{"plan": asked, "why": why} for asked, why in self.dropped], "next": list(self.next),
        }  # fmt: skip
