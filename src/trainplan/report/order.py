"""A plan's order of work as a file in torch's format, and the plan line that takes that file back.

A file says which forward and backward passes each rank of a replica computes, and in which order. All else (replicas,
cuts, recomputation, buckets …) is in the line. Some plans are more than these two can say: they are refused.

>>> from trainplan.plan.plan import plan
>>> written(plan(dp=2, pp=2, schedule="gpipe", micro=2, stages=(1,), blocks=2, bucket=1000), "mine.csv")
('0F0,0F1,0B1,0B0\\n1F0,1F1,1B1,1B0\\n', 'dp=2 pp=2 schedule=mine.csv micro=2 stages=1 bucket=1000B')
"""

from __future__ import annotations

from dataclasses import replace

from trainplan.errors import PlanError
from trainplan.plan.order import GIVEN
from trainplan.plan.plan import Plan
from trainplan.plan.text import brief, text
from trainplan.program.schedules import orders_of
from trainplan.program.schedules.given import write_csv


def written(plan: Plan, path: str) -> tuple[str, str]:
    """What the file says, and the line."""
    _check(plan, path)
    file = write_csv(orders_of(plan))
    lines = tuple(file.split())
    # A stage that is spread over ranks is, to a file, several pipelines that share ranks: of these, all ranks count.
    same = replace(plan, pp=len(lines), spread=(), chunks=1, pairs=1, schedule=GIVEN, order=lines, key="")
    words = [f"schedule={path}" if word.startswith("schedule=") else word for word in text(same).split()]
    return file, " ".join(words)


def _check(plan: Plan, path: str) -> None:
    """Refuse what could not be given back."""
    asked = f"--csv {path} of the plan {brief(plan)!r}"
    if plan.slices:
        why = f"a file names micro-batches, and here sequences are cut into {len(plan.slices)} slices"
        raise PlanError(asked, why, "--trace order.json.gz, or schedule=gpipe, which is the same with whole sequences")
    if plan.schedule == "lockstep":
        why = "a file says what is computed, and not that all ranks wait for each other after each of it"
        raise PlanError(asked, why, "--trace order.json.gz, or schedule=gpipe, which is the same without ticks")
    if plan.pp == 1:
        raise PlanError(asked, "an order of work is given to several ranks, and a replica has one", "pp=2")
    if any(letter.isspace() for letter in path):
        why = "its name has a space, and the words of a plan are apart by spaces"
        raise PlanError(asked, why, f"--csv {'-'.join(path.split())}")
