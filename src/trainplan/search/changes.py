"""The smallest change that makes a plan fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from trainplan.plan.plan import Plan, usual_placement
from trainplan.predict.predict import Prediction
from trainplan.search.space import sent_away, shared_out
from trainplan.solve.shape import micro_counts
from trainplan.units import gib

_WORTH_PLAYING = 50_000  # operations on a rank; beyond them a hint is not worth the wait
Try = Callable[[Plan, int], Prediction | None]  # (sketch, batch) → its prediction; None where it is not legal


def smallest_change(rejected: Prediction, world: int, attempt: Try) -> str:
    """What to type, and the peak that it leads to; or how much memory the plan needs where nothing helps.

    In this order: more micro-batches, recomputation, states shared out by replicas, an order of work that holds less,
    more stages (with fewer replicas where devices are short), these together, activations offloaded, and at last a
    smaller batch.
    """
    for words, sketch in _changes(rejected.plan, world):
        found = _fewest(sketch, rejected.batch, attempt)
        if found is not None:
            more = f" micro={found.plan.micro}" if found.plan.micro != rejected.plan.micro else ""
            return f"{words}{more} (peak {gib(found.peak_bytes)})".strip()
    batch = rejected.batch // 2
    while batch >= rejected.plan.dp * rejected.plan.micro:
        found = attempt(rejected.plan, batch)
        if found is not None and found.fits:
            return f"--batch {batch} (peak {gib(found.peak_bytes)})"
        batch //= 2
    return more_memory(rejected)


def more_memory(rejected: Prediction) -> str:
    """Where no change of a plan helps."""
    return f"devices with {gib(rejected.over_bytes)} more memory, or more of them"


def _changes(plan: Plan, world: int) -> Iterator[tuple[str, Plan]]:
    uncut = replace(plan, stages=(), away=())
    yield "", uncut
    if plan.recompute == "none":
        yield "recompute=full", replace(uncut, recompute="full")
    for shared in shared_out(uncut) if not plan.zero else ():
        yield f"zero={shared.zero}", shared
    if plan.schedule not in ("naive", "1f1b"):
        changed = replace(uncut, schedule="1f1b", chunks=1, pairs=1)
        one = "".join(f" {field}=1" for field in ("chunks", "pairs") if getattr(plan, field) > 1)
        yield f"schedule=1f1b{one}", replace(changed, placement=usual_placement(changed))
    for pp in range(plan.pp + 1, min(world, plan.blocks) + 1):
        dp = min(plan.dp, world // pp)
        deeper = _reshaped(uncut, dp, pp)
        words = f"pp={pp}" + (f" dp={dp}" if dp != plan.dp else "")
        yield words, deeper
        if plan.recompute == "none":
            yield f"{words} recompute=full", replace(deeper, recompute="full")
    for away in sent_away(uncut) if plan.offload == "none" else ():
        yield f"offload=activations{f' zero={away.zero}' if away.zero else ''}", away


def _reshaped(plan: Plan, dp: int, pp: int) -> Plan:
    schedule = "1f1b" if plan.pp == 1 else plan.schedule
    changed = replace(plan, dp=dp, pp=pp, schedule=schedule)
    return replace(changed, placement=usual_placement(changed))


def _fewest(sketch: Plan, batch: int, attempt: Try) -> Prediction | None:
    """The change with the plan's own number of micro-batches, or as few more as fit; None if none do.

    A pipeline gets at least one for each stage.
    """
    few, many = micro_counts(sketch, batch)
    if sketch.recompute == "full":  # every block of every micro-batch is an operation
        many = [micro for micro in many if micro * sketch.blocks <= _WORTH_PLAYING]
    least = max(sketch.micro, sketch.pp if sketch.pp > 1 else 1)
    for micro in [count for count in few + many if count >= least]:
        found = attempt(replace(sketch, micro=micro), batch)
        if found is not None and found.fits:
            return found
    return None
