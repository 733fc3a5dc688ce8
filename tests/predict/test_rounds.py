"""Rounds of exchanges that are decided while running: worked sequences, and what no order can beat."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainplan.predict.rounds import Rounds, forward_over, rounds
from trainplan.program.agenda import Rule, check_agenda

READY, MB = (0.5, 1.2, 2.8, 3.0, 6.4), (5, 10, 20, 40, 30)  # ms


def sequence(cycle: float, threshold: int) -> list[tuple[list[int], float, float]]:
    rule = Rule(sizes=MB, threshold=threshold, cycle=cycle)
    played = rounds(rule, [READY], [0.0], seconds=lambda size: 0.1 + size / 10)
    return [([MB[part] for part in b], round(start, 6), round(end, 6)) for b, start, end in played.sent]


@pytest.mark.system("horovod", "P")
def test_horovod_cycle_of_a_millisecond() -> None:
    want = [([5], 1.0, 1.6), ([10], 2.0, 3.1), ([20, 40], 3.1, 9.2), ([30], 9.2, 12.3)]
    assert sequence(1.0, 64) == want


@pytest.mark.system("horovod", "P")
def test_horovod_cycle_of_five_milliseconds() -> None:
    assert sequence(5.0, 64) == [([5, 10, 20], 5.0, 8.6), ([40], 8.6, 12.7), ([30], 12.7, 15.8)]


@pytest.mark.system("horovod", "P")
def test_horovod_without_fusion() -> None:
    assert sequence(1.0, 0)[-1][2] == 12.4


def test_a_round_begins_when_the_last_rank_comes_and_takes_what_all_had() -> None:
    rule = Rule(sizes=(1, 1), threshold=64, cycle=1.0)
    played = rounds(rule, [[0.5, 0.9], [1.5, 2.5]], [0.0, 0.0], seconds=lambda size: 0.1, bits=0.25)
    # At 1 nobody but the first rank is ready; at 2.25 both have the first part; the second is ready at 2.5.
    assert played.agenda == ((), ((0,),), ((1,),))
    assert [start for _, start, _ in played.sent] == pytest.approx([2.25, 3.25])


# -- priorities: three layers, of which the last comes first ---------------------------------------------------------


def exchange(link: list[int], size: int, priorities: bool, backward: list[int], credit: int = 1) -> tuple[Rounds, list]:
    """Layers 1, 2, … whose gradients take so long each, in slices of a size at most, by priority or as they come."""
    layers = range(len(link))
    slices = [(layer, min(size, link[layer] - at)) for layer in reversed(layers) for at in range(0, link[layer], size)]
    ready = [float(sum(backward[layer:])) for layer, _ in slices]
    use = tuple(layer if priorities else 0 for layer, _ in slices)
    rule = Rule(sizes=tuple(own for _, own in slices), first_use=use, credit=credit)
    played = rounds(rule, [ready], [0.0], seconds=float)
    check_agenda(rule, played.agenda)
    arrived = [max(played.arrived(p) for p, (of, _) in enumerate(slices) if of == layer) for layer in layers]
    return played, arrived


def until_next_forward(link: list[int], size: int, priorities: bool, credit: int = 1) -> float:
    ones = [1] * len(link)
    return forward_over(len(link), ones, exchange(link, size, priorities, ones, credit)[1])


@pytest.mark.system("p3", "P")
@pytest.mark.parametrize(("link", "want"), [([2, 2, 2], (10, 9, 8)), ([1, 1, 6], (12, 11, 10))])
def test_p3_first_in_first_out_whole_tensors_and_slices(link: list[int], want: tuple[int, ...]) -> None:
    whole = max(link)
    found = [until_next_forward(link, size, by) for size, by in ((whole, False), (whole, True), (1, True))]
    assert tuple(found) == want


@pytest.mark.system("p3", "P")
def test_p3_sends_slices_in_the_order_in_which_they_are_needed() -> None:
    played, _ = exchange([2, 2, 2], 1, True, [1, 1, 1])
    layer = [3, 3, 2, 2, 1, 1]
    assert [layer[part] for (part,), _, _ in played.sent] == [3, 2, 1, 1, 2, 3]


@pytest.mark.system("bytescheduler", "P")
def test_bytescheduler_credit_keeps_what_has_gone_from_being_overtaken() -> None:
    """With credit for everything it is first in, first out again; with credit for one slice it is P3."""
    assert [until_next_forward([2, 2, 2], 1, True, credit) for credit in (1, 2, 100)] == [8, 9, 10]


def test_a_latency_is_paid_once_for_what_is_put_together() -> None:
    """Six gradients of a second each, ready one after the other; every round and every sum takes a second besides."""
    ready, use = [[float(at) for at in range(1, 7)]], (5, 4, 3, 2, 1, 0)
    apart, threes, whole = (
        rounds(Rule((1,) * 6, use, fill=fill), ready, [0.0], seconds=lambda size: 1.0 + size, bits=1.0)
        for fill in (0, 3, 6)
    )
    # By the time that something has gone, what is needed sooner has come.
    assert apart.agenda == tuple(((part,),) for part in (0, 3, 5, 4, 2, 1))
    assert threes.agenda == (((2, 1, 0),), ((5, 4, 3),))
    assert whole.agenda == (((5, 4, 3, 2, 1, 0),),)
    assert [played.over for played in (apart, threes, whole)] == [1 + 6 * 3, 3 + 2 * 5, 6 + 8]


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=9),
    st.integers(0, 20),
    st.integers(1, 20),
)
def test_put_together_or_not_every_part_goes_once(
    parts: list[tuple[int, int, int]], fill: int, credit: int
) -> None:  # fmt: skip
    sizes, *ready = (list(column) for column in zip(*parts, strict=True))
    rule = Rule(tuple(sizes), tuple(range(len(sizes)))[::-1], credit=credit, fill=fill)
    played = rounds(rule, [[float(at) for at in own] for own in ready], [0.0, 0.0], seconds=float, bits=0.5)
    check_agenda(rule, played.agenda)
    for buffer, start, _ in played.sent:
        assert len(buffer) == 1 or sum(sizes[part] for part in buffer) <= fill
        assert start >= max(own[part] for own in ready for part in buffer)


costs = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(1, 8)), min_size=1, max_size=6)


@given(costs, st.integers(1, 4), st.booleans(), st.integers(1, 12))
def test_no_order_beats_the_lower_bound(
    layers: list[tuple[int, int, int]], size: int, priorities: bool, credit: int
) -> None:
    forward, backward, link = (list(column) for column in zip(*layers, strict=True))
    _, arrived = exchange(link, size, priorities, backward, credit)
    over = forward_over(sum(backward), forward, arrived)
    assert over >= max(sum(forward) + sum(backward), backward[-1] + sum(link) + min(forward))


@given(costs)
def test_preemption_is_as_good_as_any_order_of_whole_tensors(layers: list[tuple[int, int, int]]) -> None:
    """Slices of one unit by priority: no order of whole tensors is better."""
    forward, backward, link = (list(column) for column in zip(*layers, strict=True))
    best = forward_over(sum(backward), forward, exchange(link, 1, True, backward)[1])
    ready = [sum(backward[layer:]) for layer in range(len(link))]
    for order in itertools.islice(itertools.permutations(range(len(link))), 120):
        at, arrived = 0, [0] * len(link)
        for layer in order:
            at = max(at, ready[layer]) + link[layer]
            arrived[layer] = at
        assert best <= forward_over(sum(backward), forward, arrived)
