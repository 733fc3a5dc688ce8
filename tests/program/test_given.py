"""Orders of work that are given: whatever is no contradiction is a legal program, with whole and split passes mixed."""

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from synthetic import chain
from tests.program.strategies import examples
from tests.program.test_merged import tables
from trainplan.plan.order import known
from trainplan.plan.plan import plan
from trainplan.predict.clock import play
from trainplan.predict.memory import tracks
from trainplan.program.check import check
from trainplan.program.lower import lower
from trainplan.program.ops import Value
from trainplan.program.program import Program


@st.composite
def orders(draw) -> tuple[str, ...]:
    """Any order at all: stages anywhere, passes whole or split, and next is whatever could be."""
    table = draw(tables().filter(lambda table: len(set(table)) > 1))
    micro, stages = draw(st.integers(1, 3)), len(table)
    split = {(s, m) for s in range(stages) for m in range(micro) if draw(st.booleans())}
    lines: list[list[str]] = [[] for _ in set(table)]
    # For every micro-batch on every stage what it does next; forward may begin on the first stage.
    ready = [("F", 0, m) for m in range(micro)]
    while ready:
        kind, s, m = ready.pop(draw(st.integers(0, len(ready) - 1)))
        lines[table[s]].append(f"{s}{kind}{m}")
        if kind == "F":
            ready.append(("F", s + 1, m) if s + 1 < stages else ("I" if (s, m) in split else "B", s, m))
        if kind == "I":
            ready.append(("W", s, m))
        if kind in ("B", "I") and s:
            ready.append(("I" if (s - 1, m) in split else "B", s - 1, m))
    return tuple(map(",".join, lines))


@examples(40)
@given(orders(), st.integers(1, 2))
def test_whatever_is_no_contradiction_is_a_legal_program(order: tuple[str, ...], dp: int) -> None:
    stages = known(order).stages
    assert known(order).lines == order
    made = plan(dp=dp, order=order, stages=tuple(range(1, stages)), blocks=stages, bucket=1000)
    profile = chain(stages, skips=((0, stages - 1),) if stages > 2 else (), tied=((0, stages - 1),), clip_norm=1.0)
    program = check(lower(made, profile, dp * made.micro))
    for track in tracks(play(program, np.ones(len(program)))):
        assert track.level[-1] == track.start.sum()  # everything that came has gone


def passes(program: Program, micro: int) -> Counter:
    """What the passes of a micro-batch keep and need: kind, bytes, from which operation to which."""
    found = zip(program.value_kind, program.value_bytes, program.value_maker, program.value_end, strict=True)
    own = [(Value(int(k)), int(b), maker, end) for k, b, maker, end in found if maker >= 0 and end >= 0]
    return Counter(
        (kind, size, program.name(maker), program.name(end))
        for kind, size, maker, end in own
        if kind in (Value.SAVED, Value.WORKSPACE) and program.micro_batch[maker] == program.micro_batch[end] == micro
    )


def test_a_split_pass_among_whole_ones_holds_what_it_does_alone() -> None:
    """Micro-batch 0 goes back whole, 1 in two parts: each as where all do."""
    whole, split = "{s}F0,{s}F1,{s}B0,{s}B1", "{s}F0,{s}F1,{s}I0,{s}W0,{s}I1,{s}W1"
    mixed = "{s}F0,{s}F1,{s}B0,{s}I1,{s}W1"
    programs = []
    for line in (whole, split, mixed):
        order = tuple(line.format(s=s) for s in range(2))
        programs.append(lower(plan(order=order, stages=(2,), blocks=4), chain(4), batch=2))
    assert passes(programs[2], 0) == passes(programs[0], 0)
    assert passes(programs[2], 1) == passes(programs[1], 1)
    assert passes(programs[0], 0) != passes(programs[1], 0)
