"""How many epochs more does it take when nobody waits? Asynchronous rules, trained to a target accuracy.

Workers push gradients to a server, each of a batch of its own; every push is one update, by the rate that one worker
would take. What a push was computed with is *stale*: other pushes were applied since its worker was given weights. The
rule (`program/staleness.py`, the same that servers and the clock follow) says who goes on when:

    in step   everybody waits for everybody: all pushes of a step are computed with the same weights
    ssp       a worker may lead the slowest by so many pushes
    dssp      by a lower bound, or an upper one if that is expected to pay
    ps-asp    nobody waits

When which worker pushes is played: each has a pace of its own, and each push a jitter, as seconds of a step on real
machines have; messages cost nothing. What comes of it is trained for real, one push after the other in one process. So
a row has both factors of the time to an accuracy: epochs (statistical efficiency), and seconds of an epoch, in units of
one worker's step (hardware efficiency).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from random import Random
from statistics import median

import torch
from torch import Tensor
from torch.nn import functional as F

from trainplan.program.staleness import STUDIED, Bound, State, bound_of
from trainplan.study.tasks import Task

LOOKS = 8  # at the accuracy, an epoch
RULES: dict[str, Bound] = {"in step": (0, 0)} | {rule: bound_of(rule, bound) for rule, bound in STUDIED.items()}


@dataclass(frozen=True)
class Paces:
    """How uneven workers are: spreads of logarithms."""

    workers: float = 0.1  # of one worker's pace to another's
    steps: float = 0.1  # of one step to another


@dataclass(frozen=True)
class Push:
    """A push as it is applied, and who is given weights after it."""

    worker: int
    number: int  # among those of its worker
    moment: float  # in steps of a worker of mean pace
    released: tuple[int, ...]


@dataclass(frozen=True)
class Reached:
    """One training: when the target was reached, if it was."""

    task: str
    rule: str
    workers: int
    seed: int
    epochs: float | None  # None: not within the limit
    time: float | None  # in steps of one worker
    staleness: float  # updates that a push's weights lacked, in the mean
    accuracy: float  # the best that was seen


@dataclass(frozen=True)
class Middle:
    """All seeds of a rule with so many workers."""

    task: str
    rule: str
    workers: int
    seeds: int
    reached: int  # seeds with which the target was
    epochs: float | None  # median; None: most did not
    least: float | None
    most: float | None
    staleness: float
    speedup: float | None  # of the time to the accuracy, over one worker's


def pushes(workers: int, bound: Bound, paces: Paces, seed: int) -> Iterator[Push]:
    """The order in which workers push, without end. With a bound of 0 each does once before any does again.

    >>> turns = pushes(2, (0, 0), Paces(), seed=1)
    >>> [sorted((next(turns).worker, next(turns).worker)) for _ in range(3)]
    [[0, 1], [0, 1], [0, 1]]
    """
    random, state = Random(seed), State(workers)
    pace = [math.exp(random.gauss(0, paces.workers)) for _ in range(workers)]
    done = [0] * workers
    coming: list[tuple[float, int]] = []

    def start(worker: int, moment: float) -> None:
        heappush(coming, (moment + pace[worker] * math.exp(random.gauss(0, paces.steps)), worker))

    for worker in range(workers):
        start(worker, 0.0)
    while True:
        moment, worker = heappop(coming)
        released = tuple(state.push(worker, moment, bound))
        for one in released:
            start(one, moment)
        yield Push(worker, done[worker], moment, released)
        done[worker] += 1


class Training:
    """A server's weights, and those that each worker was given last."""

    def __init__(self, task: Task, workers: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.task, self.workers, self.seed = task, workers, seed
        self.model, self.worker = task.build(), task.build()  # the second one works for all workers in turn
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=task.rate)
        self.pulled: list[list[Tensor]] = [self._weights() for _ in range(workers)]
        self.updates, self.given = 0, [0] * workers  # how many there had been when each worker was given weights
        self._orders: dict[int, Tensor] = {}

    def _weights(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]

    def batch(self, worker: int, number: int) -> tuple[Tensor, Tensor]:
        """What a worker learns in its step: workers take turns through the samples, in an order of each epoch's own."""
        size, samples = self.task.batch, len(self.task.inputs)
        first = (number * self.workers + worker) * size
        places = []
        for place in range(first, first + size):
            epoch = place // samples
            if epoch not in self._orders:
                generator = torch.Generator().manual_seed(1000 * self.seed + epoch)
                self._orders[epoch] = torch.randperm(samples, generator=generator)
                self._orders.pop(epoch - 8, None)  # nobody is that far behind
            places.append(int(self._orders[epoch][place % samples]))
        return self.task.inputs[places], self.task.targets[places]

    def apply(self, push: Push) -> int:
        """One update; how stale it was."""
        with torch.no_grad():
            for own, given in zip(self.worker.parameters(), self.pulled[push.worker], strict=True):
                own.copy_(given)
        inputs, targets = self.batch(push.worker, push.number)
        self.worker.zero_grad()
        F.cross_entropy(self.worker(inputs), targets).backward()
        for weight, own in zip(self.model.parameters(), self.worker.parameters(), strict=True):
            weight.grad = own.grad
        self.optimizer.step()
        stale = self.updates - self.given[push.worker]
        self.updates += 1
        for worker in push.released:
            self.pulled[worker], self.given[worker] = self._weights(), self.updates
        return stale


def reach(task: Task, rule: str, workers: int, seed: int, epochs: float = 40.0, paces: Paces | None = None) -> Reached:
    """Train until the target is reached, or for so many epochs."""
    training = Training(task, workers, seed)
    an_epoch = len(task.inputs) / task.batch  # pushes
    every, limit = max(1, round(an_epoch / LOOKS)), round(epochs * an_epoch)
    stale, best = 0, 0.0
    for count, push in enumerate(pushes(workers, RULES[rule], paces or Paces(), seed), 1):
        stale += training.apply(push)
        if count % every == 0 or count == limit:
            best = max(best, task.accuracy(training.model))
        if best >= task.target:
            return Reached(task.name, rule, workers, seed, count / an_epoch, push.moment, stale / count, best)
        if count >= limit:
            break
    return Reached(task.name, rule, workers, seed, None, None, stale / limit, best)


def middles(found: Iterable[Reached]) -> list[Middle]:
    """Medians over seeds. The time of one worker alone is what speed-ups are over."""
    groups: dict[tuple[str, str, int], list[Reached]] = {}
    for one in found:
        groups.setdefault((one.task, one.rule, one.workers), []).append(one)
    alone = {task: _median([o.time for o in group]) for (task, _, w), group in groups.items() if w == 1}
    rows = []
    for (task, rule, workers), group in groups.items():
        epochs = [one.epochs for one in group if one.epochs is not None]
        time, base = _median([one.time for one in group]), alone.get(task)
        least, most = min(epochs, default=None), max(epochs, default=None)
        stale, speedup = median(one.staleness for one in group), base / time if time and base else None
        middle = _median([one.epochs for one in group])
        rows.append(Middle(task, rule, workers, len(group), len(epochs), middle, least, most, stale, speedup))
    return rows


def _median(values: Sequence[float | None]) -> float | None:
    """Of all, those that never came counting as endless; None if that is what is in the middle."""
    found = median(math.inf if value is None else value for value in values)
    return None if math.isinf(found) else found
