"""Bounds by the order of passes, and by room: against closed forms, and against trying all cuts."""

import itertools
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from search.models import model
from search.spaces import some_space
from trainplan.cluster.parse import cluster
from trainplan.plan.plan import WORDS, Plan
from trainplan.predict.predict import MEMORY_MARGIN, predict
from trainplan.profile.profile import Profile
from trainplan.search.blocks import Blocks, Lasting
from trainplan.search.closer import Closer
from trainplan.search.columns import FIELDS, Space, space
from trainplan.search.floor import floors
from trainplan.search.in_order import in_order
from trainplan.search.room import context
from trainplan.solve import resolve
from trainplan.solve.limits import limited
from trainplan.units import MIB

WHERE = cluster("8xTitanRTX")


def even(profile: Profile) -> Blocks:
    """Blocks that all take one second forward and two back, and add nothing up."""
    blocks = Blocks(Lasting(profile), profile, 1, 1.0)
    count = len(profile.blocks)
    blocks.forth = blocks.again = np.ones(count)
    blocks.once, blocks.adding = np.full(count, 3.0), np.zeros(count)
    blocks.there = blocks.back = np.zeros(count - 1)
    return blocks


@settings(max_examples=30, deadline=None)
@given(ranks=st.integers(2, 6), micro=st.integers(1, 12), schedule=st.sampled_from(["gpipe", "1f1b"]))
def test_equal_stages_take_what_the_papers_say(ranks: int, micro: int, schedule: str) -> None:
    blocks = even(model(1, ranks, "TitanRTX"))
    sketch = replace(_sketch(ranks), pp=ranks, schedule=schedule, micro=micro)
    seconds = in_order(sketch, tuple(range(1, ranks)), blocks, blocks, 0, WHERE)
    assert seconds == pytest.approx(3.0 * (micro + ranks - 1))


@settings(max_examples=20, deadline=None)
@given(ranks=st.integers(2, 4), rounds=st.integers(1, 4), chunks=st.integers(2, 3))
def test_chunks_make_the_bubble_smaller(ranks: int, rounds: int, chunks: int) -> None:
    blocks, micro = even(model(1, ranks * chunks, "TitanRTX")), ranks * rounds
    sketch = replace(_sketch(ranks * chunks), pp=ranks, schedule="interleaved", chunks=chunks, micro=micro)
    seconds = in_order(sketch, tuple(range(1, ranks * chunks)), blocks, blocks, 0, WHERE)
    assert seconds == pytest.approx(3.0 * (micro * chunks + ranks - 1))


def _sketch(blocks: int):
    whole = space(model(1, blocks, "TitanRTX"), WHERE, 16)
    return whole.sketch(int(np.flatnonzero((whole.column("pp") == 2) & (whole.column("dp") == 1))[0]))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved", "chimera", "looped", "gems"])
def test_what_has_no_room_has_none_with_any_cuts(schedule: str) -> None:
    """In the least bytes over all cuts, by what is in flight at every moment, a plan may fit."""
    profile = model(5, 6, "TitanRTX", weights=16 * MIB, boundary=10**6)
    whole = space(profile, WHERE, 16)
    word = WORDS["schedule"].index(schedule)
    keep = (whole.column("schedule") == word) & (whole.column("pp") <= 4) & (whole.column("dp") == 2)
    rows = whole.rows[keep][:: max(1, int(keep.sum()) // 25)]
    found = Space(profile, WHERE, 16, "fp32", rows)
    assert len(found)
    for row, least in enumerate(_by_trying(found)):
        there = limited(WHERE, int((least + context(WHERE)) / (1 - MEMORY_MARGIN)) + 2)
        known = floors(replace(found, rows=found.rows[row : row + 1], cluster=there))
        assert known.fits[0], dict(zip(FIELDS, rows[row].tolist(), strict=True))


def _by_trying(found: Space) -> list[float]:
    """Bytes of the fullest rank with the cuts that need the least."""
    known = floors(found)
    closer, least = Closer(found, known), []
    for row in range(len(found)):
        sketch, variant = found.sketch(row), int(known.variant[row])
        samples, larger = divmod(-(-found.batch // sketch.dp), sketch.micro)
        small, large = (closer._of(variant, size) for size in (samples, samples + (larger > 0)))
        every = itertools.combinations(range(1, sketch.blocks), sketch.wanted - 1)
        least.append(min(closer._most(sketch, cut, small, large, larger) for cut in every))
    return least


def test_other_cuts_are_the_same_where_bounds_rule_some_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some pipelines of random spaces are cut anew with the bound and without: the same plans, after fewer
    simulations."""
    simulated = list[Plan]()
    monkeypatch.setattr(resolve, "predict", lambda plan, *rest: simulated.append(plan) or predict(plan, *rest))
    counts = np.zeros(2, np.int64)
    for seed in (3, 5, 7, 19):
        found = some_space(seed, 400)
        closer = Closer(found, floors(found))
        rows = np.flatnonzero((found.column("pp") > 1) & (found.column("spread") == 0))
        for row in rows[:: 1 + len(rows) // 12].tolist():
            where = found.cluster, found.batch, closer.tables(row)
            first, answers = resolve.draft(found.sketch(row), *where), []
            for way, least in enumerate((None, partial(closer.in_order, row))):
                simulated.clear()
                answers.append(resolve.refine(first, ("stages",), *where, least=least))
                counts[way] += len(simulated)
            assert answers[0] == answers[1]
    assert counts[1] < 0.9 * counts[0]
