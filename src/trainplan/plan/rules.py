"""What is legal, with the reason. One function a rule; `check` raises the first that is broken.

These are the rules that need only the plan, the number of blocks and the batch. Whether a plan fits in memory is for
`predict` to say.
"""

from __future__ import annotations

import itertools

from trainplan.errors import PlanError, nearest
from trainplan.plan.plan import WORDS, Plan
from trainplan.plan.text import text


def check(plan: Plan, batch: int, world: int | None = None) -> Plan:
    """The plan itself, if it is legal for this batch and this many devices."""
    asked = f"plan {text(plan)!r}"
    for field, words in WORDS.items():
        word = getattr(plan, field)
        if word not in words:
            why = f"{field} is one of {', '.join(words)}, not {word}"
            raise PlanError(asked, why, f"{field}={nearest(word, words, 1)}")
    for field in ("dp", "pp", "micro", *(("bucket",) if plan.dp > 1 else ())):
        if getattr(plan, field) < 1:
            raise PlanError(asked, f"{field} counts from 1, and is {getattr(plan, field)}", f"{field}=1")
    if plan.pp == 1 and plan.schedule != "naive":
        raise PlanError(asked, "an order of work between stages needs several stages", "pp=2, or no schedule")
    _stages(plan, asked)
    _placement(plan, asked)
    _devices(plan, asked, world)
    _batch(plan, asked, batch)
    return plan


def _stages(plan: Plan, asked: str) -> None:
    if plan.pp > plan.blocks:
        raise PlanError(asked, f"{plan.pp} stages, but the model has only {plan.blocks} blocks", f"pp={plan.blocks}")
    if len(plan.stages) != plan.pp - 1:
        why = f"{plan.pp} stages need {plan.pp - 1} cuts, {len(plan.stages)} are given"
        raise PlanError(asked, why, "leaving stages open")
    edges = (0, *plan.stages, plan.blocks)
    if any(b <= a for a, b in itertools.pairwise(edges)):
        why = f"cuts must rise from 1 to {plan.blocks - 1}, so that each stage has at least one block"
        raise PlanError(asked, why, "leaving stages open")


def _placement(plan: Plan, asked: str) -> None:
    default = "leaving the placement out"
    if len(plan.placement) != plan.dp or any(len(pipeline) != plan.pp for pipeline in plan.placement):
        sizes = ", ".join(str(len(pipeline)) for pipeline in plan.placement)
        why = f"a placement for dp={plan.dp} pp={plan.pp} has {plan.dp} × {plan.pp} entries, and this one has {sizes}"
        raise PlanError(asked, why, default)
    several = [stage for pipeline in plan.placement for stage in pipeline if len(stage) != 1]
    if several:
        raise PlanError(asked, f"a stage runs on one rank, and one is placed on {len(several[0])}", default)
    ranks = [rank for pipeline in plan.placement for stage in pipeline for rank in stage]
    if sorted(ranks) != list(range(len(ranks))):
        why = f"a placement uses every rank from 0 to {len(ranks) - 1} once, and this one uses {sorted(ranks)}"
        raise PlanError(asked, why, default)


def _devices(plan: Plan, asked: str, world: int | None) -> None:
    if world is not None and plan.world > world:
        fits = [f"dp={dp} pp={pp}" for dp in range(plan.dp, 0, -1) for pp in range(plan.pp, 0, -1) if dp * pp <= world]
        why = f"it needs {plan.dp} × {plan.pp} = {plan.world} devices, and there are {world}"
        raise PlanError(asked, why, fits[0])


def _batch(plan: Plan, asked: str, batch: int) -> None:
    if batch < 1:
        raise PlanError(f"batch {batch}", "a batch has at least one sample", "--batch 32")
    need = plan.dp * plan.micro
    if batch < need:
        why = f"a batch of {batch} samples cannot be split over {plan.dp} replica(s) × {plan.micro} micro-batch(es)"
        instead = f"--batch {need}" if plan.micro == 1 or batch < plan.dp else f"micro={batch // plan.dp}"
        raise PlanError(asked, why, instead)


def split(samples: int, parts: int) -> tuple[int, ...]:
    """Sizes as equal as possible, the larger ones first: how a batch becomes replicas, and those micro-batches.

    >>> split(10, 4)
    (3, 3, 2, 2)
    """
    small, larger = divmod(samples, parts)
    return (small + 1,) * larger + (small,) * (parts - larger)


def micro_batches(plan: Plan, batch: int) -> tuple[tuple[int, ...], ...]:
    """For every replica the sizes of its micro-batches.

    >>> from trainplan.plan.plan import plan
    >>> micro_batches(plan(dp=2, micro=2), 7)
    ((2, 2), (2, 1))
    """
    return tuple(split(samples, plan.micro) for samples in split(batch, plan.dp))
