"""Runs of the listed systems, for whoever looks at what they trained and for whoever looks at what they did when.

Starting a rank takes longer than its steps, so a run whose timeline is looked at every day is made once for both; the
files of these tests run in one process (`turns.TOGETHER`).
"""

from dataclasses import dataclass, replace

from tests.engine import jobs
from tests.engine.systems import CASES, Case
from trainplan.bench.pool import pool
from trainplan.engine.oracle import Trained
from trainplan.program.agenda import Agendas
from trainplan.program.timeline import Event

Run = list[tuple[Trained, list[Event], tuple[int, tuple[int, ...]]]]  # of every rank; where it stands in the plan

TIMED = [case for case in CASES if case.optimizer == "sgd" and case.model != "chain"]
RECORDED = 2  # steps at the end of a run whose timeline is kept, of batches that are alike
_KEPT: dict[str, "Seen"] = {}


@dataclass(frozen=True)
class Seen:
    """What the ranks of a run did in its last steps: not what they trained, which nobody asks for again."""

    events: dict[int, list[Event]]
    agendas: list[list[Agendas]]  # of every rank, where the exchange was decided while running


def _timed_daily() -> set[str]:
    """Every plan on one model; on others, which are cut elsewhere, it is slow to say the same again."""
    first: dict[tuple, Case] = {}
    for case in TIMED:
        plan = case.key, *sorted((k, str(v)) for k, v in case.choices.items() if k not in ("stages", "bucket"))
        first.setdefault(plan, case)
    return set(map(str, first.values()))


TIMED_DAILY = _timed_daily()


def longer(case: Case) -> Case:
    """The same, with its last batch once more: so many steps are alike that their timeline can be kept."""
    return replace(case, sizes=(*case.sizes, case.sizes[-1]))


def run(case: Case, record: int = 0) -> Run:
    """Train under a plan; from step `record` on the timeline is kept."""
    plan = case.plan
    arguments = (case.model, case.optimizer, plan, list(case.sizes), case.fields, record)
    return [jobs.train(0, 1, *arguments)] if plan.world == 1 else pool(plan.world).run(jobs.train, *arguments)


def recorded(case: Case) -> Run:
    """A run that is longer than the case says; the timeline of its last steps is kept for whoever asks for it later."""
    more = longer(case)
    found = run(more, record=len(more.sizes) - RECORDED)
    events = {rank: events for rank, (_, events, _) in enumerate(found)}
    _KEPT[str(case)] = Seen(events, [trained.agendas for trained, _, _ in found])
    return found


def seen(case: Case) -> Seen:
    """What happened in such a run, which perhaps was made before."""
    if str(case) not in _KEPT:
        recorded(case)
    return _KEPT[str(case)]
