"""How much each part of a batch counts in its mean loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from trainplan.errors import RunError
from trainplan.plan.plan import Plan
from trainplan.plan.served import ASYNCHRONOUS
from trainplan.profile.capture.sliced import Slice
from trainplan.workload.workload import Batch, Loss


def weights_of(parts: list[Batch], total: int, plan: Plan, loss: Loss, slices: Sequence[Slice]) -> list[float]:
    """Share of each micro-batch in the mean of the whole batch of `total` samples; counts, where COUNT has to sum them
    over the replicas first. Of slices: each by itself; but where the model returns their share of the mean of their
    micro-batch, the share of that."""
    counts = [float(loss.count(part)) for part in parts]
    if not sum(counts) and (plan.dp == 1 or plan.exchange in ASYNCHRONOUS):
        raise RunError("a batch in which nothing counts", "its mean loss is not a number", "leaving it out")
    if loss.mean_over == "samples":
        return [count / total for count in counts]
    whole = 1.0 if plan.dp > 1 else sum(counts)
    if plan.exchange in ASYNCHRONOUS:  # nobody knows what the others count: a worker's mean, by its share of samples
        whole = sum(counts) * total / sum(part.samples for part in parts)
    if slices and slices[0].tokens.mean:
        counts = [count for count in counts for _ in slices]
    elif slices:
        pieces = [replace(part, targets=own.targets(part.targets)) for part in parts for own in slices]
        counts = [float(loss.count(piece)) for piece in pieces]
    return [count / whole for count in counts]
