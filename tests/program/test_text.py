"""Names of operations: round trips, and torch's own."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.program.strategies import examples
from trainplan.errors import InputError
from trainplan.program.ops import RECEIVES, SENDS, SPECS, Kind
from trainplan.program.text import WITHOUT_MICRO_BATCH, Key, name, neighbour, parse

small = st.integers(0, 120)


@st.composite
def keys(draw) -> Key:
    kind = draw(st.sampled_from(list(Kind)))
    stage = draw(small)
    peer = draw(st.one_of(st.just(neighbour(kind, stage)), small)) if SPECS[kind].message else -1
    micro = 0 if kind in WITHOUT_MICRO_BATCH else draw(small)
    return Key(kind, stage, micro, draw(small), draw(small), draw(small), draw(small), draw(small), peer)


@examples(200)
@given(keys())
def test_names_are_read_back(key: Key) -> None:
    text = name(key)
    wanted = key if key.peer >= 0 or not SPECS[key.kind].message else Key(**{**key.__dict__, "peer": parse(text).peer})
    assert parse(text) == wanted
    assert name(parse(text)) == text


def torch_actions() -> list[tuple[str, Key]]:
    from torch.distributed.pipelining.schedules import _Action, _ComputationType

    found = []
    for kind in Kind:
        if kind.name in {word.value for word in _ComputationType}:
            micro = None if kind in WITHOUT_MICRO_BATCH else 7
            action = _Action(3, _ComputationType(kind.name), micro)
            found.append((str(action), Key(kind, 3, micro or 0, peer=neighbour(kind, 3))))
    return found


def test_torch_schedule_strings_are_ours_where_both_have_them() -> None:
    from torch.distributed.pipelining.schedules import _Action

    actions = torch_actions()
    shared = {key.kind for _, key in actions}
    assert shared == {Kind.F, Kind.B, Kind.I, Kind.W, Kind.REDUCE_GRAD} | (set(SENDS + RECEIVES) & shared)
    assert {Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B} <= shared
    for text, key in actions:
        assert parse(text) == key
        assert name(key) == text
        assert str(_Action.from_str(name(key))) == text  # and back again: a list of ours is one of torch's


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "not of the form"),
        ("F0", "not of the form"),
        ("0F", "needs a micro-batch"),
        ("0UNSHARD", "no kind 'UNSHARD'"),
        ("0SEND_X0", "no kind 'SEND_X'"),
        ("0F0.", "not of the form"),
        ("0F-1", "not of the form"),
        ("0f0", "not of the form"),
    ],
)
def test_what_is_no_operation_is_refused(text: str, why: str) -> None:
    with pytest.raises(InputError, match=why) as caught:
        parse(text)
    assert caught.value.asked == f"operation {text!r}"
    assert caught.value.instead
