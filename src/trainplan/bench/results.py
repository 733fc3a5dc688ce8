"""What came of the cases of the suite: files that say on which machine and with which versions they were made.

A case is a file, written whole whenever something was measured, so a suite can be stopped and gone on with; a folder of
them is what `trainplan bench accuracy` reads, beside the files that `benchmarks/accuracy.py` writes. Out of memory and
other failures are results with their reason. No torch here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import exp, log
from pathlib import Path
from statistics import median

from trainplan import files
from trainplan.amounts import believable
from trainplan.bench.cases import Conditions
from trainplan.bench.row import Row
from trainplan.errors import InputError
from trainplan.plan.text import parse
from trainplan.predict.accuracy import plan_kind

SIGNED = ("error", "raw_error", "rounds")  # fields whose numbers may be below nought
OUT_OF_MEMORY = "out of memory"


@dataclass(frozen=True)
class Result:
    """What came of one candidate of a case."""

    system: str  # its key; "recommended" is what our own search proposes; of older files the kind of plan
    asked: str
    plan: str = ""  # nothing left open; "": there is none
    fits: bool = True  # predicted
    predicted_s: float = 0.0
    predicted_bytes: int = 0  # of the fullest worker
    published_s: float | None = None  # by the thesis's equations; None: it has none for such a plan
    failure: str = ""  # why there is no row
    row: Row | None = None
    also: tuple[str, ...] = ()  # requests for other systems that are the same plan here

    @property
    def measured_s(self) -> float | None:
        """Seconds of a step, at the speed that the machine had when the profile was made; None: it did not run."""
        return None if self.row is None else self.row.predicted_s / (1 + self.row.error)

    @property
    def too_big(self) -> bool:
        """Whether memory was the reason."""
        return self.failure.startswith(OUT_OF_MEMORY)


@dataclass(frozen=True)
class Outcome:
    """A case, and what came of its candidates."""

    machine: str
    device: str
    torch: str
    made: str
    command: str
    network: str
    dataset: str
    workload: str
    workers: int
    batch: int
    conditions: Conditions = field(default_factory=Conditions)
    python: str = ""
    rounds: int = 0  # that were asked for
    results: tuple[Result, ...] = ()
    cluster: str = ""  # the file, beside this one, of the cluster that was believed
    profile: str = ""  # and of the profile
    at: str = field(default="", compare=False)  # where it was read from

    @property
    def name(self) -> str:
        told = f"{self.workload} x{self.workers}"
        return f"{told}, {self.conditions}" if str(self.conditions) else told

    @property
    def ran(self) -> list[Result]:
        """Those that ran, the fastest first."""
        return sorted((r for r in self.results if r.measured_s is not None), key=lambda r: r.measured_s or 0.0)

    def known(self, asked: str) -> Result | None:
        """What is known of a candidate for good: it failed, or has all of its rounds."""
        for result in self.results:
            whole = result.failure or (result.row and len(result.row.rounds) >= self.rounds)
            if whole and asked in (result.asked, *result.also):
                return result
        return None

    def put(self, results: Iterable[Result]) -> Outcome:
        """With these results, in place of older ones of the same candidates."""
        new = {result.asked: result for result in results}
        return replace(self, results=(*(r for r in self.results if r.asked not in new), *new.values()))

    def save(self, path: str | Path) -> None:
        files.write(path, "bench", files.to_json(replace(self, at="")))


def steadied(outcome: Outcome) -> Outcome:
    """A case whose candidates can be held against each other: their speeds of the machine lie closer together.

    How fast it was while a candidate ran is told by the reference kernel, which is itself measured, with an error about
    as large as what it tells: programs that are the same under two names are nearest to each other when half of what
    sets a candidate's kernel apart from the others' is believed (`tests/bench/test_scores.py`). What all have in common
    stays: seconds are at the speed that the machine had when the profile was made.
    """
    ways = {r.asked: log((1 + r.row.error) / (1 + r.row.raw_error)) for r in outcome.results if r.row is not None}
    if not ways:
        return outcome
    usual = median(ways.values())

    def told(result: Result) -> Result:
        if result.row is None:
            return result
        seconds = result.row.measured_s / exp((usual + ways[result.asked]) / 2)
        return replace(result, row=replace(result.row, error=result.row.predicted_s / seconds - 1))

    return replace(outcome, results=tuple(map(told, outcome.results)))


def load(path: str | Path) -> Outcome:
    """One case from its file."""
    found = believable(files.from_json(Outcome, files.read(path, "bench"), str(path)), str(path), "bench", free=SIGNED)
    for number, result in enumerate(found.results):
        if result.row is not None and not (result.row.error > -1 and result.row.predicted_s > 0):
            place = f"{path}.results[{number}].row"
            why = f"predicted_s is {result.row.predicted_s!r} and error {result.row.error!r}: nothing is measured so"
            raise InputError(place, why, files.made_by("bench"))
    return replace(found, at=str(path))


def read(paths: Sequence[str | Path]) -> list[Outcome]:
    """All cases of these files and folders. In a folder, files of another kind are passed over."""
    found: list[Outcome] = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = [p for p in sorted(path.glob("*.json")) if files.kind(p) in ("bench", "accuracy")]
            if not inside:
                raise InputError(str(path), "there are no results in it", "a folder that trainplan bench run wrote")
            found += [outcome for one in inside for outcome in read([one])]
        elif files.kind(path) == "accuracy":
            found += _older(path)
        else:
            found.append(load(path))
    return [outcome for outcome in found if outcome.results]


def _older(path: Path) -> list[Outcome]:
    """The rows that `benchmarks/accuracy.py` wrote: of every workload a case for each number of ranks. With `--keep`, a
    folder beside the file has what they were predicted from."""
    data = files.read(path, "accuracy")
    rows = [files.from_json(Row, row, str(path)) for row in data["rows"]]
    failures = data.get("failures", [])
    found = []
    for workload in dict.fromkeys(row.workload for row in rows):
        own = [row for row in rows if row.workload == workload]
        for workers in sorted({row.ranks for row in own} - {1}) or [1]:
            there = [row for row in own if row.ranks in (1, workers)]
            # Whether it was predicted to fit was not kept.
            results = [
                Result(plan_kind(parse(row.plan)), row.asked, row.plan, True, row.predicted_s, row=row) for row in there
            ]
            results += [Result(asked, asked, failure=why) for name, asked, why in failures if name == workload]
            network, _, dataset = workload.partition(",")[0].partition(":")
            found.append(
                Outcome(
                    data.get("machine", ""), data.get("device", ""), data.get("torch", ""), data.get("made", ""),
                    data.get("command", ""), network, "text" if "=" in dataset else dataset, workload, workers,
                    own[0].batch, results=tuple(results), cluster=f"{path.stem}/cluster.yaml",
                    profile=f"{path.stem}/{network}.profile.json", at=str(path),
                )
            )  # fmt: skip
    return found
