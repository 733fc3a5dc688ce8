"""Timelines as files, and what is read off them."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synthetic import chain
from tests.program.strategies import examples
from trainplan.errors import InputError
from trainplan.plan.plan import plan
from trainplan.predict.clock import play, seconds_by_kind
from trainplan.program.lower import lower
from trainplan.program.ops import Kind, Lane
from trainplan.program.timeline import Event, Timeline, busy, gaps

times = st.floats(0, 1e6, allow_nan=False)
events = st.builds(
    lambda name, kind, rank, start, length, size: Event(name, kind.name, rank, start, start + length, size),
    st.text(max_size=8), st.sampled_from(list(Kind)), st.integers(0, 9), times, times, st.integers(0, 2**40),
)  # fmt: skip
timelines = st.builds(
    Timeline, st.sampled_from(["predicted", "measured"]), st.just(10), st.integers(1, 9),
    st.lists(events, max_size=6).map(tuple), st.text(max_size=9),
)  # fmt: skip


@examples(60)
@given(timelines)
def test_timelines_are_read_back(tmp_path_factory, timeline: Timeline) -> None:
    path = tmp_path_factory.mktemp("timeline") / "timeline.json"
    timeline.save(path)
    assert Timeline.load(path) == timeline


def predicted() -> Timeline:
    program = lower(plan(pp=2, micro=2, schedule="gpipe", stages=(1,), blocks=2), chain(2), 2)
    table = {Kind.F: 1.0, Kind.B: 2.0, Kind.SEND_F: 0.5, Kind.SEND_B: 0.5, Kind.STEP: 0.25}
    return play(program, seconds_by_kind(program, table)).timeline()


def test_what_is_read_off_a_timeline() -> None:
    timeline = predicted()
    assert timeline.duration == (2 + 1) * 3 + 2 * 0.5 + 0.25
    assert timeline.seconds_by_kind() == {
        "F": 4.0, "B": 8.0, "SEND_F": 1.0, "SEND_B": 1.0, "RECV_F": 0.0, "RECV_B": 0.0, "STEP": 0.5,
    }  # fmt: skip
    first = timeline.of_rank(0)
    assert busy(first, Lane.COMPUTE) == 2 * 3 + 0.25
    assert busy(first, Lane.LINK) == 2 * 0.5
    assert gaps(first).sum() == timeline.duration - busy(first, Lane.COMPUTE)
    assert Timeline("measured", 1, 1, ()).duration == 0.0
    assert busy([], Lane.COMPUTE) == 0.0


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "broken JSON at line 1"),
        ('{"trainplan": "timeline", "format": 1, "data": {', "broken JSON at line 1"),
        ("[]", "it is JSON, but not a trainplan timeline"),
        ('{"events": []}', "it is JSON, but not a trainplan timeline"),
        ('{"trainplan": "profile", "format": 1, "data": {}}', "it is a trainplan profile, and a timeline was expected"),
        ('{"trainplan": "timeline", "format": 99, "data": {}}', "it has format 99, and this version reads 1"),
        ('{"trainplan": "timeline", "format": 1, "data": []}', "a mapping was expected"),
        ('{"trainplan": "timeline", "format": 1, "data": {}}', "the key 'source' is missing"),
    ],
)
def test_broken_and_foreign_files(tmp_path, content: str, why: str) -> None:
    path = tmp_path / "timeline.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(InputError, match=why):
        Timeline.load(path)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"source": "guessed"}, "json.source: one of predicted, measured was expected, found 'guessed'"),
        ({"world": "two"}, "json.world: int was expected"),
        ({"events": [{"name": "0F0"}]}, r"json.events\[0\]: the key 'kind' is missing"),
        ({"event": []}, "json.event: there is no such key. Try events"),
    ],
)
def test_a_file_that_somebody_edited(tmp_path, change: dict, why: str) -> None:
    path = tmp_path / "timeline.json"
    predicted().save(path)
    content = json.loads(path.read_text(encoding="utf-8"))
    content["data"] |= change
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(InputError, match=why):
        Timeline.load(path)


def test_files_that_are_not_there_or_not_text(tmp_path) -> None:
    with pytest.raises(InputError, match="it cannot be read"):
        Timeline.load(tmp_path / "none.json")
    with pytest.raises(InputError, match="it cannot be read"):
        Timeline.load(tmp_path)
    binary = tmp_path / "binary"
    binary.write_bytes(b"\x80\x02\xff\xfe")
    with pytest.raises(InputError, match="not a text file"):
        Timeline.load(binary)
    with pytest.raises(InputError, match="it cannot be written"):
        predicted().save(binary / "below a file" / "timeline.json")


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"world": 0}, "world"),
        ({"world": 10**12}, "world"),
        ({"steps": 0}, "steps"),
        ({"rank": 99}, "events[0].rank"),
        ({"rank": -1}, "events[0].rank"),
        ({"kind": "NAP"}, "events[0].kind"),
        ({"end": float("nan")}, "events[0].end"),
        ({"start": float("-inf")}, "events[0].start"),
        ({"bytes": -1}, "events[0].bytes"),
    ],
)
def test_files_that_cannot_be_timelines_are_refused_by_the_place(change, place, tmp_path):
    path = tmp_path / "t.json"
    predicted().save(path)
    content = json.loads(path.read_text())
    data = content["data"]
    (data if set(change) <= set(data) else data["events"][0]).update(change)
    path.write_text(json.dumps(content))
    with pytest.raises(InputError) as caught:
        Timeline.load(path)
    assert caught.value.asked == f"timeline {path}.{place}"
    assert "trainplan run MODEL" in caught.value.instead
