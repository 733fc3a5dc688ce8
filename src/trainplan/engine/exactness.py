"""The types in which a plan is held against one process, and how far apart the two may be there.

In float64 only the order of additions differs, and by next to nothing. But a model that casts, or makes tensors of its
own, may not run in it: then it is held in the types that it has, to their rounding. It is stepped by SGD there, since
Adam divides by the size of a gradient, and makes as much of rounding as of anything else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from trainplan.plan.plan import Plan
from trainplan.profile.arithmetic import NAMES
from trainplan.profile.capture.captured import Captured
from trainplan.profile.capture.verify import FLOOR, allowed_differences
from trainplan.profile.capture.verify import TOLERANCE as OF_A_PASS
from trainplan.workload.batch import each_tensor
from trainplan.workload.losses import in_type
from trainplan.workload.training import named_optimizer
from trainplan.workload.workload import Batch, Workload

TOLERANCE = 1e-9  # in float64
ROUNDING = 1e-5  # of losses and weights in float32, after a few steps of SGD; of gradients as of one pass (`verify`)


@dataclass(frozen=True)
class Exactness:
    """In which types, why not in float64, and what differences are allowed."""

    double: bool
    types: tuple[str, ...]  # that numbers with a fraction have
    why: str  # float64 is not one of them
    allowed: dict[str, float]  # by what is compared; "": all else
    against_own: float  # of the captured model and the user's own
    floor: float  # tensors with next to nothing in them are measured against the largest one times this

    def of(self, what: str) -> float:
        return self.allowed.get(what, self.allowed[""])

    def __str__(self) -> str:
        return "float64" if self.double else f"{' and '.join(self.types)}, stepped by SGD"

    def to_json(self) -> dict[str, Any]:
        return {"types": list(self.types), "why_not_float64": self.why, "floor": self.floor}


def in_float64(plan: Plan, captured: Captured) -> Exactness:
    own = allowed_differences(captured)[torch.float64]
    return Exactness(True, ("float64",), "", {"": allowed_under(plan, captured)}, own, 1e-6)


def in_own_types(captured: Captured, why: str) -> Exactness:
    """Of a model with 16-bit numbers anywhere, what those round."""
    types = _types(captured)
    coarsest = max(types, key=lambda dtype: OF_A_PASS[dtype])
    a_pass = OF_A_PASS[coarsest]
    finer = {"loss": ROUNDING, "weights": ROUNDING} if a_pass == OF_A_PASS[torch.float32] else {}
    allowed = {**finer, "": a_pass}
    names = tuple(str(dtype).removeprefix("torch.") for dtype in types)
    return Exactness(False, names, why, allowed, a_pass, FLOOR)


def allowed_under(plan: Plan, captured: Captured) -> float:
    """How far a plan may be from one process. Only slices of sequences sum in another order inside the model, too; and
    where it computes in float32 there (transformers' losses), that is the rounding of float32."""
    return allowed_differences(captured)[torch.float64] if plan.slices else TOLERANCE


def _types(captured: Captured) -> list[torch.dtype]:
    """Of all that the model holds, is given and makes."""
    made = [leaf for node in captured.flow.ops for leaf in pytree.tree_leaves(node.meta.get("val"))]
    found = {leaf.dtype for leaf in made if isinstance(leaf, Tensor)}
    found |= {held.dtype for held in captured.exported.held.values()}
    return sorted(found & NAMES.keys(), key=lambda dtype: OF_A_PASS[dtype])


def in_double(workload: Workload) -> Workload:
    """The same workload in float64, where equality can be asked for."""

    def batch(samples: int, seed: int) -> Batch:
        made = workload.inputs(samples, seed)
        return each_tensor(made, lambda t: t.double() if t.is_floating_point() else t)

    loss = in_type(workload.loss, torch.float64)
    return dataclasses.replace(workload, build=lambda: workload.build().double(), inputs=batch, loss=loss)


def by_descent(workload: Workload) -> Workload:
    """The same workload, stepped by SGD (its own, if it is that), so that rounding stays rounding."""
    plain = named_optimizer({"optimizer": "sgd", "lr": 0.01, "momentum": 0.9}, workload.name)[0]

    def optimizer(parameters: Iterable[Any]) -> torch.optim.Optimizer:
        given = list(parameters)
        own = workload.optimizer(given)
        return own if type(own) is torch.optim.SGD else plain(given)

    return dataclasses.replace(workload, optimizer=optimizer)
