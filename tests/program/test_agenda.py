"""What goes when: the worked lists of Horovod's fusion, credits, and that every part goes once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainplan.errors import InputError
from trainplan.program.agenda import Rule, check_agenda, choose, fuse, in_turn, landed_first, whole_threshold, worth

MB = 10**6


def test_a_gradient_that_does_not_fit_ends_the_buffer() -> None:
    assert fuse(range(4), [50, 20, 10, 30], 64) == ((0,), (1, 2, 3))


def test_other_types_are_set_aside_and_come_next() -> None:
    assert fuse(range(7), [20, 8, 10, 8, 30, 70, 1], 64, "fhfhfff") == ((0, 2, 4), (1, 3), (5,), (6,))


def test_threshold_nought_fuses_nothing() -> None:
    assert fuse(range(3), [5, 5, 5], 0) == ((0,), (1,), (2,))


def test_the_threshold_is_a_multiple_of_512_bytes_for_each_rank_of_a_node() -> None:
    assert whole_threshold(MB, 4) == 1_001_472
    assert whole_threshold(64 * 2**20, 8) == 64 * 2**20


@given(st.lists(st.integers(1, 100), min_size=1, max_size=12), st.integers(0, 120))
def test_with_one_type_fusion_is_greedy(sizes: list[int], threshold: int) -> None:
    greedy: list[list[int]] = []
    for part, size in enumerate(sizes):
        if greedy and sum(sizes[p] for p in greedy[-1]) + size <= threshold:
            greedy[-1].append(part)
        else:
            greedy.append([part])
    assert fuse(range(len(sizes)), sizes, threshold) == tuple(map(tuple, greedy))


@given(st.lists(st.tuples(st.integers(1, 60), st.sampled_from("fh")), min_size=1, max_size=12), st.integers(0, 90))
def test_fusion_sends_everything_once_and_keeps_types_apart(parts: list[tuple[int, str]], threshold: int) -> None:
    sizes, types = [size for size, _ in parts], [kind for _, kind in parts]
    found = fuse(range(len(parts)), sizes, threshold, types)
    assert sorted(part for buffer in found for part in buffer) == list(range(len(parts)))
    for buffer in found:
        assert len({types[part] for part in buffer}) == 1
        assert len(buffer) == 1 or sum(sizes[part] for part in buffer) <= threshold


def test_a_part_goes_as_long_as_any_credit_is_left() -> None:
    """ByteScheduler's credit may become negative; BytePS's would not."""
    rule = Rule(sizes=(10, 10, 10, 10), first_use=(3, 2, 1, 0), credit=15)
    assert choose(rule, {0, 1, 2, 3}, flying=()) == ((3,), (2,))  # 15, then 5, then −5
    assert choose(rule, {0, 1}, flying={3, 2}) == ()
    assert choose(rule, {0, 1}, flying={2}) == ((1,),)


@given(st.lists(st.lists(st.integers(1, 9), max_size=3), max_size=8), st.integers(1, 30), st.sampled_from([None, 64]))
def test_a_round_waits_for_as_many_as_leave_credit(rounds: list[list[int]], credit: int, fused: int | None) -> None:
    """By the definition: of all buffers before it, the fewest that leave less than the credit on their way; and never
    fewer than a round before it had to wait for."""
    sizes = tuple(size for buffers in rounds for size in buffers)
    parts = iter(range(len(sizes)))
    agenda = tuple(tuple((next(parts),) for _ in buffers) for buffers in rounds)
    found = landed_first(Rule(sizes, credit=credit, threshold=fused), agenda)
    before = 0
    for number, buffers in enumerate(rounds):
        gone = [size for earlier in rounds[:number] for size in earlier]
        fewest = next(n for n in range(len(gone) + 1) if sum(gone[n:]) < credit) if buffers else 0
        before = max(before, len(gone) if fused else fewest)
        assert found[number] == before


def test_by_priority_small_parts_go_side_by_side() -> None:
    """Up to `fill`, those that are needed first, and only of one type; a long one goes as before."""
    rule = Rule(sizes=(9, 2, 2, 2, 2), first_use=(4, 3, 2, 1, 0), types=tuple("fffhf"), fill=6)
    assert choose(rule, {0, 1, 2, 4}, flying=()) == ((4, 2, 1),)
    assert choose(rule, {0, 1, 2, 3, 4}, flying=()) == ((4,),)  # the next is of another type
    assert choose(rule, {0}, flying=()) == ((0,),)
    credit = Rule(sizes=(2,) * 5, first_use=(4, 3, 2, 1, 0), credit=7, fill=4)
    assert choose(credit, set(range(5)), flying=()) == ((4, 3), (2, 1))  # 7, 5, 3, 1: and then none is left
    assert choose(credit, {0, 1}, flying={4, 3, 2}) == ((1,),)


def test_a_rank_comes_when_it_has_enough_or_everything() -> None:
    rule = Rule(sizes=(9, 2, 2, 2), first_use=(3, 2, 1, 0), fill=6)
    assert [worth(rule, ready, {0, 1, 2, 3}) for ready in ({1, 2}, {0}, {1, 2, 3})] == [False, True, True]
    assert worth(rule, {1}, {1})
    assert not worth(rule, (), ())


def test_a_round_waits_for_the_arrivals_that_give_it_credit() -> None:
    rule = Rule(sizes=(10,) * 4, first_use=(3, 2, 1, 0), credit=15)
    assert landed_first(rule, (((3,), (2,)), ((1,),), ((0,),))) == [0, 1, 2]
    assert landed_first(Rule(sizes=(10,) * 4, first_use=(0,) * 4), in_turn(rule)) == [0, 1, 2, 3]  # one at a time


def test_an_agenda_that_leaves_a_part_out_is_refused() -> None:
    rule = Rule(sizes=(4, 4, 4), threshold=64)
    assert check_agenda(rule, (((0, 1),), (), ((2,),)))
    for wrong in ((((0, 1),),), (((0, 1), (1, 2)),)):
        with pytest.raises(InputError, match="a step has 3"):
            check_agenda(rule, wrong)
