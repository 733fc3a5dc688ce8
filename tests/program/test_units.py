"""What is shared out: every weight once, and every element of it with one rank."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synthetic import chain
from trainplan.plan.plan import plan
from trainplan.profile.profile import Parameter
from trainplan.program.check import check
from trainplan.program.lower import lower
from trainplan.program.lower.units import sections, units


@st.composite
def models(draw):
    blocks = draw(st.integers(1, 8))
    some = st.lists(st.integers(0, blocks - 1), min_size=1, max_size=3, unique=True)
    rows = draw(st.lists(st.tuples(some, st.integers(1, 30), st.booleans()), max_size=10))
    return blocks, [Parameter(f"w{n}", tuple(sorted(b)), c, 4 * c, 1.0, t) for n, (b, c, t) in enumerate(rows)]


@given(models(), st.integers(1, 200), st.integers(1, 6))
def test_units_cover_the_weights(model, limit: int, sharers: int) -> None:
    blocks, parameters = model
    cut = sections(parameters, 0, blocks, limit)
    assert [block for piece in cut for block in range(*piece)] == list(range(blocks))
    found = units(parameters, cut, sharers)
    assert sorted(name for unit in found for name in unit.names) == sorted(p.name for p in parameters if p.trainable)
    count = {p.name: p.count for p in parameters}
    for unit in found:
        for p in parameters:
            if p.name in unit.names:
                inside = [number for number, (a, b) in enumerate(cut) if any(a <= block < b for block in p.blocks)]
                assert (inside[0], inside[-1]) == (unit.first, unit.last)
        places = [unit.parts(place) for place in range(sharers)]
        for name in unit.names:
            runs = [part[name] for part in places if name in part]
            assert runs[0][0] == 0
            assert runs[-1][1] == count[name]
            assert all(a[1] == b[0] for a, b in pairwise(runs))
        assert [sum(b - a for a, b in part.values()) for part in places] == [unit.own(p) for p in range(sharers)]
    # No piece but the last is smaller than the limit, and each has weights of its own where any has.
    own = [sum(p.bytes for p in parameters if len(p.blocks) == 1 and a <= p.blocks[0] < b) for a, b in cut]
    assert all(size >= limit for size in own[:-1])
    assert all(own) or len(cut) == 1


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_replicas_that_share_out_may_lie_on_any_ranks(zero: int) -> None:
    """What they do together stands in the list of the lowest rank first, which need not be the first replica's."""
    choices = {"dp": 2, "pp": 2, "micro": 2, "schedule": "gpipe", "stages": (2,), "blocks": 4, "bucket": 1000}
    anywhere, in_turn = (
        check(lower(plan(zero=zero, placement=placement, **choices), chain(4), batch=4, steps=2))
        for placement in ((((3,), (2,)), ((1,), (0,))), None)
    )
    assert sorted(map(str, anywhere.ops())) == sorted(map(str, in_turn.ops()))
    assert sorted(anywhere.value_bytes.tolist()) == sorted(in_turn.value_bytes.tolist())
