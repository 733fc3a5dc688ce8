"""Which machines to rent: the cheapest within a deadline, or the fastest within a budget, over many clusters.

All plans of all clusters are bounded at once, as in any search; a cluster whose best bound is behind the last place is
not searched, and one none of whose plans can keep to what is asked is said to be so, with what it would take at least.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trainplan.cluster.cluster import Cluster
from trainplan.plan.plan import Plan
from trainplan.predict.predict import Prediction
from trainplan.profile.profile import Profile
from trainplan.search.answer import Progress
from trainplan.search.columns import space
from trainplan.search.floor import floors
from trainplan.search.objective import epoch_steps, prices
from trainplan.search.predicted import refuse
from trainplan.search.recommend import recommend
from trainplan.search.wishes import Wishes
from trainplan.units import seconds, significant


@dataclass(frozen=True)
class Offer:
    """The best plan on some machines."""

    cluster: Cluster
    prediction: Prediction


@dataclass(frozen=True)
class Refused:
    """Machines on which nothing keeps to what was asked."""

    cluster: Cluster
    why: str
    least_s: float  # that all epochs take, whatever they cost
    least_usd: float  # … cost, however long they take


@dataclass(frozen=True)
class Market:
    """What can be rented for what was asked, best first."""

    offers: tuple[Offer, ...]
    refused: tuple[Refused, ...]  # nearest first
    passed: tuple[str, ...]  # machines that are not among the best, mostly by their bounds
    considered: int  # plans


def market(
    machines: Sequence[tuple[Profile, Cluster]],
    batch: int,
    wishes: Wishes,
    top: int,
    progress: Progress,
    predicted: str = "",
) -> Market:
    """The best plan on each of some clusters, as far as they come among the `top` best. `predicted`: a precision, as
    for `recommend`; devices that do not have it are refused."""
    bounded, refused, considered = [], list[Refused](), 0
    for number, (profile, cluster) in enumerate(machines):
        progress(f"bounding plans on {cluster.name}", number / len(machines) / 2)
        wishes.check(cluster)
        if predicted:
            refuse(profile, cluster, predicted)
        without = [name for name, kind in cluster.kinds.items() if predicted and predicted not in kind.flops]
        if without:
            refused.append(Refused(cluster, f"{without[0]} does not compute in {predicted}", np.inf, np.inf))
            continue
        whole = wishes.allowed(space(profile, cluster, batch, predicted or "fp32", bool(predicted), wishes.devices))
        known = floors(whole)
        considered += len(whole)
        fits = known.fits & np.isfinite(known.seconds)
        least = known.seconds[fits] * epoch_steps(whole) * wishes.epochs
        cost = least / 3600 * prices(whole)[fits]
        least_s, least_usd = float(least.min(initial=np.inf)), float(cost.min(initial=np.inf))
        may = fits & wishes.possible(whole, known)
        if may.any():
            bound = float(wishes.best.floor(whole, known)[may].min())
            bounded.append((bound, number, least_s, least_usd))
        else:
            refused.append(Refused(cluster, _cannot(least_s, least_usd), least_s, least_usd))
    found, passed, offered = list[tuple[float, Offer]](), list[str](), set[tuple[str, Plan, float]]()
    for place, (bound, number, least_s, least_usd) in enumerate(sorted(bounded)):  # of those alike, the first named
        profile, cluster = machines[number]
        progress(f"searching {cluster.name}", 0.5 + place / len(bounded) / 2)
        if len(found) >= top and bound >= sorted(value for value, _ in found)[top - 1]:
            passed.append(cluster.name)
            continue
        answer = recommend(profile, cluster, batch, top=1, predicted=predicted, wishes=wishes)
        if answer.ranked:
            best = answer.best
            rented = profile.device, best.plan, cluster.price_per_hour(best.plan.world)
            if rented in offered:  # what it needs of these machines is less, and was offered by itself
                passed.append(cluster.name)
                continue
            offered.add(rented)
            found.append((wishes.best.value(best), Offer(cluster, best)))
        else:
            why = "; ".join(row.by for row in answer.missed) or answer.rejected[0].why
            refused.append(Refused(cluster, why, least_s, least_usd))
    found.sort(key=lambda pair: pair[0])
    passed += [offer.cluster.name for _, offer in found[top:]]
    near = sorted(refused, key=lambda row: row.least_s if wishes.deadline is not None else row.least_usd)
    return Market(tuple(offer for _, offer in found[:top]), tuple(near), tuple(passed), considered)


def _cannot(least_s: float, least_usd: float) -> str:
    if not np.isfinite(least_s):
        return "no plan fits"
    return f"takes at least {seconds(least_s)}, and costs at least {significant(least_usd)} USD"
