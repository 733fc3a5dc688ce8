"""What is asked of a plan beside that it fits: what shall be best, and what it must keep to.

objective     time, money or memory (`objective.py`); accuracy, with a study (`staleness.py`)
deadline      seconds in which all epochs are trained
budget        USD that all epochs may cost
devices       that it may use at most
framework     one that must be able to run it (`frameworks.py`)
synchronous   no plan in which anybody computes with weights that others have changed meanwhile
"""

from __future__ import annotations

from dataclasses import dataclass

from trainplan.cluster.cluster import Cluster
from trainplan.errors import PlanError
from trainplan.predict.predict import Prediction
from trainplan.search.columns import Space
from trainplan.search.frameworks import Framework
from trainplan.units import seconds, significant, some


@dataclass(frozen=True)
class Wishes:
    """What is asked; what is not said is free."""

    objective: str = "time"
    deadline: float | None = None  # seconds
    budget: float | None = None  # USD
    epochs: float = 1.0  # that both are for
    devices: int | None = None
    framework: Framework | None = None
    synchronous: bool = False

    def check(self, cluster: Cluster) -> None:
        """Refused where it cannot be asked."""
        for name, value, example in (
            ("deadline", self.deadline, "12h"), ("budget", self.budget, "500"), ("epochs", self.epochs, "90"),
            ("devices", self.devices, "8"),
        ):  # fmt: skip
            if value is not None and value <= 0:
                raise PlanError(f"--{name} {value:g}", "it is more than nothing", f"--{name} {example}")
        if self.devices is not None and self.devices > cluster.world:
            why = f"{cluster.name} has {some(cluster.world, 'device')}"
            raise PlanError(f"--devices {self.devices}", why, f"--devices {cluster.world}")
        if (self.budget is not None or self.objective == "money") and not cluster.price_per_hour():
            asked = f"--budget {self.budget:g}" if self.budget is not None else "--objective money"
            why = f"what an hour of the machines of {cluster.name} costs is not known"
            raise PlanError(asked, why, "--set price=2.5 (USD for an hour of one device)")

    def meets(self, p: Prediction) -> bool:
        """Whether a plan that fits keeps to what was asked."""
        late = self.deadline is not None and p.epoch_s * self.epochs > self.deadline
        dear = self.budget is not None and (p.price_per_epoch or 0.0) * self.epochs > self.budget
        return not late and not dear

    def allowed(self, space: Space) -> Space:
        """The plans that may be asked for."""
        if self.framework is None:
            return space
        keep = self.framework.runs(space)
        if not keep.any():
            raise PlanError(f"--for {self.framework.name}", "it runs none of the plans that there are here", "no --for")
        return space.only(keep)

    def misses(self, p: Prediction) -> str:
        """By how much a plan misses what was asked for."""
        said = []
        if self.deadline is not None and p.epoch_s * self.epochs > self.deadline:
            said.append(f"takes {seconds(p.epoch_s * self.epochs)}, and there are {seconds(self.deadline)}")
        price = (p.price_per_epoch or 0.0) * self.epochs
        if self.budget is not None and price > self.budget:
            said.append(f"costs {significant(price)} USD, and there are {significant(self.budget)}")
        return " and ".join(said)

    @property
    def words(self) -> str:
        """All that was asked, in a line; nothing where it is as usual."""
        of = f" for {self.epochs:g} epochs" if self.epochs != 1 else " for an epoch"
        said = [
            f"objective {self.objective}" if self.objective != "time" else "",
            f"within {seconds(self.deadline)}{of}" if self.deadline is not None else "",
            f"for at most {significant(self.budget)} USD{of}" if self.budget is not None else "",
            f"on at most {some(self.devices, 'device')}" if self.devices is not None else "",
            f"what {self.framework.name} runs ({self.framework.source})" if self.framework is not None else "",
            "only synchronous" if self.synchronous else "",
        ]
        return ", ".join(filter(None, said))
