"""What an exchange that is decided while running waits for, and who waits for it: the tokens of an agenda.

    TICK.0 ─ NEGOTIATE.0 ─ REDUCE_GRAD … ─ STEP            of a round: a cycle, the bits, then what goes
      └─ TICK.1 ─ NEGOTIATE.1 ─ …                          a cycle begins with the bits of the round before it

A round of bits waits for the gradients that go in it; for the cycle before it, where there is one; and for what has to
arrive before anything may go again: everything (Horovod), or as much as gives it credit. A step of a block waits for
its own gradients alone, and so does the next forward pass of that block.
"""

from __future__ import annotations

from collections.abc import Set
from functools import cache

import numpy as np

from trainplan.program.agenda import landed_first
from trainplan.program.lower.found import NEVER, Found
from trainplan.program.lower.gradients import completing
from trainplan.program.lower.layout import Holding
from trainplan.program.lower.ledger import Ledger
from trainplan.program.ops import COMPUTES, Kind, Value
from trainplan.program.program import Ints, are, nonzero

_COMPUTE = are(COMPUTES)


def decided(ledger: Ledger, found: Found) -> None:
    """The tokens of every step."""
    for stage in found.layout.stages:
        if found.layout.buckets[stage]:
            _decided(ledger, found, stage)


def _decided(ledger: Ledger, found: Found, stage: int) -> None:
    """The same of a stage."""
    layout = found.layout
    holdings = [h for h in layout.holdings if h.stage == stage]
    home = np.array([h.rank for h in holdings], dtype=np.int64)
    buckets = range(len(layout.buckets[stage]))
    complete = [found.own(completing(found, [stage], [bucket]), holdings).max(axis=2) for bucket in buckets]
    steps, before = _steps(found, holdings), _before(found, holdings)
    for step in range(found.steps):
        ready = [ops[:, step] for ops in complete]
        sums = _rounds(ledger, found, holdings, step, ready, before[:, step])
        for bucket, parts in sums.items():
            using = [ops[:, step] for ops, wanted in steps if bucket in wanted]
            for exchange in dict.fromkeys(parts):
                op = np.full(len(home), exchange, dtype=np.int64)
                numbers = ledger.add(Value.TOKEN, 0, home, op, using[-1], (using[-1],))
                for reader in using[:-1]:
                    ledger.reads(reader, numbers)
    if layout.crosses:
        _taken_up(ledger, found, holdings)


def _steps(found: Found, holdings: list[Holding]) -> list[tuple[Ints, Set[int]]]:
    """The optimizer steps of a step, in order, with the buckets that each waits for; and the norm before them."""
    layout = found.layout
    if not layout.crosses:
        everything = set(range(len(layout.buckets[holdings[0].stage])))
        norm = [(found.norm(holdings), everything)] if layout.clips else []
        return [*norm, (found.once(Kind.STEP, holdings), everything)]
    awaited = layout.awaited[holdings[0].stage]
    return [(found.once(Kind.STEP, holdings, block), buckets) for block, buckets in awaited.items()]


def _taken_up(ledger: Ledger, found: Found, holdings: list[Holding]) -> None:
    """The forward pass of a block reads the weights that its step has left."""
    home = np.repeat(np.array([[h.rank] for h in holdings], dtype=np.int64), max(0, found.steps - 1), axis=1)
    stage = holdings[0].stage
    for block in found.layout.stepping[stage]:
        step = found.once(Kind.STEP, holdings, block)[:, :-1]
        pieces = found.ops(Kind.F, [stage], units=[block - found.layout.plan.bounds[stage][0]])
        first = found.own(pieces, holdings, empty=NEVER)[:, 1:, :].min(axis=2)
        ledger.add(Value.TOKEN, 0, home, step, first, (first,))


def _before(found: Found, holdings: list[Holding]) -> Ints:
    """What the rank of each copy computes right before the pass that completes the gradients of the copy."""
    layout, stage = found.layout, holdings[0].stage
    first = found.ops(Kind.B, [stage])  # operations of every pass
    if layout.recomputes:
        first = np.where(found.recomputed, found.ops(Kind.R, [stage], units=[layout.plan.bounds[stage][1] - 1]), first)
    if layout.splits:
        second = found.ops(Kind.W, [stage])
        first = np.where(second >= 0, second, first)
    begins = found.own(first, holdings).max(axis=2)  # numbers rise along a list, so the last pass has the highest
    computes = _COMPUTE[found.kind]
    for number, holding in enumerate(holdings):
        own = nonzero(computes & (found.rank == holding.rank))
        begins[number] = own[np.searchsorted(own, begins[number]) - 1]
    return begins


def _rounds(
    ledger: Ledger, found: Found, holdings: list[Holding], step: int, ready: list[Ints], begins: Ints
) -> dict[int, list[int]]:
    """The rounds of a step; the operations that sum the parts of each bucket."""
    layout, stage = found.layout, holdings[0].stage
    parts, rule, agenda = layout.decided[stage].parts, layout.decided[stage].rule, layout.agenda(step, stage)
    home = np.array([h.rank for h in holdings], dtype=np.int64)
    count = len(agenda)
    units = range(count)
    told = found.shared(Kind.NEGOTIATE, [stage] * count, units)[:, step]
    ticks = [found.once(Kind.TICK, holdings, r)[:, step] for r in units] if rule.fuses else []

    @cache
    def everywhere(op: int) -> Ints:
        return np.full(len(home), op, dtype=np.int64)

    gone: list[int] = []  # operations, in the order in which they go
    waits = landed_first(rule, agenda)
    sums: dict[int, list[int]] = {}
    heard: dict[int, list[int]] = {}  # bucket → rounds of bits that wait for it
    for number, buffers in enumerate(agenda):
        bits = everywhere(told[number])
        if ticks:
            _tick(ledger, ticks, number, home, begins if number == 0 else None, bits)
        if waits[number]:
            last = everywhere(gone[waits[number] - 1])
            readers = (bits, ticks[number + 1]) if ticks and number + 1 < count else (bits,)
            ledger.add(Value.TOKEN, 0, home, last, readers[-1], readers)
        for buffer in buffers:
            op = int(found.shared(Kind.REDUCE_GRAD, [stage], [min(buffer)])[0, step])
            gone.append(op)
            for bucket in dict.fromkeys(parts[part].bucket for part in buffer):
                sums.setdefault(bucket, []).append(op)
                heard.setdefault(bucket, []).append(int(told[number]))
            if len(buffer) > 1:  # copied side by side
                size = sum(parts[part].bytes for part in buffer)
                ledger.add(Value.COMMUNICATION, size, home, everywhere(op), everywhere(op))
        if buffers:
            ends = [everywhere(op) for op in gone[-len(buffers) :]]
            ledger.add(Value.TOKEN, 0, home, bits, ends[-1], tuple(ends))
    for bucket, ops in sums.items():
        waiting = tuple(everywhere(op) for op in dict.fromkeys((*heard[bucket], *ops)))
        ledger.add(Value.TOKEN, 0, home, ready[bucket], everywhere(ops[-1]), waiting)
    return sums


def _tick(ledger: Ledger, ticks: list[Ints], number: int, home: Ints, begins: Ints | None, bits: Ints) -> None:
    """A cycle; the first begins with the backward pass that completes the gradients."""
    if begins is not None:
        ledger.add(Value.TOKEN, 0, home, begins, ticks[number], (ticks[number],))
    if number + 1 < len(ticks):
        ledger.add(Value.TOKEN, 0, home, ticks[number], ticks[number + 1], (bits, ticks[number + 1]))
    else:
        ledger.add(Value.TOKEN, 0, home, ticks[number], bits, (bits,))
