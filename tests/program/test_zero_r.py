"""Parcels: what they hold, where their copies stand, and which of them go."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from synthetic import chain
from tests.program.strategies import examples
from trainplan.errors import PlanError
from trainplan.plan.offload import shortest
from trainplan.plan.plan import plan
from trainplan.profile.footprint import footprints
from trainplan.profile.parcels import parcels
from trainplan.profile.profile import Crossing
from trainplan.program.check import check
from trainplan.program.lower import lower
from trainplan.program.lower.away import most_away
from trainplan.program.lower.backend import backend
from trainplan.program.lower.layout import Layout
from trainplan.program.offload import Absence, absences, decide, goes, levels
from trainplan.program.ops import Kind

pytestmark = pytest.mark.system("zero-r", "P")


def offloading(away, blocks: int = 6, **choices):
    return plan(blocks=blocks, offload="activations", away=away, **choices)


def test_copies_stand_behind_their_pass_and_one_section_ahead() -> None:
    program = check(lower(offloading(((2,),)), chain(6), batch=1))
    assert program.rank_list(0) == [
        "0F0",
        "0OFFLOAD0",
        "0F0.1",
        "0OFFLOAD0.1",
        "0F0.2",
        "0F0.3",
        "0F0.4",
        "0F0.5",
        "0B0",
        "0B0.1",
        "0B0.2",
        "0FETCH0.1",
        "0B0.3",
        "0FETCH0",
        "0B0.4",
        "0B0.5",
        "0STEP",
    ]


def test_copies_of_recomputed_passes() -> None:
    program = check(lower(offloading(((1,),), blocks=4, recompute="full"), chain(4), batch=1))
    assert program.rank_list(0) == [
        "0F0",
        "0OFFLOAD0",
        "0F0.1",
        "0F0.2",
        "0F0.3",
        "0R0.3",
        "0B0.3",
        "0R0.2",
        "0B0.2",
        "0FETCH0",
        "0R0.1",
        "0B0.1",
        "0R0",
        "0B0",
        "0STEP",
    ]


@pytest.mark.parametrize(("recompute", "schedule"), [*product(("none", "full"), ("gpipe", "1f1b", "interleaved"))])
def test_everything_that_can_go_is_legal_and_more_is_not(recompute: str, schedule: str) -> None:
    chunks = {"chunks": 2, "stages": (3, 6, 9)} if schedule == "interleaved" else {"stages": (6,)}
    choices = {"pp": 2, "micro": 4, "schedule": schedule, "recompute": recompute, "blocks": 12, **chunks}
    profile = chain(12)
    sketch = offloading(((1,),) * (len(chunks["stages"]) + 1), **choices)
    most = most_away(Layout(sketch, profile, 8, backend("gloo"), (0,)))
    program = check(lower(offloading(most, **choices), profile, 8))
    assert (program.kind == Kind.OFFLOAD).sum() == (program.kind == Kind.FETCH).sum() == sum(map(sum, most))
    more = tuple(tuple(number + 1 for number in row) for row in most)
    with pytest.raises(PlanError, match="those that are read again at once stay"):
        lower(offloading(more, **choices), profile, 8)


def test_the_last_two_sections_of_a_pass_that_goes_back_at_once_stay() -> None:
    layout = Layout(offloading(((1,),)), chain(6), 1, backend("gloo"), (0,))
    assert most_away(layout) == ((4,),)


def test_parcels_hold_all_that_a_pass_keeps_each_byte_once() -> None:
    """With crossings that several blocks save, and one that skips over a section."""
    profile = chain(6, skips=((0, 4),))
    saving = tuple(
        Crossing(c.name, c.producer, c.consumers, 8.0, 3, saved_by=(c.producer, *c.consumers))
        for c in profile.crossings
    )
    profile = chain(6, crossings=saving)
    sections = [(0, 2), (2, 3), (3, 6)]
    own = parcels(profile, 2, sections, again=False)
    print_ = footprints(profile, 2)
    assert sum(parcel.bytes for parcel in own) == print_.kept(0, 6)
    # h1 is made in section 0 and read in section 1: it goes with the latter, and is given up by the former.
    assert own[1].until == {1: 100, 0: 19}
    most = max(sum(p.bytes for p in own[: number + 1]) + p.extra for number, p in enumerate(own))
    assert most == print_.kept(0, 6) + print_.forward_extra(0, 6)


def test_levels_fall_by_the_parcels_that_are_away() -> None:
    profile = chain(6, saved=10_000)
    nothing, program = lower(plan(blocks=6), profile, 1), lower(offloading(((3,),)), profile, 1)
    parcels_, level = absences(program, 0), levels(program, 0)
    assert [(p.section, p.bytes) for p in parcels_] == [(0, 10_000), (1, 10_000), (2, 10_000)]
    names = program.rank_list(0)
    assert [(names[p.gone], names[p.back]) for p in parcels_] == [
        ("0F0.2", "0FETCH0"), ("0F0.3", "0FETCH0.1"), ("0F0.4", "0FETCH0.2"),
    ]  # fmt: skip
    assert levels(nothing, 0).max() - level.max() == 30_000


def test_what_is_read_last_goes_first_and_no_more_than_must() -> None:
    level = np.array([10, 20, 30, 40, 30, 20, 10])
    there = [Absence(0, 0, 0, 25, 1, 6), Absence(0, 0, 1, 25, 2, 5), Absence(0, 0, 2, 25, 3, 4)]
    assert decide(level, there, 115) == [False, False, False]
    assert decide(level, there, 114) == [True, False, False]
    assert decide(level, there, 89) == [True, True, False]
    assert decide(level, there, 10) == [True, True, True]


def test_the_policy_never_lets_go_of_more_than_one_parcel_too_many() -> None:
    generator = np.random.default_rng(0)
    for _ in range(200):
        there = [tuple(row) for row in generator.integers(1, 20, (6, 2)).tolist()]
        alive = int(generator.integers(0, 150))
        chosen = goes(alive, 60, there)
        left = alive - sum(there[number][0] for number in chosen)
        assert left <= 60 or len(chosen) == len(there)
        assert not chosen or left + there[chosen[-1]][0] > 60
        stays = [there[n][1] for n in range(len(there)) if n not in chosen]
        assert all(there[n][1] >= max(stays, default=0) for n in chosen)


@st.composite
def layouts(draw):
    """Any plan that can offload, on a model with skips and tied weights; and everything away that can be."""
    pp, dp, micro = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 4))
    blocks = draw(st.integers(max(pp, 3), 8))
    cuts = draw(st.lists(st.integers(1, blocks - 1), min_size=pp - 1, max_size=pp - 1, unique=True).map(sorted))
    choices = {
        "dp": dp, "pp": pp, "micro": micro, "blocks": blocks, "stages": tuple(cuts),
        "bucket": draw(st.integers(1, 5000)),
        "schedule": draw(st.sampled_from(("gpipe", "1f1b", "naive") if pp > 1 else ("naive",))),
        "recompute": draw(st.sampled_from(("none", "full", "except-last"))),
        "zero": draw(st.integers(0, 3)) if dp > 1 else 0,
        "overlap": draw(st.sampled_from(("on", "off"))),
    }  # fmt: skip
    skip = (0, draw(st.integers(2, blocks - 1)))
    profile = chain(blocks, saved=50_000, skips=(skip,), tied=((0, blocks - 1),), clip_norm=1.0)
    saving = tuple(replace(c, saved_by=(c.producer, *c.consumers)) for c in profile.crossings)
    profile = replace(profile, crossings=saving)
    sketch = offloading(((1,),) * pp, **choices)
    most = most_away(Layout(sketch, profile, 8, backend("gloo"), (0,)))
    away = tuple(tuple(draw(st.integers(0, number)) for number in row) for row in most)
    return choices, profile, most, away


@examples(40)
@given(layouts())
def test_any_plan_that_offloads_is_legal_and_no_larger(case) -> None:
    """Some of what can go, and all of it: legal programs, and ever less on the device, by what is on the host."""
    choices, profile, most, away = case
    found = []
    for own in (shortest(away), shortest(most)):
        chosen = offloading(own, **choices) if own else plan(**choices)
        program = check(lower(chosen, profile, 8, steps=2))
        gone = int((program.kind == Kind.OFFLOAD).sum())
        expected = 2 * choices["dp"] * sum(sum(r) * (choices["micro"] if len(r) == 1 else 1) for r in own)
        assert gone == (program.kind == Kind.FETCH).sum() == expected
        found.append([levels(program, rank).max() for rank in range(program.world)])
    if away and any(map(any, away)):
        assert all(less <= more for less, more in zip(found[1], found[0], strict=True))
