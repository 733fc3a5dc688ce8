"""What the ranks of a run decided about their sums, in files: `agendas-N.json`, in the folder of the run.

Where the order of sums is decided while running (`decided.py`), each rank leaves the agenda of every step, of every
stage that it holds. A run that is given the folder (`--again FOLDER`) sums in that order, instead of deciding; as
asynchronous servers do that are given the pushes of another run, `arrivals-N.json` (`asynchronous.py`). An agenda is a
line of text, since there may be thousands of parts a step:

>>> text = line((((0,), (2, 1)), (), ((3,),)))
>>> text, read_line(text, "here")
('0 2+1 / / 3', (((0,), (2, 1)), (), ((3,),)))
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from trainplan import files
from trainplan.engine.asynchronous import load as load_arrivals
from trainplan.errors import InputError
from trainplan.plan.decided import DECIDED
from trainplan.plan.plan import Plan
from trainplan.plan.served import ASYNCHRONOUS
from trainplan.plan.text import brief, text
from trainplan.program.agenda import Agenda
from trainplan.units import MIB, some

if TYPE_CHECKING:
    from trainplan.engine.trainer import Trainer

MOST = 64 * MIB  # characters that a stage keeps of agendas that differ: thousands of steps of the most parts there are
_LINE = re.compile(r"(?:\d+(?:\+\d+)*|/)(?: (?:\d+(?:\+\d+)*|/))*")


@dataclass
class Log:
    """What was decided of one stage in every step since it was begun, as lines; those that are equal are kept once."""

    lines: list[str] = field(default_factory=list)
    steps: int = 0  # all of them, also those that came when there was no more room
    _known: dict[str, str] = field(default_factory=dict)
    _size: int = 0

    def add(self, agenda: Agenda, most: int = MOST) -> None:
        self.steps += 1
        one = line(agenda)
        if len(self.lines) < self.steps - 1 or (one not in self._known and self._size + len(one) > most):
            return  # without this step those after it would be taken for others
        if one not in self._known:
            self._known[one] = one
            self._size += len(one)
        self.lines.append(self._known[one])


@dataclass(frozen=True)
class OfStage:
    """What was decided of a stage, step by step."""

    stage: int
    steps: tuple[str, ...]


@dataclass(frozen=True)
class Decisions:
    """What a rank decided in a run."""

    plan: str
    rank: int
    first: int  # the step that the first agendas are of
    run: int  # steps that were run from there on; of the last there may be no agendas, where they would be too many
    stages: tuple[OfStage, ...]

    @property
    def steps(self) -> int:
        """For how many steps all that was decided is known."""
        return min((len(own.steps) for own in self.stages), default=self.run)


def line(agenda: Agenda) -> str:
    """An agenda as text: rounds between slashes, and in each the parts that go, with a plus those that go together."""
    rounds = (" ".join("+".join(map(str, buffer)) for buffer in buffers) for buffers in agenda)
    return " / ".join(rounds).replace("  ", " ")


def read_line(written: str, where: str) -> Agenda:
    """The agenda that `line` wrote."""
    if not _LINE.fullmatch(written.strip()):
        why = f"{written!r:.60} is not a list of parts and rounds"
        raise InputError(where, why, "an agenda such as '0 2+1 / 3', or making it again")
    rounds = [words.split() for words in written.split("/")]
    return tuple(tuple(tuple(map(int, word.split("+"))) for word in words) for words in rounds)


def begin(trainer: Trainer) -> int:
    """From now on keep what is decided; the step that is next."""
    for exchange in trainer.part.exchanges.values():
        exchange.log = Log()
    return trainer.steps_done


def name_of(folder: str | Path, rank: int) -> Path:
    return Path(folder) / f"agendas-{rank}.json"


def save(trainer: Trainer, first: int, folder: str | Path) -> None:
    """Write what this rank has decided since `begin`."""
    if trainer.plan.exchange not in DECIDED:
        return
    trainer.settle()
    logs = {stage: exchange.log or Log() for stage, exchange in trainer.part.exchanges.items()}
    kept = tuple(OfStage(stage, tuple(log.lines)) for stage, log in logs.items())
    found = Decisions(text(trainer.plan), trainer.rank, first, trainer.steps_done - first, kept)
    if found.steps < found.run:
        print(f"of {some(found.run, 'step')} the first {found.steps} are in agendas-{trainer.rank}.json", flush=True)
    files.write(name_of(folder, trainer.rank), "agendas", files.to_json(found))


def load(folder: str | Path, rank: int, plan: Plan) -> Decisions:
    """What a rank of a run under this plan has left."""
    path = name_of(folder, rank)
    found = files.from_json(Decisions, files.read(path, "agendas"), str(path))
    if found.plan != text(plan):
        why = f"it is of plan {found.plan!r}, and this is {text(plan)!r}"
        raise InputError(str(path), why, f"--plan {found.plan!r}, or leaving --again out")
    if found.rank != rank:
        raise InputError(str(path), f"it says that it is of rank {found.rank}", f"naming it agendas-{found.rank}.json")
    for own in found.stages:
        for step, written in enumerate(own.steps):
            read_line(written, f"{path}, stage {own.stage}, step {found.first + step + 1}")
    return found


def follow(trainer: Trainer, folder: str | Path, last: int) -> None:
    """Have a trainer sum as a run did, from its next step until before step `last`."""
    path, found = name_of(folder, trainer.rank), load(folder, trainer.rank, trainer.plan)
    begun, mine = trainer.steps_done, sorted(trainer.part.exchanges)
    if sorted(own.stage for own in found.stages) != mine:
        why = f"it has stages {[own.stage for own in found.stages]}, and rank {trainer.rank} holds {mine}"
        raise InputError(str(path), why, "the folder of a run of the same plan and model")
    _enough(found, path, begun, last)
    trainer.replay([
        {own.stage: read_line(own.steps[step - found.first], str(path)) for own in found.stages}
        for step in range(begun, last)
    ])  # fmt: skip


def _enough(found: Decisions, path: Path, begun: int, last: int) -> None:
    if not found.first <= begun <= last <= found.first + found.steps:
        why = f"it has steps {found.first + 1} to {found.first + found.steps}, and {begun + 1} to {last} are asked for"
        instead = f"--steps {found.steps}" if found.first == begun else "a run that begins where that one did"
        raise InputError(str(path), why, instead)


def check_again(
    plan: Plan, again: str, steps: int, out: str | Path | None = None, nnodes: str = "1", resumed: bool = False
) -> None:  # fmt: skip
    """Refuse to repeat a run that left no record, or that of something else, before anything is started."""
    if not again:
        return
    asked, folder = f"--again {again}", Path(again)
    if plan.exchange not in (*DECIDED, *ASYNCHRONOUS):
        why = f"plan {brief(plan)!r} leaves nothing to be decided while running"
        raise InputError(asked, why, f"leaving it out, or exchange={DECIDED[0]}")
    if nnodes != "1":
        raise InputError(asked, "ranks of several machines leave what they decided on each of them", "--nnodes 1")
    if out is not None and Path(out).resolve() == folder.resolve():
        raise InputError(asked, "a run begins by clearing its own folder, and this is --out, too", "another --out")
    if plan.exchange in DECIDED:
        for rank in range(plan.world):
            found = load(folder, rank, plan)
            if not resumed:  # or the checkpoint says where it begins, which the ranks hold against this
                _enough(found, name_of(folder, rank), 0, steps)
        return
    for server in range(plan.servers):
        path = folder / f"arrivals-{server}.json"
        record = load_arrivals(path)
        lost = {entry.left for entry in record if entry.worker < 0 and entry.number != -1}
        for worker in set(range(plan.dp)) - lost:
            pushes = sum(entry.worker == worker for entry in record)
            if pushes != steps:
                why = f"worker {worker} has {some(pushes, 'update')} in it, and --steps is {steps}"
                raise InputError(str(path), why, f"--steps {max(1, pushes)}, or leaving --again out")
        strangers = {entry.whose for entry in record} - set(range(plan.dp))
        if strangers:
            why = f"it has workers {sorted(strangers)}, and the plan has {some(plan.dp, 'worker')}"
            raise InputError(str(path), why, f"dp={max(strangers) + 1}, or leaving --again out")
