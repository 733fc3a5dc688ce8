"""The answer of `budget`: machines to rent, with what they cost by whose prices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainplan.plan.text import text, title
from trainplan.predict.predict import Prediction
from trainplan.profile.profile import Profile
from trainplan.report.lines import epoch_words, error_line, model_line
from trainplan.report.table import gib_number, milliseconds, number, table
from trainplan.search.market import Market
from trainplan.search.wishes import Wishes
from trainplan.units import seconds, significant

_REFUSED = 5  # that are shown


@dataclass(frozen=True)
class Budgeted:
    """What to rent for a deadline or a budget."""

    market: Market
    wishes: Wishes
    profile: Profile  # on the machines that come first
    batch: int
    next: tuple[str, ...] = ()  # commands
    predicted: str = ""  # the precision in which plans were searched that are not yet run
    unasked: tuple[str, ...] = ()  # what was not searched since nobody asked

    def __str__(self) -> str:
        found = self.market
        best = "the cheapest" if self.wishes.objective == "money" else "the fastest"
        searched = len(found.offers) + len(found.refused)
        lines = [model_line(self.profile, self.batch), f"asked    {best}, {self._asked}"]
        lines.append(f"epoch    {epoch_words(self.profile)}")
        where = f"{searched + len(found.passed)} kinds and numbers of machines"
        passed = f"{len(found.passed)} of these are not among the best"
        lines.append(f"search   {found.considered:,} plans on {where} bounded; {passed}")
        lines += [f"         not searched: {what}" for what in self.unasked]
        if self.predicted:
            lines.append("         tp, sequence, precision and recompute=selective are predicted, not yet run here")
        if found.offers:
            lines += ["", self._offers(), "", *self._prices(), error_line(offer.prediction for offer in found.offers)]
        else:
            lines += ["", "nothing that can be rented keeps to it"]
        if found.refused and len(found.offers) < 2:
            lines += ["", "does not keep to it"]
            lines += [f"  {row.cluster.name}: {row.why}" for row in found.refused[:_REFUSED]]
        elif found.refused:
            lines.append(f"         {len(found.refused)} of these machines do not keep to it, whatever the plan")
        return "\n".join([*lines, *(f"next     {line}" for line in self.next)])

    @property
    def _asked(self) -> str:
        return self.wishes.words.removeprefix(f"objective {self.wishes.objective}, ")

    def _offers(self) -> str:
        of = f"{self.wishes.epochs:g} epochs" if self.wishes.epochs != 1 else "an epoch"
        headers = [">#", "machines", "plan", ">devices", ">step ms", f">{of}", ">USD", ">USD/hour", ">peak GiB"]
        rows = [
            [
                str(place), offer.cluster.name, title(p.plan), str(p.plan.world), milliseconds(p.step_s),
                seconds(p.epoch_s * self.wishes.epochs), number(self._usd(p)),
                number(offer.cluster.price_per_hour(p.plan.world)), gib_number(p.peak_bytes),
            ]
            for place, offer in enumerate(self.market.offers, 1) for p in [offer.prediction]
        ]  # fmt: skip
        return table(headers, rows, lines=True)

    def _usd(self, p: Prediction) -> float:
        return (p.price_per_epoch or 0.0) * self.wishes.epochs

    def _prices(self) -> list[str]:
        """Whose they are, and of when: once for each device."""
        devices = {offer.cluster.device(0).name: offer.cluster for offer in self.market.offers}
        lines = []
        for name, cluster in devices.items():
            node, device = cluster.nodes[0], cluster.device(0)
            source = node.sources.get("price_per_hour") if node.price_per_hour else device.sources.get("price")
            price, of = (node.price_per_hour, "a machine") if node.price_per_hour else (device.price_per_hour, "one")
            lines.append(f"price    {name}: {significant(price)} USD an hour of {of} ({source or 'given'})")
        return lines

    def to_json(self) -> dict[str, Any]:
        return {
            "workload": self.profile.workload,
            "batch": self.batch,
            **self.profile.epoch,
            "asked": self.wishes.words,
            "offers": [
                {
                    "machines": offer.cluster.name, "plan": text(offer.prediction.plan),
                    "step_s": offer.prediction.step_s, "seconds": offer.prediction.epoch_s * self.wishes.epochs,
                    "usd": self._usd(offer.prediction), "devices": offer.prediction.plan.world,
                    "peak_bytes": offer.prediction.peak_bytes,
                }
                for offer in self.market.offers
            ],
            "refused": [{"machines": row.cluster.name, "why": row.why} for row in self.market.refused],
            "passed": list(self.market.passed),
            "considered": self.market.considered,
            "predicted": self.predicted,
            "left_out": list(self.unasked),
            "next": list(self.next),
        }  # fmt: skip
