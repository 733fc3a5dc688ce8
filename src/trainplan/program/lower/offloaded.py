"""Memory of passes in sections whose parcels go away and come back (`away.py`).

    F.k ─ parcel ─ OFFLOAD.k ─ (host) ─ FETCH.k ─ parcel ─ B of section k, and of earlier ones
             └ gone when the second computation behind the copy starts, which waits for the copy

A copy back waits for the computation before it in the list: until then the device has no room for it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from trainplan.profile.footprint import Moment, footprints, worst
from trainplan.profile.parcels import Parcel, parcels
from trainplan.profile.profile import Amount
from trainplan.program.lower.away import BEHIND
from trainplan.program.lower.found import Found
from trainplan.program.lower.ledger import Ledger
from trainplan.program.ops import COMPUTES, Kind, Value
from trainplan.program.program import Ints, are, nonzero

_COMPUTE = are(COMPUTES)


def offloaded(ledger: Ledger, found: Found, homes: Ints) -> None:
    """Without recomputation."""
    layout = found.layout
    for stage in layout.stages:
        cut, home = layout.sections[stage], homes[stage]
        begin, final = (found.backward([stage], last)[0] for last in (False, True))
        # The value that the engine keeps the graph under comes first.
        ledger.add(Value.SAVED, 0, home, found.forward([stage])[0], final, (begin, np.where(begin != final, final, -1)))
        back = found.ops(Kind.B, [stage] * len(cut), units=range(len(cut)))[::-1]  # by section
        early = _at_worst(found, stage, lambda own, most: own[-1].saved - most.saved)
        passing = _at_worst(found, stage, lambda _, most: most.passing)
        ledger.add_some(Value.WORKSPACE, passing, home, back, back)
        _go_and_come(ledger, found, stage, home, back, early, again=False)


def _at_worst(found: Found, stage: int, part: Callable[[list[Moment], Moment], int]) -> Ints:
    """Of every section of a stage, at the worst moment of its backward pass: part(all its moments, the worst)."""
    cut, (first, last) = found.layout.sections[stage], found.layout.plan.bounds[stage]

    def table(adding: bool) -> Ints:
        def of(section: int, samples: Amount) -> int:
            moments = footprints(found.layout.profile, samples).backward(first, last, adding)
            own = moments[cut[section][0] - first : cut[section][1] - first]
            return part(own, worst(own))

        return found.by_size(of, len(cut))

    return np.where(found.adds([stage])[0], table(True), table(False))


def offloaded_inputs(ledger: Ledger, found: Found, homes: Ints) -> None:
    """With recomputation: what blocks read again. R reads it, block by block."""
    layout = found.layout
    for stage, (first, last) in enumerate(layout.plan.bounds):
        back = found.ops(Kind.B, [stage] * (last - first), units=range(first, last))
        _go_and_come(ledger, found, stage, homes[stage], back, np.zeros_like(back), again=True)


def _go_and_come(
    ledger: Ledger, found: Found, stage: int, home: Ints, back: Ints, early: Ints, again: bool
) -> None:  # fmt: skip
    """The parcels of a stage. `back`: backward by section, or by block; `early`: of what a section's own backward
    gives up, how much before its worst moment."""
    layout, cut = found.layout, found.layout.sections[stage]
    count, base = len(cut), layout.plan.bounds[stage][0] if again else 0

    def left(samples: Amount) -> list[Parcel]:
        return parcels(layout.profile, samples, cut, again)

    def given_up(section: int, until: int, _: int, samples: Amount) -> int:
        """Bytes of a section's parcel that the backward of another one gives up."""
        return left(samples)[section].until.get(until, 0)

    numbers = range(count)
    forward = found.ops(Kind.F, [stage] * count, units=numbers)
    out, into = (found.ops(kind, [stage] * count, units=numbers) for kind in (Kind.OFFLOAD, Kind.FETCH))
    extra = found.by_size(lambda k, samples: left(samples)[k].extra, count)
    ledger.add_some(Value.WORKSPACE, extra, home, forward, forward)
    whole = found.by_size(lambda k, samples: left(samples)[k].bytes, count)
    kinds = left(layout.kinds_of_amount[0][0])
    for k in numbers:
        away = out[k] >= 0
        reader = found.ops(Kind.R, [stage], units=[cut[k][1] - 1])[0] if again else back[k]
        if away.any():
            _travels(ledger, found, home[away], (forward[k, away], out[k, away], into[k, away]), whole[k, away])
            ledger.add(Value.SAVED, 0, home[away], into[k, away], reader[away], (reader[away],))
        maker = np.where(away, into[k], forward[k])
        # With recomputation every block that reads a crossing reads it from the pass, whoever brought it there.
        for until in kinds[k].until:
            end = back[until - base]
            part = found.by_size(partial(given_up, k, until), 1)[0]
            soon = np.minimum(early[k], part) if until == k and not again else np.zeros_like(part)
            ledger.add_some(Value.SAVED, soon, home, maker, end, early=True)
            ledger.add_some(Value.SAVED, part - soon, home, maker, end)


def _travels(ledger: Ledger, found: Found, home: Ints, ops: tuple[Ints, Ints, Ints], size: Ints) -> None:
    """A parcel on its way out, in the memory of the host, and on its way in."""
    forward, out, into = ops
    compute = nonzero(_COMPUTE[found.kind])  # later operations of a rank have higher numbers
    gone = compute[np.searchsorted(compute, out) + BEHIND - 1]
    before = compute[np.searchsorted(compute, into) - 1]
    ledger.add(Value.SAVED, size, home, forward, gone, (out,), early=True)
    ledger.add(Value.TOKEN, 0, home, out, gone, (gone,))
    ledger.add(Value.HOST, size, home, out, into, (into,))
    ledger.add(Value.TOKEN, 0, home, before, into, (into,))
