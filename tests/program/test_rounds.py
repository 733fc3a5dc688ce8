"""Exchanges as rounds of transfers: they sum, nobody overwrites what is being sent, and their bytes are known."""

import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from synthetic import chain
from trainplan.plan.plan import WORDS, plan
from trainplan.program.check import check
from trainplan.program.exchanges import BY_ROUNDS, HIERARCHICAL, gloo, rounds_of
from trainplan.program.exchanges.rounds import Rounds, Transfer, beside, play, sent
from trainplan.program.lower import lower
from trainplan.program.ops import Kind, Value
from trainplan.program.traffic import sent as sent_for
from trainplan.program.traffic import sent_by_rank

WORLDS = st.integers(2, 9)


def made(word: str, members: int, elements: int) -> Rounds:
    """Hierarchical: on nodes of the largest number of ranks that divides."""
    node = max(d for d in range(1, members) if members % d == 0)
    return rounds_of(word, tuple(range(members)), elements, node)


def test_every_word_of_a_plan_is_an_exchange() -> None:
    """But the backend's own. (Words whose gradients do not stay in step are no sums.)"""
    assert set(BY_ROUNDS) <= set(WORDS["exchange"]) - {"all-reduce"}


@pytest.mark.parametrize("word", BY_ROUNDS)
@settings(max_examples=30)
@given(members=WORLDS, elements=st.integers(0, 40), seed=st.integers(0, 99))
def test_everybody_has_the_sum_and_the_same_to_the_last_bit(word: str, members: int, elements: int, seed: int) -> None:
    numbers = random.Random(seed)
    held = [[numbers.lognormvariate(0, 2) for _ in range(elements)] for _ in range(members)]
    after = play(made(word, members, elements), held)
    assert all(own == after[0] for own in after)
    np.testing.assert_allclose(after[0], np.sum(held, axis=0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("word", BY_ROUNDS)
@settings(max_examples=30)
@given(members=WORLDS, elements=st.integers(0, 40))
def test_nothing_is_replaced_while_it_is_sent(word: str, members: int, elements: int) -> None:
    """So that what arrives to stay can be received right where it belongs."""
    for one in made(word, members, elements):
        for a, b in itertools.permutations(one, 2):
            if not a.adds and a.target in (b.source, b.target):
                assert a.last <= b.first or b.last <= a.first


@settings(max_examples=30)
@given(members=WORLDS, parts=st.integers(1, 5))
def test_elements_that_are_sent_as_in_the_closed_forms(members: int, parts: int) -> None:
    whole = parts * members * 2 ** (members.bit_length() - 1)  # so that everything divides
    log = math.ceil(math.log2(members))
    least = (2 * whole * (members - 1) // members,) * members
    assert (
        sent(made("ring", members, whole), members) == sent(made("all-to-all-sliced", members, whole), members) == least
    )
    assert sent(made("all-to-all", members, whole), members) == ((members - 1) * whole,) * members
    tree = sent(made("tree", members, whole), members)
    assert (sum(tree), max(tree), tree[0]) == (2 * (members - 1) * whole, log * whole, log * whole)
    if members == 2**log:
        assert sent(made("halving-doubling", members, whole), members) == least
    node = max(d for d in range(1, members) if members % d == 0)
    nodes = members // node
    inside, between = 2 * (node - 1) * whole // node, 2 * (nodes - 1) * whole // nodes // node
    assert sent(made(HIERARCHICAL, members, whole), members) == (inside + between,) * members


@pytest.mark.parametrize("word", BY_ROUNDS)
@settings(max_examples=30)
@given(members=WORLDS, elements=st.integers(0, 40))
def test_room_beside_is_that_of_what_arrives_to_be_added(word: str, members: int, elements: int) -> None:
    rounds = made(word, members, elements)
    most = {"ring": -(-elements // members), "tree": elements, "all-to-all": (members - 1) * elements}
    if word in most:
        assert max(beside(rounds, members)) == most[word]
    assert all(room <= (members - 1) * elements for room in beside(rounds, members))


def test_a_wrong_exchange_is_noticed() -> None:
    """The definition tells a ring whose last round is missing from one that is whole."""
    rounds, held = made("ring", 3, 6), [[1.0] * 6] * 3
    assert play(rounds, held) == [[3.0] * 6] * 3
    assert play(rounds[:-1], held) != [[3.0] * 6] * 3
    assert play((*rounds, (Transfer(0, 1, 0, 1, True),)), held) != [[3.0] * 6] * 3


# -- what gloo's own all-reduce sends -------------------------------------------------------------------------------

WORKED = [
    (3, 4000, (5336, 5328, 5336)),
    (4, 40, (64, 48, 56, 72)),
    (3, 28, (40, 28, 44)),
    (8, 100, (184, 168, 168, 168, 168, 168, 180, 196)),
]


@pytest.mark.parametrize(("ranks", "size", "wanted"), WORKED)
def test_bytes_of_gloo_worked(ranks: int, size: int, wanted: tuple[int, ...]) -> None:
    assert gloo.sent(ranks, size, 4) == wanted


@settings(max_examples=30)
@given(ranks=st.integers(1, 16), elements=st.integers(0, 10**7), element=st.sampled_from((2, 4, 8)))
def test_bytes_of_gloo_sum_to_those_of_a_ring(ranks: int, elements: int, element: int) -> None:
    size = elements * element
    found = gloo.sent(ranks, size, element)
    assert sum(found) == 2 * (ranks - 1) * size
    assert all(0 <= own <= 2 * size and own % element == 0 for own in found)


# -- in a program ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", BY_ROUNDS)
def test_bytes_of_a_program(word: str) -> None:
    """Buckets by the exchange, the losses by gloo; and what the ranks of the program send is what its rounds say."""
    node = {"node": 2} if word == HIERARCHICAL else {}
    program = check(lower(plan(dp=4, exchange=word, bucket=1500, blocks=3, **node), chain(3), 4, steps=2))
    sums = [op for op in program.ops() if op.key.kind is Kind.REDUCE_GRAD and op.key.step == 0]
    assert [op.bytes for op in sums] == [2000, 1000]
    for op in sums:
        wanted = [4 * n for n in sent(rounds_of(word, (0, 1, 2, 3), op.bytes // 4, 2), 4)]
        assert [sent_for(program, op.id).get(rank, 0) for rank in range(4)] == wanted
    loss = next(op for op in program.ops() if op.key.kind is Kind.LOSS)
    assert sent_for(program, loss.id) == {0: 8, 1: 8, 2: 16, 3: 16}
    whole = [sum(sent_for(program, op.id).get(rank, 0) for op in (*sums, loss)) for rank in range(4)]
    assert sent_by_rank(program).tolist() == whole


def test_room_for_what_arrives_is_in_the_memory_of_a_program() -> None:
    """Of a host it is kept from one sum to the next, a device's is there for each; slices of a GPU receive on the
    host, and so have none."""
    for word, backend in itertools.product(("ring", "tree", "all-to-all"), ("gloo", "nccl", "gloo-staged")):
        program = lower(plan(dp=4, exchange=word, blocks=3), chain(3), 4, backend=backend)
        room = np.flatnonzero(program.value_kind == Value.COMMUNICATION)
        if backend == "gloo-staged":
            assert len(room) == 0
            continue
        assert (program.value_end[room] == program.value_maker[room]).all()
        if backend == "gloo":
            assert (program.value_maker[room] == -1).all()
        else:
            assert (program.kind[program.value_maker[room]] == Kind.REDUCE_GRAD).all()
        found = dict(zip(program.value_rank[room].tolist(), program.value_bytes[room].tolist(), strict=True))
        wanted = {"ring": dict.fromkeys(range(4), 3000 // 4 // 4 * 4), "tree": {0: 3000, 2: 3000}}
        if word in wanted:
            assert found.keys() == wanted[word].keys()
            assert all(0 <= found[r] - size <= 4 for r, size in wanted[word].items())
        else:
            assert found == dict.fromkeys(range(4), 9000)
