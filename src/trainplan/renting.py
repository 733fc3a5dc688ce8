"""The public function about machines that are yet to be rented. It belongs to `trainplan.api`, which names it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainplan.errors import InputError
from trainplan.situation import Changes, has_profile, parts, refuse_fixed, situation

if TYPE_CHECKING:
    from trainplan.cluster.cluster import Cluster
    from trainplan.profile.profile import Profile
    from trainplan.report.market import Budgeted

COUNTS = ("1x", "2x", "4x", "8x", "2x8x", "4x8x")  # devices of one machine, and machines of eight


def budget(
    model: Any,
    deadline: str | float | None = None,
    budget: float | None = None,
    epochs: float = 1.0,
    machines: str = "",
    batch: int | None = None,
    top: int = 8,
    profile: str | Profile | None = None,
    framework: str = "",
    set: Changes = (),
    predicted: str = "",
    *,
    inputs: Any = None,
    loss: Any = None,
    optimizer: Any = None,
) -> Budgeted:
    """What to rent: the cheapest machines and plan within a `deadline` (such as 12h), or the fastest within a `budget`
    in USD, for so many `epochs`; with both, the cheapest that keeps to both.

    `machines` are short names of clusters with commas, such as 8xA100-80,2x8xH100-SXM; without it, every GPU of the
    catalogue that has a price, 1 to 32 of them. `framework`: only what it runs, and `predicted`:
    a precision, as in `recommend`."""
    from trainplan.report.lines import command
    from trainplan.report.market import Budgeted
    from trainplan.report.progress import progress
    from trainplan.search.market import market
    from trainplan.search.predicted import not_asked
    from trainplan.search.wishes import wishes_of

    if deadline is None and budget is None:
        why = "the cheapest is one device for as long as it takes, and the fastest all there are"
        raise InputError("trainplan budget", why, "--deadline 12h, or --budget 500")
    if top < 1:
        raise InputError(f"--top {top}", "at least one row must be asked for", "--top 5")
    wishes = wishes_of("money" if deadline is not None else "time", deadline, budget, epochs, runs_in=framework)
    given = parts(inputs, loss, optimizer)
    known: dict[str, Profile] = {}
    there: list[tuple[Profile, Cluster]] = []
    sizes: list[int] = []  # of the batch, which a model's name may say
    chosen = _machines(machines, model, profile)
    with progress() as report:
        for number, name in enumerate(chosen):
            report(f"profiling for {name}", number / len(chosen))
            cluster = _priced(name, set)
            device = cluster.device(0).name
            if device not in known:
                s = situation(model, cluster, batch, profile, (), None, given)
                known[device], sizes = s.profile, [*sizes, s.batch]
                refuse_fixed(known[device], set, saved=has_profile(model, profile))
            there.append((known[device], cluster))
        found = market(there, sizes[0], wishes, top, report, predicted)
    following = []
    if found.offers and isinstance(model, str):
        from trainplan.plan.text import text

        best = found.offers[0]
        changes = [f"{key}={value}" for key, value in set.items()] if hasattr(set, "items") else list(set)
        words = {"cluster": best.cluster.name, "batch": sizes[0], "set": changes, "profile": profile}
        words["compile"] = there[0][0].compiled
        following.append(command("explain", model, plan=text(best.prediction.plan), **words))
    first = found.offers[0].cluster if found.offers else there[0][1]
    unasked = not_asked(known[first.device(0).name], first) if not predicted else []
    return Budgeted(found, wishes, known[first.device(0).name], sizes[0], tuple(following), predicted, tuple(unasked))


def _machines(text: str, model: Any, profile: Any) -> list[str]:
    """Names of clusters; without any, every GPU that has a price, or the one that a profile is of."""
    from trainplan.cluster import catalogue
    from trainplan.profile.profile import Profile
    from trainplan.situation import is_profile

    known = profile if profile is not None else model if isinstance(model, Profile) or is_profile(model) else None
    of = None
    if known is not None:
        of = (known if isinstance(known, Profile) else Profile.load(known)).device
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        devices = [of] if of is not None else [name for name in catalogue.names("device") if name != "cpu"]
        priced = [name for name in devices if catalogue.has("device", name) and catalogue.device(name).price_per_hour]
        names = [f"{count}{name}" for name in priced for count in COUNTS]
    if not names:
        raise InputError(f"a profile of {of}", "what it costs is not known", "--machines 8xA100-80, and a model")
    from trainplan.cluster.parse import cluster

    for name in names:
        if of is not None and cluster(name).device(0).name != of:
            why = f"the profile is of {of}, and says nothing about other devices"
            raise InputError(f"--machines {name}", why, f"the model's name instead of its profile, or 8x{of}")
    return names


def _priced(name: str, set: Changes) -> Cluster:
    from trainplan.situation import cluster_for

    found = cluster_for(name, set)
    if not found.price_per_hour():
        raise InputError(f"--machines {name}", "what they cost is not known", "--set price=2.5 (for an hour of one)")
    return found
