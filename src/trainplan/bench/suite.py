"""Runs the suite: every candidate of every case, predicted and measured in turns, in as many calls as it takes.

A case's candidates are predicted from one profile and one probe of its workers, and run in rounds, one after the other
and all of them again, so that a slow minute of the machine is not one system's (`accuracy.py` has what a round is).
What fails is a result, too, and the others go on. What our own search proposes is a candidate like the others.
"""

from __future__ import annotations

import gc
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from trainplan.bench.accuracy import Compared
from trainplan.bench.cases import RECOMMENDED, Case, candidates
from trainplan.bench.limit import Limit
from trainplan.bench.pool import placed, pool
from trainplan.bench.results import OUT_OF_MEMORY, Outcome, Result, load
from trainplan.bench.slow_link import slow_link
from trainplan.bench.uneven import described, uneven
from trainplan.cluster.cluster import Cluster
from trainplan.cluster.probe.launch import Place
from trainplan.engine.probe import probe
from trainplan.errors import TrainplanError
from trainplan.plan.text import parse, text
from trainplan.predict.by_equations import by_equations
from trainplan.predict.predict import MEMORY_MARGIN, predict
from trainplan.profile import machine
from trainplan.profile.measure import measure
from trainplan.profile.profile import Profile
from trainplan.search.recommend import recommend
from trainplan.solve.limits import limited
from trainplan.solve.resolve import resolve
from trainplan.units import gib, seconds
from trainplan.workload.load import load as load_workload

_MEMORY_WORDS = ("OutOfMemoryError", "out of memory", "can't allocate memory")
Say = Callable[[str, float], None]


@dataclass(frozen=True)
class Effort:
    """How much is measured."""

    steps: int = 5  # of a candidate in a round
    rounds: int = 3
    profile_s: float = 10.0  # of timing for a profile
    quick: bool = False  # probes, or what is remembered of one


class Suite:
    """Cases on their way to results in a folder."""

    def __init__(
        self, cases: Sequence[Case], out: Path, systems: Sequence[str], effort: Effort, minutes: float, command: str,
        say: Say,
    ) -> None:  # fmt: skip
        self.cases, self.out, self.systems, self.effort, self.say = cases, out, systems, effort, say
        self.until, self.command = Limit(60 * minutes), command
        self.device = "cuda" if cases and cases[0].conditions.slices else "cpu"
        self.outcomes = [self._begun(case) for case in cases]
        self.planned = sum(self._left(case, known) for case, known in zip(cases, self.outcomes, strict=True))
        self.done, self.began = 0, time.monotonic()
        self.unfinished = False
        self.left_out: dict[str, TrainplanError] = {}  # cases whose conditions cannot be made here, and why

    def run(self) -> list[Outcome]:
        """All that is left, as far as time allows."""
        for place, case in enumerate(self.cases):
            if self._left(case, self.outcomes[place]) and not self._over():
                before = self.done + self._left(case, self.outcomes[place])
                self.outcomes[place] = self._measured(case, self.outcomes[place])
                self.done = before
        if len(self.left_out) == len(self.cases) > 0:
            raise next(iter(self.left_out.values()))
        return self.outcomes

    def _begun(self, case: Case) -> Outcome:
        """What is known of a case already."""
        path, here = self.out / case.file, torch.device(self.device)
        if path.exists():
            return replace(load(path), rounds=self.effort.rounds)
        return Outcome(
            machine.describe(here), machine.name_of(here), torch.__version__, time.strftime("%Y-%m-%d", time.gmtime()),
            self.command, case.network, case.dataset, case.workload, case.workers, load_workload(case.workload).batch,
            case.conditions, platform.python_version(), self.effort.rounds,
        )  # fmt: skip

    def _lines(self, case: Case) -> dict[str, str]:
        words = [word for word in self.systems if word != RECOMMENDED]
        found = candidates(case.workers, words, uneven=case.conditions.uneven > 1) if words or not self.systems else {}
        picked = not self.systems or RECOMMENDED in self.systems
        return {**found, RECOMMENDED: RECOMMENDED} if picked else found

    def _left(self, case: Case, outcome: Outcome) -> int:
        """Runs of candidates that are not known yet."""
        return self.effort.rounds * sum(outcome.known(line) is None for line in self._lines(case))

    def _over(self) -> bool:
        self.unfinished = self.until.over()
        return self.unfinished

    def _measured(self, case: Case, outcome: Outcome) -> Outcome:
        """A case with all that can be known of it, written as soon as it is."""
        outcome = outcome.put([])
        with ExitStack() as stack:
            try:
                place = stack.enter_context(workers_of(case))
            except TrainplanError as error:
                self.left_out[case.name] = error
                return outcome
            try:
                cluster, profile = self._believed(case, place)
            except (TrainplanError, RuntimeError) as error:
                failed = [Result(key, line, failure=reason(error)) for line, key in self._lines(case).items()]
                return self._kept(case, outcome.put(r for r in failed if not outcome.known(r.asked)))
            outcome = replace(outcome, cluster=_file(case, "cluster"), profile=_file(case, "profile"))
            runs, outcome = self._predicted(case, outcome, profile, cluster)
            for number in range(self.effort.rounds):
                for asked in list(runs):
                    if self._over():
                        return self._kept(case, outcome.put(_row(*run) for run in runs.values() if run[1].runs))
                    self._tell(f"{case.name}, round {number + 1}: {asked}")
                    result, compared = runs[asked]
                    why = self._run(compared, case, cluster)
                    self.done += 1
                    if why:
                        outcome = outcome.put([replace(result, failure=why)])
                        del runs[asked]
                outcome = self._kept(case, outcome.put(_row(*run) for run in runs.values()))
        return outcome

    def _kept(self, case: Case, outcome: Outcome) -> Outcome:
        outcome.save(self.out / case.file)
        return outcome

    def _believed(self, case: Case, place: Place | None) -> tuple[Cluster, Profile]:
        """The workers as probed, and the workload as profiled: from an earlier call, or now."""
        kept_cluster, kept_profile = self.out / _file(case, "cluster"), self.out / _file(case, "profile")
        if kept_cluster.exists():
            cluster = Cluster.load(kept_cluster)
        else:
            self._tell(f"{case.name}: probing")
            quick = self.effort.quick
            found = probe(case.workers, self.device, quick=quick, refresh=not quick, place=place)
            cluster = described(limited(found, case.conditions.memory or None), case.conditions.uneven)
        if kept_profile.exists():
            profile = Profile.load(kept_profile)
        else:
            self._tell(f"{case.name}: profiling")
            profile = measure(
                load_workload(case.workload), device=self.device, seconds=self.effort.profile_s,
                memory=case.conditions.memory or None,
            )  # fmt: skip
            profile.save(kept_profile)
        if not kept_cluster.exists():
            cluster = tightened(cluster, profile, case) if case.conditions.tight else cluster
            cluster.save(kept_cluster)
        return cluster, profile

    def _predicted(
        self, case: Case, outcome: Outcome, profile: Profile, cluster: Cluster
    ) -> tuple[dict[str, tuple[Result, Compared]], Outcome]:
        """The candidates that are to be run, predicted; the others are results already."""
        runs, failed, first = dict[str, tuple[Result, Compared]](), list[Result](), dict[str, str]()
        for line, key in self._lines(case).items():
            if outcome.known(line):
                continue
            self._tell(f"{case.name}: predicting {line}")
            try:
                asked = line
                if key == RECOMMENDED:
                    asked = text(recommend(profile, cluster, outcome.batch).best.plan)
                compared = Compared(
                    case.workload, asked, profile, cluster, outcome.batch, rated_link=bool(case.conditions.link)
                )
            except TrainplanError as error:
                failed.append(Result(key, line, failure=reason(error)))
                continue
            found, plain = compared.predicted, text(replace(compared.plan, key=""))
            result = Result(
                key, line, text(compared.plan), found.fits, found.step_s, found.peak_bytes,
                by_equations(compared.plan, profile, cluster, outcome.batch),
            )  # fmt: skip
            if plain in first:  # it is what another one is, too
                earlier, its = runs[first[plain]]
                runs[first[plain]] = replace(earlier, also=(*earlier.also, line)), its
                continue
            beyond = self._beyond(compared, cluster)
            if beyond:
                failed.append(replace(result, failure=beyond))
                continue
            first[plain], runs[line] = line, (result, compared)
        return runs, self._kept(case, outcome.put(failed))

    def _beyond(self, compared: Compared, cluster: Cluster) -> str:
        """Why a candidate is not even tried: nothing holds a process on a CPU to its share of the memory."""
        found = compared.predicted
        if self.device == "cuda" or found.fits:
            return ""
        has = min(device.memory_bytes for device in cluster.kinds.values())
        return f"{OUT_OF_MEMORY}: {gib(found.peak_bytes)} predicted, not run, and a worker has {gib(has)}"

    def _run(self, compared: Compared, case: Case, cluster: Cluster) -> str:
        """One round of a candidate; why it failed, if it did."""
        try:
            if self.device == "cuda" and (case.conditions.memory or case.conditions.tight):
                rest = cluster.device(0).memory_bytes - cluster.device(0).context_bytes
                if compared.plan.world > 1:
                    pool(compared.plan.world).run(_hold_to, rest)
                else:
                    _hold_to(0, 1, rest)
            compared.run(self.effort.steps)
        except Exception as error:  # whatever it is, it is what came of this candidate
            gc.collect()
            if self.device == "cuda":
                torch.cuda.empty_cache()
            return reason(error)
        return ""

    def _tell(self, what: str) -> None:
        spent, share = time.monotonic() - self.began, self.done / max(1, self.planned)
        left = f", about {seconds(spent * (1 / share - 1))} left" if self.done else ""
        self.say(f"{what} ({self.done} of {self.planned} runs{left})", share)


def _row(result: Result, compared: Compared) -> Result:
    return replace(result, row=compared.row())


def _file(case: Case, what: str) -> str:
    """The name of the file of a case's cluster, or of its workload's profile, which other numbers of workers share."""
    alike = replace(case.conditions, uneven=1, link=0.0, delay_s=0.0, tight=0.0)
    whose = f"workers of {case.workload}" if case.conditions.tight else "workers"
    named = replace(case, workload=whose) if what == "cluster" else replace(case, workers=1, conditions=alike)
    return f"{named.file.removesuffix('.json')}.{what}.json"


def tightened(cluster: Cluster, profile: Profile, case: Case) -> Cluster:
    """The workers of a case with room for a share of what a replica's tensors take, beside what a process takes."""
    plan = resolve(parse(f"dp={case.workers}"), profile, cluster, load_workload(case.workload).batch)
    found = predict(plan, profile, cluster, load_workload(case.workload).batch)
    context = found.peak_bytes - found.peak.bytes
    return limited(cluster, int((context + case.conditions.tight * found.peak.bytes) / (1 - MEMORY_MARGIN)))


def reason(error: BaseException) -> str:
    """Why something failed, in one line, memory first."""
    said = [line for line in str(error).strip().splitlines() if line.strip()] or [type(error).__name__]
    short = any(word in str(error) or word in type(error).__name__ for word in _MEMORY_WORDS)
    return f"{OUT_OF_MEMORY}: {said[-1].strip()}" if short else said[-1].strip()


def _hold_to(rank: int, world: int, size: int) -> None:
    """From now on this process may have so many bytes of its GPU in tensors."""
    torch.cuda.empty_cache()  # what the allocator has kept is not asked for again, so no limit would stop it
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, max(0.0, size / total)))


@contextmanager
def workers_of(case: Case) -> Iterator[Place | None]:
    """The conditions of a case, as long as it lasts: where its workers are started; None: anywhere."""
    conditions = case.conditions
    with ExitStack() as stack:
        places: list[Place] = []
        if conditions.link:
            places.append(stack.enter_context(slow_link(conditions.link, conditions.delay_s)).place)
        if conditions.uneven > 1:
            places.append(stack.enter_context(uneven(case.workers, conditions.uneven)))
        if not places:
            yield None
            return

        @contextmanager
        def place(rank: int, world: int) -> Iterator[None]:
            with ExitStack() as all_of:
                for one in places:
                    all_of.enter_context(one(rank, world))
                yield

        stack.enter_context(placed(place))
        yield place
