"""What plans have to know of a model's optimizer: whether it may be given a part of the weights at a time.

A profile has the name of its class, in small letters; "": nobody looked.
"""

from __future__ import annotations

from trainplan.errors import PlanError
from trainplan.plan.decided import BY_PRIORITY
from trainplan.plan.plan import Plan
from trainplan.profile.profile import Profile

# Of torch's optimizers those that treat every element alone, and make their state when they first step.
ELEMENTWISE = ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adadelta", "Rprop", "ASGD")
# … and those that treat every tensor alone.
TENSOR_BY_TENSOR = (*ELEMENTWISE, "Adagrad")


def shares(optimizer: str) -> bool:
    """Whether ranks can have some elements each of what such an optimizer steps.

    >>> shares("adamw"), shares("adagrad"), shares("")
    (True, False, True)
    """
    return not optimizer or optimizer in {name.lower() for name in ELEMENTWISE}


def check_optimizer(plan: Plan, profile: Profile, asked: str) -> None:
    """Refused where a plan gives the optimizer less at a time than it needs."""
    name = profile.optimizer
    if plan.zero and not shares(name):
        why = (
            f"each rank steps a run of elements, and its optimizer, {name}, is not known to treat every element of a "
            "weight alone"
        )
        raise PlanError(asked, why, f"zero=0, or one of {', '.join(ELEMENTWISE)}")
    if plan.exchange in BY_PRIORITY and name and name not in {known.lower() for known in TENSOR_BY_TENSOR}:
        why = f"its optimizer is {name}, which may look at several weights at once, and they are updated block by block"
        raise PlanError(asked, why, f"exchange=all-reduce, or one of {', '.join(TENSOR_BY_TENSOR)}")
