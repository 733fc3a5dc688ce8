"""What exchanges that are decided while running ask of a plan and of a model."""

from __future__ import annotations

from trainplan.errors import PlanError
from trainplan.plan.plan import EXCHANGE_FIELDS, Plan
from trainplan.plan.text import brief
from trainplan.profile.profile import Profile

DECIDED = tuple(EXCHANGE_FIELDS)  # exchanges whose order is decided while running
BY_PRIORITY = ("p3", "bytescheduler", "pace")  # of these, those whose slices may go during the next forward pass
MOST_PARTS = 4096  # of the gradients of a step: each has its round
_LEAST: dict[str, float] = {"threshold": 0, "cycle": 1e-6, "slice": 1, "credit": 1}
_USUAL = {"threshold": "64MiB", "cycle": "5ms", "slice": "160000B", "credit": "16MB", "fused": "3,1,2"}


def check_decided(plan: Plan, asked: str) -> None:
    """An exchange that is decided while running has the numbers that it asks for, replicas, and whole passes."""
    own = EXCHANGE_FIELDS.get(plan.exchange, ())
    for field, usual in _USUAL.items():
        value = getattr(plan, field)
        if field not in own and value:
            others = [word for word, fields in EXCHANGE_FIELDS.items() if field in fields]
            instead = f"leaving {field} out, or exchange={others[0]}"
            raise PlanError(asked, f"{field} is a number of {' and '.join(others)}", instead)
        if field in own and field in _LEAST and value < _LEAST[field]:
            why = f"exchange={plan.exchange} wants {field} of {_LEAST[field]:g} or more, and it is {value:g}"
            raise PlanError(asked, why, f"{field}={usual}")
    if "fused" in own and (not plan.fused or min(plan.fused) < 1):
        why = "pace says how many gradients each fused tensor has, at least one"
        raise PlanError(asked, why, f"fused={_USUAL['fused']}, or leaving it open")
    if not own:
        return
    if not plan.replicated:
        raise PlanError(asked, f"with dp={plan.dp} there is nothing to exchange", "dp=2")
    if plan.exchange in BY_PRIORITY and plan.spread:
        why = f"exchange={plan.exchange} takes steps block by block as sums arrive, and of dp="
        why += f"{','.join(map(str, plan.spread))} some stages sum nothing"
        raise PlanError(asked, why, "as many ranks for every stage, or exchange=horovod")
    if plan.exchange in BY_PRIORITY and plan.recompute != "none":
        why = (
            f"under exchange={plan.exchange} a forward pass is an operation for each block, and one that is recomputed"
        )
        raise PlanError(asked, f"{why} keeps what its blocks read as a whole", "recompute=none, or exchange=horovod")
    if plan.lines > 1 and not plan.spread:
        why = f"{plan.schedule} completes two stages on two ranks in opposite orders, and the sums of each are decided"
        raise PlanError(asked, f"{why} apart: nothing puts them in one order", "schedule=1f1b, or exchange=all-reduce")
    if plan.schedule == "lockstep":
        why = "in lockstep nothing is exchanged while anything is computed, so there is nothing to decide meanwhile"
        raise PlanError(asked, why, "schedule=gpipe, or exchange=all-reduce")
    if plan.overlap == "off":
        why = f"exchange={plan.exchange} decides what to send while backward passes run"
        raise PlanError(asked, why, "overlap=on, or exchange=all-reduce")


def check_decided_model(plan: Plan, profile: Profile) -> None:
    """What such an exchange asks of the model."""
    asked = f"plan {brief(plan)!r} for {profile.workload}"
    own = [p for p in profile.parameters if p.trainable]
    if plan.exchange in BY_PRIORITY and profile.clip_norm > 0:
        why = (
            f"gradients are clipped to a norm of {profile.clip_norm:g} over all of them, and {plan.exchange} updates "
            "the first blocks while later ones are still being summed"
        )
        raise PlanError(asked, why, "exchange=horovod or all-reduce")
    stage_of = [stage for stage, bound in enumerate(plan.bounds) for _ in range(*bound)]
    shared = [p.name for p in own if len({stage_of[block] for block in p.blocks}) > 1]
    if plan.exchange in BY_PRIORITY and shared:
        why = (
            f"several stages hold {shared[0]}, whose gradients are summed over them when a step is over, and "
            f"{plan.exchange} takes its steps while the next one runs"
        )
        raise PlanError(asked, why, "exchange=horovod or all-reduce")
    if plan.exchange == "pace" and plan.fused and sum(plan.fused) != len(own):
        why = f"fused={','.join(map(str, plan.fused))} are {sum(plan.fused)} gradients, and the model has {len(own)}"
        raise PlanError(asked, why, "leaving it open")
    if plan.slice and sum(p.bytes for p in own) > plan.slice * MOST_PARTS:
        least = -(-sum(p.bytes for p in own) // MOST_PARTS)
        why = f"slices of {plan.slice} bytes are more than {MOST_PARTS}, and each has a round of its own"
        raise PlanError(asked, why, f"slice={least}B or more")
