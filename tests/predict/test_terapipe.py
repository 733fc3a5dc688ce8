"""TeraPipe, predicted: time and memory of slices against what is known of them, and how the slices are chosen."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from synthetic import chain
from tests.program.strategies import examples
from trainplan.cluster.cluster import Cluster, Device, Link, Node
from trainplan.errors import PlanError
from trainplan.plan.plan import Plan, plan
from trainplan.plan.text import parse
from trainplan.predict.clock import Played, play
from trainplan.predict.cost import Setting, costs
from trainplan.predict.memory import in_flight, peaks
from trainplan.profile.profile import Profile
from trainplan.program.check import check
from trainplan.program.lower import lower
from trainplan.program.ops import COMPUTES, Kind, Value
from trainplan.solve.resolve import solve
from trainplan.solve.slices import _seconds

LENGTH = 16


def cluster(ranks: int) -> Cluster:
    node = Node("node", (Device("cpu", 10**9, {}, 1e9),) * ranks, Link("inside", 0.0, 1e18))
    return Cluster("row", (node,), "gloo")


def model(stages: int, terms: tuple[float, float, float] = (0.25, 2.0, 4.0), **fields) -> Profile:
    """A block a stage. Its seconds by (fixed, length, length × reach); 10 bytes a token saved, of which 4 are carried,
    and 1 byte a token at each boundary."""
    there, back = 1.0 + terms[0], 1.0 + 2 * terms[0]  # whole sequences: one second beyond the fixed ones
    made = chain(stages, forward=there, backward=back, tokens_per_sample=LENGTH, whole_sequences=None, **fields)
    block = replace(
        made.blocks[0], saved_bytes=(10.0 * LENGTH,) * 2, carried_bytes=4.0 * LENGTH, slice_forward=terms,
        slice_backward=tuple(2 * term for term in terms),
    )  # fmt: skip
    crossings = (replace(c, bytes_per_sample=float(LENGTH), fixed_bytes=0) for c in made.crossings)
    return replace(made, blocks=(block,) * stages, crossings=tuple(crossings))


def sliced(stages: int, slices: tuple[int, ...], micro: int = 1) -> Plan:
    cuts = tuple(range(1, stages))
    return plan(pp=stages, micro=micro, schedule="terapipe", stages=cuts, blocks=stages, slices=slices)


def played(profile: Profile, choices: Plan) -> Played:
    program = check(lower(choices, profile, choices.micro))
    run, _ = costs(program, Setting(profile, cluster(choices.pp)))
    return play(program, np.where(np.isin(program.kind, COMPUTES), run, 0.0))


def cut(length: int):
    """Slices that make up a sequence."""
    places = st.sets(st.integers(1, length - 1), min_size=1)
    return places.map(lambda found: tuple(np.diff([0, *sorted(found), length]).tolist()))


@pytest.mark.system("terapipe", "P")
@examples(60)
@given(st.integers(2, 6), st.integers(1, 4), cut(LENGTH), st.tuples(*[st.integers(0, 5).map(float)] * 3))
def test_terapipe_takes_all_slices_and_the_longest_once_more_for_every_stage(stages, micro, slices, terms) -> None:
    fixed, by_length, by_reach = terms
    before = np.cumsum(slices) - slices
    times = fixed + np.array(slices) / LENGTH * (by_length + by_reach * (before + slices) / LENGTH)
    found = played(model(stages, terms), sliced(stages, slices, micro))
    # There, and back at twice the price.
    assert found.makespan == pytest.approx(3 * (micro * times.sum() + (stages - 1) * times.max()))
    assert [in_flight(found, rank) for rank in range(stages)] == [micro * len(slices)] * stages


@pytest.mark.system("terapipe", "P")
def test_terapipe_holds_every_slice_with_its_keys_and_values() -> None:
    slices, samples = (8, 4, 4), 1
    found = played(model(2), sliced(2, slices))
    program = found.program
    saved = [op for op in range(len(program)) if program.kind[op] == Kind.F and program.rank[op] == 0]
    sizes = {
        program.name(op): sum(int(program.value_bytes[v]) for v in program.makes.row(op)
                              if program.value_kind[v] == Value.SAVED)
        for op in saved
    }  # fmt: skip
    # Keys and values of all tokens so far are put side by side, but for the first slice, which has only its own.
    assert sizes == {"0F0": 80, "0F0/1": 40 + 4 * 12, "0F0/2": 40 + 4 * 16}
    # On the way back, gradients of the keys and values of the earlier slices gather beside them: 4 bytes × 12 tokens.
    back = next(op for op in range(len(program)) if program.name(op) == "0B0/2")
    made = [int(program.value_bytes[v]) for v in program.makes.row(back) if program.value_kind[v] == Value.SAVED]
    assert made == [4 * 8, 4 * 4]
    at = peaks(found)[0]
    assert at.op == "0B0/2"
    assert at.breakdown["saved"] == sum(sizes.values()) + sum(made)
    assert samples * LENGTH == sum(slices)


def test_later_slices_wait_for_the_keys_and_values_of_earlier_ones() -> None:
    program = check(lower(sliced(2, (8, 4, 4)), model(2), 1))
    last = next(op for op in range(len(program)) if program.name(op) == "1F0/2")
    makers = {program.name(program.value_maker[v]) for v in program.reads.row(last)}
    assert makers == {"1RECV_F0/2", "1F0", "1F0/1"}


@pytest.mark.system("terapipe", "P")
def test_a_slice_that_is_recomputed_keeps_its_keys_and_values_beside_the_inputs_of_blocks() -> None:
    slices = (8, 4, 4)
    found = played(model(2), replace(sliced(2, slices), recompute="full"))
    program = found.program
    ops = {program.name(op): op for op in range(len(program))}

    def made(name: str) -> list[int]:
        values = [v for v in program.makes.row(ops[name]) if program.value_kind[v] == Value.SAVED]
        return sorted(int(program.value_bytes[v]) for v in values if program.value_bytes[v])

    def seconds(name: str) -> float:
        return float(found.end[ops[name]] - found.start[ops[name]])

    assert [made(name) for name in ("0F0", "0F0/1", "0F0/2")] == [[4 * 8], [4 * 4], []]  # nobody reads the last one's
    assert made("0B0/2") == [4 * 4, 4 * 8]  # their gradients
    assert made("0B0/1") == []
    for later in ("1F0/2", "1R0.1/2"):
        makers = {program.name(program.value_maker[v]) for v in program.reads.row(ops[later])}
        assert {"1F0", "1F0/1"} <= makers
    for part in ("", "/1", "/2"):
        times = [seconds(f"1{name}{part}") for name in ("F0", "R0.1", "B0.1")]
        assert times == pytest.approx([times[0], times[0], 2 * times[0]])


@pytest.mark.system("terapipe", "S")
def test_terapipe_chooses_slices_by_the_second_forward_as_well() -> None:
    profile, chosen = model(2), sliced(2, (8, 8))
    once, twice = (
        _seconds(replace(chosen, recompute=word), profile, cluster(2), 1, LENGTH) for word in ("none", "full")
    )
    # Of one token: 1/4, and for the whole sequence 2 + 4 · (its reach), forward; and twice that back.
    forward = [0.25 + (2 + 4 * reach / LENGTH) / LENGTH for reach in range(1, LENGTH + 1)]
    assert (twice - once)[0] == pytest.approx(forward)
    assert once[0] == pytest.approx(3 * (twice - once)[0])


def test_messages_carry_the_tokens_of_their_slice() -> None:
    program = check(lower(sliced(2, (8, 5, 3), micro=2), model(2), 5))
    sent = {program.name(op): int(program.bytes[op]) for op in range(len(program)) if program.kind[op] == Kind.SEND_F}
    assert sent == {
        "0SEND_F0": 24, "0SEND_F0/1": 15, "0SEND_F0/2": 9, "0SEND_F1": 16, "0SEND_F1/1": 10, "0SEND_F1/2": 6
    }  # fmt: skip


# -- open slices ----------------------------------------------------------------------------------------------------


@pytest.mark.system("terapipe", "S")
def test_terapipe_slices_are_found_by_the_dynamic_program_and_the_clock() -> None:
    profile = model(4, (0.01, 0.4, 1.2))
    found = solve(parse("terapipe pp=4 micro=1"), profile, cluster(4), 1)
    slices = found.plan.slices
    assert sum(slices) == LENGTH
    assert list(slices) == sorted(slices, reverse=True)  # later tokens attend to more
    assert slices[0] > slices[-1]
    for other in ((8, 8), (4, 4, 4, 4), (2,) * 8, (1,) * 16, (6, 4, 3, 3)):
        assert found.step_s <= solve(
            parse(f"terapipe pp=4 micro=1 slices={','.join(map(str, other))}"), profile, cluster(4), 1
        ).step_s * (1 + 1e-3)


@pytest.mark.system("terapipe", "S")
@pytest.mark.parametrize("count", [2, 3, 16])
def test_terapipe_with_just_so_many_slices(count: int) -> None:
    found = solve(parse(f"terapipe pp=2 slices={count}"), model(2), cluster(2), 2).plan
    assert len(found.slices) == count
    assert sum(found.slices) == LENGTH


@pytest.mark.parametrize(
    ("line", "fields", "why", "instead"),
    [
        ("terapipe pp=2 slices=1", {}, "cut into 2 slices or more", "schedule=gpipe"),
        ("terapipe pp=2 slices=17", {}, "a sequence of 16 tokens", "slices=16"),
        ("terapipe pp=2", {"whole_sequences": "it pools over tokens"}, "it pools over tokens", "schedule=1f1b"),
        ("terapipe pp=2 slices=8,9", {}, "sum to 17 tokens, and a sequence has 16", "slices=8,8"),
    ],
)
def test_refusals(line: str, fields: dict, why: str, instead: str) -> None:
    with pytest.raises(PlanError) as caught:
        solve(parse(line), replace(model(2), **fields), cluster(2), 2)
    assert why in caught.value.why
    assert instead in caught.value.instead
