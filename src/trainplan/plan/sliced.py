"""Ranks that share every stage between them (`tp`), other precisions and selective recomputation: what is legal.

These are predicted, and not yet run: a plan that has one of them is refused by whoever would run it (`check_runs`).
Whether a *model* can be shared by so many ranks is for its profile to say (`profile/variant.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainplan.errors import PlanError

if TYPE_CHECKING:
    from trainplan.plan.plan import Plan, Request
    from trainplan.profile.profile import Profile

SELECTIVE = "selective"


def check_sliced(plan: Plan, asked: str) -> None:
    """Refused where ranks that share stages do not go with the rest of a plan."""
    if plan.sequence == "on" and plan.tp < 2:
        why = "sequence=on has ranks share out by tokens what they do not slice, and tp=1 slices nothing"
        raise PlanError(asked, why, "tp=2 sequence=on, or sequence=off")
    if plan.tp == 1:
        return
    if plan.exchange != "all-reduce":
        why = f"exchange={plan.exchange} is for ranks with whole stages, and with tp={plan.tp} they have slices"
        raise PlanError(asked, why, "exchange=all-reduce, or tp=1")
    if plan.slices:
        why = "slices of a sequence carry the keys and values of whole layers, and ranks would have slices of these"
        raise PlanError(asked, why, "schedule=1f1b, or tp=1")


def check_sliced_model(plan: Plan, profile: Profile, asked: str) -> None:
    """Refused where a profile is not that of a rank of this plan: one of its variants is needed."""
    selective = SELECTIVE if plan.recompute == SELECTIVE else "none"
    is_of = {"tp": profile.tp, "sequence": profile.sequence, "recompute": profile.recompute}
    wants = {"tp": plan.tp, "sequence": plan.sequence, "recompute": selective}
    for field, wanted in wants.items():
        if is_of[field] != wanted:
            why = f"the profile is of ranks with {field}={is_of[field]}, and the plan has {field}={wanted}"
            raise PlanError(asked, why, "predict.planned.planned, which makes the profile of such a rank")


def check_runs(plan: Plan | Request) -> None:
    """Refused where a plan can be predicted, and not yet be run.

    >>> from trainplan.plan.plan import plan
    >>> check_runs(plan(tp=2))
    Traceback (most recent call last):
    trainplan.errors.PlanError: running tp=2: tp=2 is predicted, not yet run here. Try tp=1, or trainplan predict.
    """
    words = {
        f"tp={plan.tp}": (plan.tp or 1) > 1,
        f"precision={plan.precision}": plan.precision not in (None, "fp32"),
        f"recompute={plan.recompute}": plan.recompute == SELECTIVE,
    }
    asked = [word for word, given in words.items() if given]
    if asked:
        verb = "are" if len(asked) > 1 else "is"
        usual = {"tp": "tp=1", "precision": "precision=fp32", "recompute": "recompute=none"}
        instead = f"{' '.join(usual[word.partition('=')[0]] for word in asked)}, or trainplan predict"
        why = f"{' and '.join(asked)} {verb} predicted, not yet run here"
        raise PlanError(f"running {' '.join(asked)}", why, instead)
