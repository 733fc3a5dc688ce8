"""The search against simulating every plan of random spaces: the same answer always, and no bound is ever beaten."""

import itertools

import pytest

from search.spaces import Simulated, simulated, some_space
from trainplan.plan.text import text
from trainplan.search.best_first import Outcome, best_first
from trainplan.search.columns import Space
from trainplan.search.objective import MEMORY, MONEY, TIME, Objective


def hold(found: Space, everything: Simulated) -> None:
    """No bound is beaten."""
    known = everything.known
    fullest = MEMORY.floor(found, known)
    for row, p in enumerate(everything.plans):
        assert known.fits[row] or not p.fits, text(p.plan)
        assert known.bytes[row] <= everything.bytes[row] <= p.peak_bytes, text(p.plan)
        assert not p.fits or fullest[row] <= p.peak_bytes, text(p.plan)
        assert everything.fits[row] or not p.fits, text(p.plan)
        if p.fits:
            assert known.seconds[row] <= p.step_s * (1 + 1e-9), text(p.plan)
            assert everything.closer[row] <= p.step_s * (1 + 1e-9), text(p.plan)
        assert everything.in_order[row] <= p.step_s * (1 + 1e-9), text(p.plan)


def same(found: Space, everything: Simulated, objective: Objective, top: int) -> Outcome:
    """The best is the best of all."""
    answer = best_first(found, top, work=float("inf"), objective=objective)
    best = min((objective.value(p) for p in everything.plans if p.fits), default=None)
    assert best == (objective.value(answer.fitting[0]) if answer.fitting else None)
    assert (answer.left, answer.better, answer.gap) == (0, 0, 0.0)
    return answer


@pytest.mark.parametrize(("seed", "tied"), [(4, False), (7, False), (8, False), (11, True), (19, False), (23, True)])
def test_a_few_random_spaces(seed: int, tied: bool) -> None:
    """Devices alike and mixed, alone and beside others, with room and without, and weights that two blocks share."""
    found = some_space(seed, 24, tied)
    everything = simulated(found)
    hold(found, everything)
    for objective, top in ((TIME, 1), (TIME, 4), (MEMORY, 1)):
        same(found, everything, objective, top)
    if found.cluster.price_per_hour():
        same(found, everything, MONEY, 1)


@pytest.mark.parametrize("seed", [1039, 1044, 1075])
def test_of_three_stages_that_go_both_ways_one_rank_alone_has_the_middle_one(seed: int) -> None:
    """So no bucket keeps the gradients of that one."""
    found = some_space(seed, 8, schedule="gems", pp=3)
    assert len(found)
    hold(found, simulated(found))


def test_the_last_pass_may_be_one_that_is_recomputed() -> None:
    """And gradients are summed beside all of it."""
    found = some_space(526, 60, tied=True, schedule="gpipe", recompute="except-last", dp=2, pp=2)
    assert len(found)
    hold(found, simulated(found))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_two_hundred_random_spaces(part: int) -> None:
    simulations = plans = 0
    for seed in range(1000 + 20 * part, 1000 + 20 * (part + 1)):
        found = some_space(seed, [100, 200, 400, 2000][seed % 4], tied=seed % 3 == 0)
        everything = simulated(found)
        hold(found, everything)
        answer = same(found, everything, TIME, 1)
        plans, simulations = plans + len(found), simulations + answer.standing.simulated
    assert simulations < plans / 3


def test_the_places_of_a_table_are_those_of_the_best_shapes() -> None:
    """Within what is not worth a row, the times of the places are those of all plans simulated."""
    for seed in (3, 7, 26):
        found = some_space(seed, 60)
        everything = simulated(found)
        answer = best_first(found, top=5, work=float("inf"))
        whole = best_first(found, top=len(found), work=float("inf"))
        places = [p.step_s for p in answer.standing.shown()]
        assert len(places) > 1
        expected = [p.step_s for p in whole.standing.shown()[: len(places)]]
        for place, best in zip(places, expected, strict=True):
            assert place == pytest.approx(best, rel=0.011)
        assert min(p.step_s for p in everything.plans if p.fits) == answer.fitting[0].step_s


def test_a_search_that_stops_early_says_what_it_may_have_missed() -> None:
    found = some_space(6, 200)
    whole = best_first(found, work=float("inf"))
    outcomes = [best_first(found, work=work) for work in (1.0, 3000.0, 10000.0)]
    assert outcomes[0].better > 0
    for early in outcomes:
        assert early.bound <= whole.fitting[0].step_s * (1 + 1e-9)
        if early.fitting:
            assert early.fitting[0].step_s * (1 - early.gap) <= whole.fitting[0].step_s * (1 + 1e-9)
    for less, more in itertools.pairwise(outcomes):
        assert less.bound <= more.bound * (1 + 1e-9)
        assert less.gap >= more.gap or not less.fitting
