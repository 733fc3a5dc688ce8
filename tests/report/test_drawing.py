"""Timelines in the terminal and in trace files; tables."""

import gzip
import itertools
import json

import pytest

from search.models import model
from trainplan.cluster.parse import cluster
from trainplan.errors import InputError
from trainplan.plan.text import parse
from trainplan.predict.predict import predict
from trainplan.program.timeline import Event, Timeline
from trainplan.report import trace
from trainplan.report.table import table
from trainplan.report.timeline import draw
from trainplan.solve.resolve import resolve


def timeline(*events, world=2):
    return Timeline("predicted", world, 1, tuple(Event(*event) for event in events), "pp=2")


SMALL = timeline(
    ("0F0", "F", 0, 0, 10), ("0SEND_F0", "SEND_F", 0, 10, 20), ("1F0", "F", 1, 20, 30), ("1B0", "B", 1, 30, 60),
    ("0R0", "R", 0, 60, 70), ("0B0", "B", 0, 70, 95), ("0STEP", "STEP", 0, 95, 100), ("1STEP", "STEP", 1, 60, 70),
)  # fmt: skip


def test_drawing_golden():
    assert draw(SMALL, width=20).splitlines() == [
        "predicted pp=2: 1 min 40 s, 5.00 s a letter",
        "rank 0  F0~~........R0B0---U",
        "rank 1  ....F0B0----U-......",
        "F forward  B backward  R recompute  U update  ~ communication  . idle  numbers: micro-batch",
    ]


def test_a_line_for_each_stage_of_a_rank():
    """Two stages on rank 0: a dot is where it idles, and a blank where it works for the other one."""
    line = timeline(
        ("0F0", "F", 0, 0, 2), ("1F0", "F", 1, 2, 4), ("1F1^1", "F", 1, 4, 6), ("2F0", "F", 0, 4, 6),
        ("2I0", "I", 0, 6, 8), ("2W0", "W", 0, 8, 12), ("1B0", "B", 1, 8, 16), ("0B10", "B", 0, 16, 19),
        ("0STEP", "STEP", 0, 19, 20), ("2STEP", "STEP", 0, 20, 20.5),
    )  # fmt: skip
    assert draw(line, width=41).splitlines()[1:4] == [
        "rank 0  stage 0  F0--....                ........B10---U-",
        "        stage 2      ....F0--I0--W0------........        U",
        "rank 1  stage 1  ....F0--F1--....B0--------------.........",
    ]
    legend = "F forward  B backward  I backward, input  W backward, weights  U update  . idle  numbers: micro-batch"
    assert draw(line, width=41).splitlines()[4] == f"{legend}  blank: at work for another stage"


def test_a_drawing_without_room_for_numbers():
    """Many short operations: the sort that has most of a character; and what is short among nothing is still seen."""
    many = [(f"0F{i}", "F", 0, i, i + 1) for i in range(30)] + [(f"0B{i}", "B", 0, 30 + i, 31 + i) for i in range(60)]
    line = timeline(*many, ("0STEP", "STEP", 0, 94.1, 94.2), ("0SEND_F0", "SEND_F", 0, 99.9, 100), world=1)
    assert draw(line, width=10).splitlines()[1:] == [
        "rank 0  FFFBBBBBBU", "81 operations are too short to draw (--width 20)", "F forward  B backward  U update",
    ]  # fmt: skip


def test_what_falls_between_two_columns_is_drawn():
    """Forward takes less than half of a column, always beside a longer backward or communication."""
    line = timeline(
        ("0F0", "F", 0, 0, 5), ("1F0", "F", 1, 10, 13), ("1B0", "B", 1, 13, 40), ("1SEND_B0", "SEND_B", 1, 40, 63),
        ("1F1", "F", 1, 63, 66), ("1SEND_F1", "SEND_F", 1, 66, 100), ("0B0", "B", 0, 63, 100),
    )  # fmt: skip
    assert draw(line, width=10).splitlines()[1:3] == ["rank 0  F.....B0--", "rank 1  .FB0~~F~~~"]


def test_what_has_no_room_is_counted():
    """Five operations in two columns; what takes no time at all is not missed."""
    short = [(f"0F{i}", "F", 0, 4 * i, 4 * i + 4) for i in range(5)]
    line = timeline(*short, ("0STEP", "STEP", 0, 50, 50), ("1F0", "F", 1, 20, 100))
    drawn = draw(line, width=10).splitlines()
    assert drawn[1:4] == ["rank 0  FF........", "rank 1  ..F0------", "3 operations are too short to draw (--width 20)"]
    assert "too short" not in draw(line, width=50)


def test_parts_of_a_sequence_are_numbered():
    line = timeline(("0F0", "F", 0, 0, 5), ("0F0/1", "F", 0, 5, 10), world=1)
    assert draw(line, width=10).splitlines()[1:] == ["rank 0  F0---F1---", "F forward  numbers: part of the sequence"]


def test_drawing_of_barriers():
    """Whoever waits for the others idles; the barrier itself begins when the last one has come."""
    line = timeline(
        ("0F0", "F", 0, 0, 10), ("1F0", "F", 1, 0, 20), ("0BARRIER", "BARRIER", 0, 20, 30),
        ("0BARRIER", "BARRIER", 1, 20, 30), ("0B0", "B", 0, 30, 40), ("1B0", "B", 1, 30, 50),
    )  # fmt: skip
    drawn = draw(line, width=10).splitlines()
    assert drawn[1:3] == ["rank 0  F0..||B0..", "rank 1  F0--||B0--"]
    assert drawn[3] == "F forward  B backward  | barrier  . idle  numbers: micro-batch"


def test_drawing_of_one_step():
    line = timeline(("0F0", "F", 0, 0, 1), ("0F0@1", "F", 0, 50, 51), ("0B0@1", "B", 0, 51, 52), world=1)
    assert "rank 0  F0---B0---" in draw(line, width=10, step=1)
    assert draw(line, width=10).splitlines()[:2] == ["predicted pp=2: 1.00 s, 100 ms a letter", "rank 0  F0--------"]
    assert draw(line, width=13, steps=2).splitlines()[:2] == [
        "predicted pp=2: 2 steps, 52.0 s, 4.00 s a letter", "rank 0  F...........F",
    ]  # fmt: skip
    with pytest.raises(InputError, match=r"step 7: the timeline has no such step: it has 2, from 0 to 1\. Try step 1"):
        draw(line, step=7)
    with pytest.raises(InputError, match=r"2 steps from step 1 on: the timeline has no such"):
        draw(line, step=1, steps=2)
    with pytest.raises(InputError, match=r"0 steps from step 0 on"):
        draw(line, steps=0)
    with pytest.raises(InputError, match="at least 10"):
        draw(line, width=3)


def test_drawing_many_ranks():
    line = timeline(*((f"{r}F0", "F", r, 0, 1) for r in range(80)), world=80)
    text = draw(line, width=10)
    assert "rank 63" in text
    assert "and 16 more ranks" in text


def test_trace_has_every_event_once_and_rows_do_not_overlap(tmp_path):
    profile, there = model(), cluster("2x2xTitanRTX")
    p = predict(resolve(parse("dp=2 pp=2"), profile, there, 16), profile, there, 16, keep=True)
    line = p.timeline()
    measured = Timeline("measured", line.world, line.steps, line.events, line.title)
    path = tmp_path / "deep" / "trace.json.gz"
    trace.write(path, [line, measured])
    with gzip.open(path, "rt") as stream:
        data = json.load(stream)
    spans = [e for e in data["traceEvents"] if e["ph"] == "X"]
    assert len(spans) == 2 * len(line.events)
    rows: dict[tuple[int, int], list] = {}
    for span in spans:
        rows.setdefault((span["pid"], span["tid"]), []).append((span["ts"], span["ts"] + span["dur"]))
    for found in rows.values():
        found.sort()
        for (_, end), (start, _) in itertools.pairwise(found):
            assert end <= start + 1e-6
    names = {e["args"]["name"] for e in data["traceEvents"] if e["name"] == "process_name"}
    assert names == {f"rank {r} {source}" for r in range(4) for source in ("predicted", "measured")}


def test_trace_without_packing_and_where_it_cannot_be(tmp_path):
    trace.write(tmp_path / "trace.json", [SMALL])
    assert json.loads((tmp_path / "trace.json").read_text())["otherData"] == {"predicted": "pp=2"}
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        trace.write(tmp_path / "file" / "trace.json.gz", [SMALL])


def test_table_aligns_and_keeps_brackets():
    text = table(["name", ">ms"], [["[a]", "1.00"], ["b", "1,000"]], lines=True)
    assert text.splitlines()[2] == " [a]     1.00"
    assert text.splitlines()[3] == " b      1,000"
