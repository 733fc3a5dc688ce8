"""Offloading: what of a plan goes to the host's memory while nobody reads it, and where that is possible.

`offload=activations`: what forward passes save for backward goes away, section by section of a stage (runs of blocks:
`program/lower/units.py`), and comes back before the backward pass reads it. Backward comes to the first sections last,
so these go first, and how much goes is a number: of each stage, and of each of its micro-batches, the first so many
sections. One number for a stage says the same of all its micro-batches.

`offload=partitioned` is for ranks that share stages (`tp`), which all read the same: of what recomputed blocks read
each rank keeps a share, and they gather it before they compute a block again. Nothing goes to the host, and what comes
from other stages stays whole.

    away=3          of a single stage, the first 3 sections of every micro-batch
    away=4x2,1:0    of the first of two stages, 4 sections of two micro-batches and 1 of a third; of the second none

>>> parse_away("4x2,1:0", "")
((4, 4, 1), (0,))
>>> away_text(((4, 4, 1), (0,))), shortest(((2, 2), (0, 1)))
('4x2,1:0', ((2,), (0, 1)))
"""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING

from trainplan.errors import PlanError
from trainplan.units import some

if TYPE_CHECKING:
    from trainplan.plan.plan import Plan

Away = tuple[tuple[int, ...], ...]  # stage → micro-batch → sections; one entry: the same of every micro-batch
# Orders of work in which every pass is whole, and every stage has one copy in a replica.
ORDERS = ("naive", "gpipe", "1f1b", "1f1b-early", "looped", "interleaved")
PARTITIONED = "partitioned"
_RUN = re.compile(r"(\d+)(?:x(\d+))?")


def parse_away(text: str, asked: str) -> Away:
    """What a line says of it."""
    stages = []
    for stage in text.split(":"):
        runs = [_RUN.fullmatch(word) for word in stage.split(",")]
        if not all(runs):
            why = "the sections that go, of every stage and micro-batch, were expected"
            raise PlanError(asked, why, "away=3, or away=4x2,1:0")
        stages.append(tuple(int(run[1]) for run in runs if run for _ in range(int(run[2] or 1))))
    return shortest(tuple(stages))


def away_text(away: Away) -> str:
    """The shortest words for it."""
    stages = []
    for stage in away:
        runs = [(number, len(list(same))) for number, same in itertools.groupby(stage)]
        stages.append(",".join(f"{number}x{count}" if count > 1 else str(number) for number, count in runs))
    return ":".join(stages)


def shortest(away: Away) -> Away:
    """The same, with one number for a stage whose micro-batches are alike; nothing where nothing goes."""
    found = tuple(tuple(stage[:1] if len(set(stage)) == 1 else stage) for stage in away)
    return found if any(any(stage) for stage in found) else ()


def check_partitioned(plan: Plan, asked: str) -> None:
    """ZeRO-R's other half (P_a): what blocks that are recomputed read, a share of it on each rank of `tp`."""
    if plan.away:
        why = "away says what goes to the host, and what is partitioned stays on the devices"
        raise PlanError(asked, why, "leaving away out")
    if plan.tp < 2:
        why = (
            "activations can be partitioned only among ranks that have the same ones, which are those of tensor "
            "parallelism; replicas of a model have those of their own samples"
        )
        raise PlanError(asked, why, "offload=activations, or tp=2 recompute=full")
    if plan.recompute not in ("full", "except-last"):
        why = f"what is partitioned is what blocks read that are recomputed, and recompute={plan.recompute} keeps more"
        raise PlanError(asked, why, "recompute=full, or offload=none")
    if plan.sequence == "on":
        why = (
            "with sequence=on each rank has its own tokens of what blocks read, and there is nothing left to partition"
        )
        raise PlanError(asked, why, "offload=none, or sequence=off")


def check_offload(plan: Plan, asked: str) -> None:
    """Refused where nothing can go away as asked."""
    if plan.offload == "none":
        if plan.away:
            raise PlanError(asked, "away says how much is offloaded, and nothing says what", "offload=activations")
        return
    if plan.offload == PARTITIONED:
        check_partitioned(plan, asked)
        return
    if plan.schedule not in ORDERS or plan.lines > 1:
        what = "stages with several copies in a replica" if plan.schedule in ORDERS else f"schedule={plan.schedule}"
        why = f"what passes save goes away section by section, in orders of whole passes, and {what} has others"
        raise PlanError(asked, why, f"schedule=1f1b, or another of {', '.join(ORDERS[1:])}")
    if plan.tp > 1:
        why = f"the ranks of tp={plan.tp} share a stage between them, and who of them copies what is not built yet"
        raise PlanError(asked, why, "tp=1, or offload=none")
    if plan.exchange in _OTHERWISE:
        why = f"exchange={plan.exchange} cuts backward passes where gradients are sent, not into sections"
        raise PlanError(asked, why, "exchange=all-reduce, or zero=3")
    if not plan.away or (not plan.stages and plan.pp > 1):  # open, or not cut yet
        return
    if len(plan.away) != plan.depth:
        why = f"away has {some(len(plan.away), 'stage')}, and the plan {plan.depth}"
        raise PlanError(asked, why, f"away={':'.join(['1'] * plan.depth)}, or leaving it open")
    for stage in plan.away:
        if len(stage) not in (1, plan.micro):
            why = f"away has {len(stage)} numbers for a stage, and there are {some(plan.micro, 'micro-batch')}"
            raise PlanError(asked, why, f"one number for all of them, or {plan.micro}")


# Where gradients are sent bit by bit while a pass goes on (`decided.py`, `served.py`).
_OTHERWISE = ("horovod", "p3", "bytescheduler", "pace", "dataparallel", "ps-bsp", "ps-asp", "ssp", "dssp")
