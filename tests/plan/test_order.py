"""Orders of work that are given: what a file says is kept, and what it may not say is refused with its place."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from trainplan.errors import InputError, PlanError
from trainplan.plan.order import known, read
from trainplan.plan.plan import Request, plan
from trainplan.plan.rules import check
from trainplan.plan.text import brief, from_json, parse, text, title, to_json
from trainplan.solve.shape import shape

ONE = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
WHERE = {"blocks": 8, "world": 4, "batch": 8}


@pytest.fixture
def file(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("mine.csv").write_text(ONE)
    return Path("mine.csv")


def test_a_plan_keeps_the_order_and_not_the_file(file) -> None:
    request = parse("schedule=mine.csv recompute=full")
    assert (request.pp, request.micro, request.schedule) == (2, 2, "given")
    file.unlink()
    made = shape(request, **WHERE)
    assert made.order == tuple(ONE.split())
    assert made.placement == (((0,), (1,)),)
    made = plan(order=made.order, stages=(3,), blocks=8)
    assert check(made, 8) is made
    assert from_json(json.loads(json.dumps(to_json(made)))) == made
    assert "placement" not in to_json(made)
    assert text(made) == "pp=2 schedule=0F0,0F1,0B0,0B1|1F0,1B0,1F1,1B1 micro=2 stages=3"
    assert parse(text(made)) == parse(text(parse(text(made))))
    assert (brief(made), title(made)) == ("pp=2 schedule=given micro=2 stages=3", "pp=2 schedule=given micro=2")


def test_ranks_may_have_any_number_of_stages() -> None:
    found = read("0F0,2F0,3F0,3I0,2B0,3W0,0B0\n 1F0 ,1B0\n\n", "uneven.csv")
    assert (found.ranks, found.stages, found.micro, found.local) == (2, 4, 1, ((0, 1, 0, 0),))
    assert found.lines == ("0F0,2F0,3F0,3I0,2B0,3W0,0B0", "1F0,1B0")
    assert shape(Request(order=found.lines), **WHERE).wanted == 4


def test_two_directions() -> None:
    found = read("0F0,1F1^1,1B1^1,0B0\n1F0,0F1^1,1B0,0B1^1", "gems.csv")
    assert found.local == ((0, 1), (1, 0))
    assert shape(Request(order=found.lines), **WHERE).lines == 2


# What a file holds; the place; why not; what would work.
BAD = {
    "empty": ("", "bad.csv", "the file is empty", "0F0,0F1"),
    "blank": ("\n \n", "bad.csv", "the file is empty", "0F0,0F1"),
    "no kind": ("0F0,0X0", "bad.csv, line 1, cell 2, 0F0 »0X0«", "it is not STAGE, one of F, B, I and W", "2F0"),
    "words": ("0F0,0B0\n1F0,oh", "line 2, cell 2, 1F0 »oh«", "it is not STAGE", "2F0"),
    "huge": ("0F9999999999", "line 1, cell 1", "it is not STAGE", "2F0"),
    "step": ("0F0,0B0,0STEP", "cell 3, 0F0 0B0 »0STEP«", "F, B, I and W", "2F0"),
    "slice": ("0F0/1", "line 1, cell 1, »0F0/1«", "parts of a sequence cannot be given", "0F0"),
    "idle": ("0F0,0B0\n,\n1F0,1B0", "bad.csv, line 2", "there is nothing to compute", "leaving the line out"),
    "doubled": ("0F0,0B0,0F0", "line 1, cell 3, 0F0 0B0 »0F0«", "it is there already: line 1, cell 1", "taking it out"),
    "on two ranks": ("0F0,0B0,0F1\n1F0,1B0,0B1,1F1,1B1", "line 2, cell 3, 1F0 1B0 »0B1« 1F1 1B1",
                     "stage 0 is on line 1 (cell 1), and a stage is on one rank", "moving it to line 1"),
    "two pipelines": ("0F0,0B0\n1F0^1,1B0", "line 2, cell 1, »1F0^1« 1B0", "in one pipeline, and 0F0 is in 0",
                      "^0 for both"),
    "no forward": ("0F0,0B0\n1B0", "line 2, 1B0 »1F0 missing«", "micro-batch 0 never goes through forward of stage 1",
                   "adding 1F0 to line 2"),
    "no backward": ("0F0,0B0,0F1\n1F0,1B0,1F1,1B1", "line 1, 0F0 0B0 0F1 »0B1 missing«",
                    "micro-batch 1 never goes through backward of stage 0", "adding 0B1 to line 1"),
    "no weights": ("0F0,0B0\n1F0,1I0", "line 2, 1F0 1I0 »1W0 missing«", "the weights' part", "adding 1W0 to line 2"),
    "no stage": ("0F0,0B0\n2F0,2B0", "bad.csv", "there is a stage 2 and none of number 1", "stages that count from 0"),
    "no micro-batch": ("0F0,0B0,0F9,0B9", "bad.csv", "there is a micro-batch 9 and none of number 1", "count from 0"),
    "not in its pipeline": ("0F0,0B0,0F1^1,0B1^1\n1F0,1B0", "bad.csv, »1F1^1 missing«", "never goes through forward",
                            "a line with 1F1^1"),
    "whole and split": ("0F0,0B0,0I0,0W0", "line 1, cell 3, 0F0 0B0 »0I0« 0W0", "this backward pass is whole, too: 0B0",
                        "either 0B0, or 0I0 and 0W0"),
    "backward first": ("0F0,0B0\n1B0,1F0", "line 2, cell 1, »1B0« 1F0", "backward comes before 1F0, which is cell 2",
                       "moving 1F0 in front of it"),
    "weights first": ("0F0,0W0,0I0", "line 1, cell 2, 0F0 »0W0« 0I0", "comes before 0I0", "moving 0I0 in front"),
    "circle of two": ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1", "line 1, cell 2, 0F0 »0B0« 0F1 0B1",
                      "line 1 waits at 0B0 (cell 2) for 1B0; line 2 waits at 1F1 (cell 2) for 0F1",
                      "moving 0F1 in front of 0B0 on line 1"),
    "circle of one": ("1F0,0F0,1B0,0B0", "line 1, cell 1, »1F0« 0F0 1B0 0B0", "line 1 waits at 1F0 (cell 1) for 0F0",
                      "moving 0F0 in front of 1F0 on line 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_files_that_are_no_orders(name: str) -> None:
    content, where, why, instead = BAD[name]
    with pytest.raises(InputError) as caught:
        read(content, "bad.csv")
    assert where in caught.value.asked
    assert why in caught.value.why
    assert instead in caught.value.instead


def test_what_is_passed_over_still_counts_as_a_cell() -> None:
    with pytest.raises(InputError, match="line 1, cell 5"):
        read("0UNSHARD,0F0,0SEND_F0,,0F0,0B0", "torchs.csv")


@pytest.mark.parametrize(
    ("line", "why", "instead"),
    [
        ("schedule=mine.csv pp=4", "pp=4, and the order of work has 2 lines, one for each rank", "pp=2"),
        ("schedule=mine.csv micro=3", "micro=3, and the order of work has 2 micro-batches", "micro=2"),
        ("schedule=none.csv", "it cannot be read (No such file or directory)", "mine.csv"),
        ("schedule=deep/none.csv", "it cannot be read (No such file or directory)", "--csv FILE, which writes one"),
        ("schedule=binary.csv", "it is not a text file", "0F0,0F1"),
        ("schedule=given", "or a file.csv", "schedule="),
    ],
)
def test_lines_that_do_not_go_with_the_file(file, line: str, why: str, instead: str) -> None:
    Path("binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises((InputError, PlanError)) as caught:
        parse(line)
    assert why in caught.value.why
    assert instead in caught.value.instead


@pytest.mark.parametrize(
    ("fields", "why", "instead"),
    [
        ({"world": 1}, "it needs 1 × 2 = 2 devices, and there are 1", "an order of work for 1 rank"),
        ({"blocks": 1}, "2 stages, but the model has only 1 blocks", "an order of work with at most 1 stages"),
        ({"batch": 1}, "a batch of 1 sample cannot be split over 1 replica × 2", "--batch 2"),
    ],
)
def test_orders_that_do_not_go_with_the_machine(file, fields: dict, why: str, instead: str) -> None:
    with pytest.raises(PlanError) as caught:
        shape(parse("schedule=mine.csv"), **{**WHERE, **fields})
    assert why in caught.value.why
    assert instead in caught.value.instead


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"pp": 3}, "pp is 3, and the order of work that is given has 2"),
        ({"micro": 5}, "micro is 5"),
        ({"schedule": "1f1b"}, "schedule=1f1b is another"),
        ({"chunks": 2}, "chunks is 2"),
        ({"placement": (((0,), (0,)),)}, "uses every rank from 0 to 1"),
        ({"placement": (((0,), (1,), (0,)),)}, "1 × 2 entries"),
        ({"recompute": "full", "order": ("0F0,0I0,0W0", "1F0,1B0"), "micro": 1}, "recompute everything twice"),
    ],
)
def test_plans_that_do_not_go_with_their_order(fields: dict, why: str) -> None:
    made = replace(plan(order=tuple(ONE.split()), stages=(3,), blocks=8), **fields)
    with pytest.raises(PlanError) as caught:
        check(made, 8)
    assert why in caught.value.why


def test_one_rank_is_no_pipeline() -> None:
    with pytest.raises(PlanError, match="one rank"):
        check(plan(order=("0F0,0B0,0F1,0B1",), blocks=8), 8)


def test_a_long_order_is_read_once() -> None:
    lines = tuple(",".join(f"{s}{k}{m}" for k in "FB" for m in range(64)) for s in range(16))
    assert known(lines) is known(tuple(line for line in lines))
