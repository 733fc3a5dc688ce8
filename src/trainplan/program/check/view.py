"""A program as the rules see it: with the places of operations in lists, and several columns as one number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numba import njit

from trainplan.lasting import lasting
from trainplan.program.lower.distinct import distinct
from trainplan.program.program import Bools, Ints, Program, nonzero
from trainplan.program.wiring import Small, Wiring


@dataclass(frozen=True)
class Fault:
    """A place where a program breaks a rule."""

    rule: str
    op: int  # -1: no single operation is at fault
    why: str


class Names(NamedTuple):
    """What every operation is about, each time as one number."""

    exact: Ints  # all of it
    batch: Ints  # the same for all units of a micro-batch on a stage
    passed: Ints  # … and for all stages: what both ends of a message are about
    walk: Ints  # the same in another order: by pipelines
    line: Ints  # the pipeline
    home: Ints  # the step, and the stage
    turn: Ints  # the step


@dataclass(frozen=True)
class View:
    """A program with what several rules need."""

    program: Program
    wiring: Wiring
    place: Ints  # of operations with one rank, in its list
    member_place: Small  # the same of every entry of `wiring.member_items`, in the list of that rank

    @property
    def entry_op(self) -> Ints:
        """Of every list entry its operation."""
        return self.program.lists.items

    @property
    def entry_rank(self) -> Ints:
        """… and its rank."""
        return self.program.lists.owner

    @lasting
    def names(self) -> Names:
        """What every operation is about, in several ways."""
        p = self.program
        return Names(*as_names(p.job, p.step, p.pipeline, p.stage, p.micro_batch, p.slice, p.unit))

    @lasting
    def listed(self) -> Bools:
        """Rank → its list says what comes before what."""
        return ~self.wiring.free


def view_of(program: Program, wiring: Wiring) -> View:
    """A program as the rules see it."""
    lists = program.lists
    return View(
        program, wiring,
        *_places(lists.start, lists.items, len(program), wiring.member_start, wiring.member_items),
    )  # fmt: skip


@njit(cache=True)
def _places(
    list_start: Ints, list_items: Ints, ops: int, member_start: Small, member_items: Small
) -> tuple[Ints, Small]:  # fmt: skip
    """Columns of `View`."""
    place, found = np.full(ops, -1, np.int64), np.full(len(member_items), -1, np.int32)
    ahead = member_start[:-1].copy()  # groups are in the order of ranks, nearly always: so this member is next
    for rank in range(len(list_start) - 1):
        for e in range(list_start[rank], list_start[rank + 1]):
            op = list_items[e]
            place[op] = e - list_start[rank]
            k = ahead[op]
            if k < member_start[op + 1] and member_items[k] == rank:
                found[k] = e - list_start[rank]
                ahead[op] += 1
                continue
            for k in range(member_start[op], member_start[op + 1]):
                if member_items[k] == rank:
                    found[k] = e - list_start[rank]
    return place, found


def where(mask: np.ndarray) -> list[int]:
    """The places where something is wrong."""
    return list(nonzero(mask).tolist())


def pack(program: Program, *columns: str) -> Ints:
    """Several columns as one number, so that rows can be compared and sorted."""
    return np.asarray(_packed(tuple([np.ascontiguousarray(getattr(program, column)) for column in columns])))


@njit(cache=True)
def _packed(columns: tuple[Ints, ...]) -> Ints:
    key = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        top = 0
        for number in column:
            top = max(top, number)
        if top > 0:
            for row in range(len(column)):
                key[row] = key[row] * (top + 1) + column[row]
    return key


@njit(cache=True)
def as_names(
    job: Ints, step: Ints, pipeline: Ints, stage: Ints, micro: Ints, slice_: Ints, unit: Ints
) -> tuple[Ints, Ints, Ints, Ints, Ints, Ints, Ints]:
    """Columns of `Names`."""
    count = len(job)
    steps, pipelines, stages, micros, slices, units = 0, 0, 0, 0, 0, 0
    for op in range(count):
        steps, pipelines = max(steps, step[op]), max(pipelines, pipeline[op])
        stages, micros = max(stages, stage[op]), max(micros, micro[op])
        slices, units = max(slices, slice_[op]), max(units, unit[op])
    exact, batch, passed = np.empty(count, np.int64), np.empty(count, np.int64), np.empty(count, np.int64)
    walk, line = np.empty(count, np.int64), np.empty(count, np.int64)
    home, turn = np.empty(count, np.int64), np.empty(count, np.int64)
    for op in range(count):
        turn[op] = job[op] * (steps + 1) + step[op]
        home[op] = turn[op] * (stages + 1) + stage[op]
        way = turn[op] * (pipelines + 1) + pipeline[op]
        part = micro[op] * (slices + 1) + slice_[op]
        parts = (micros + 1) * (slices + 1)
        passed[op] = way * parts + part
        batch[op] = (way * (stages + 1) + stage[op]) * parts + part
        exact[op] = batch[op] * (units + 1) + unit[op]
        line[op] = job[op] * (pipelines + 1) + pipeline[op]
        walk[op] = (line[op] * (steps + 1) + step[op]) * parts + part
    return exact, batch, passed, walk, line, home, turn


@njit(cache=True)
def as_close(key: Ints) -> Ints:
    """The keys, or where they are few and far apart (ticks of a lockstep) their places: a table of all between them
    would be larger than what it is for.

    >>> as_close(np.array([3, 1, 3])).tolist(), as_close(np.array([10**9, 5, 10**9])).tolist()
    ([3, 1, 3], [1, 0, 1])
    """
    most = 0
    for number in key:
        most = max(most, number)
    return key if most < 8 * len(key) else distinct(key)[1]


def maker(program: Program, value: int) -> str:
    """Who makes a value, by name."""
    found = int(program.value_maker[value])
    return program.name(found) if found >= 0 else "nobody"
