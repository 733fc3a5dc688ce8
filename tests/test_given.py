"""Orders of work at the command line: written for any plan, edited, and given back; or refused, nothing half-done."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

import trainplan
from search.models import model
from tests.test_cli import call
from trainplan import cli
from trainplan.plan.rules import CHUNKED, SLICED
from trainplan.plan.text import from_json, to_json
from trainplan.program.schedules import SCHEDULES

THERE = ("--cluster", "4xTitanRTX", "--batch", 16)


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    made = model()
    # The two parts of backward take longer than the whole.
    parts = {"backward_input_s": 0.7, "backward_weight_s": 0.6}
    blocks = [replace(b, **{k: tuple(f * s for s in b.backward_s) for k, f in parts.items()}) for b in made.blocks]
    replace(made, blocks=tuple(blocks)).save("model.json")
    return tmp_path


def predicted(line: str):
    return trainplan.predict("model.json", line, "4xTitanRTX", batch=16).prediction


def test_every_order_is_written_and_given_back(folder) -> None:
    words = [schedule for schedule in SCHEDULES if schedule != SLICED]  # parts of sequences are not given
    cases = {schedule: "pp=2 stages=2,4,6" if schedule in CHUNKED else "pp=4 stages=2,4,6" for schedule in words}
    for schedule, size in [*cases.items(), ("1f1b", "placement=0,1,1,0,2 stages=2,4,5,6")]:
        line = f"schedule={schedule} {size} micro=8 bucket=1MiB"
        said = call("timeline", "model.json", "--plan", line, *THERE, "--csv", "mine.csv", "--width", 60)
        assert "schedule=mine.csv" in said
        # A file says what is computed, and not that everybody waits for everybody after each of it.
        wanted = predicted(line.replace("lockstep", "gpipe"))
        found = predicted(f"schedule=mine.csv {size.split()[1]} bucket=1MiB")
        assert found.step_s == wanted.step_s, schedule
        assert found.peak_bytes == wanted.peak_bytes, schedule
        assert from_json(to_json(found.plan)) == found.plan


def test_one_rank_has_an_order_that_is_not_given_back(folder) -> None:
    said = call("timeline", "model.json", "--plan", "dp=2 micro=2", *THERE, "--csv", "mine.csv", "--width", 60)
    assert said.endswith("order of work: mine.csv\n")
    assert Path("mine.csv").read_text() == "0F0,0B0,0F1,0B1\n"


def test_an_order_that_was_edited_is_another_plan(folder) -> None:
    call("timeline", "model.json", "--plan", "pp=2 schedule=1f1b micro=4 stages=4", *THERE, "--csv", "mine.csv")
    text = Path("mine.csv").read_text()
    assert text == "0F0,0F1,0B0,0F2,0B1,0F3,0B2,0B3\n1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3\n"
    Path("mine.csv").write_text(text.replace("0F1,0B0,0F2", "0F1,0F2,0B0"))
    given, before = predicted("schedule=mine.csv stages=4"), predicted("pp=2 schedule=1f1b micro=4 stages=4")
    assert given.peak_bytes > before.peak_bytes  # three in flight on rank 0, not two
    assert "every rank does what the order of work says" in call(
        "explain", "model.json", "--plan", "schedule=mine.csv", *THERE
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--plan", "schedule=bad.csv"], "bad.csv, line 2, cell 1, »1B0« 1F0: backward comes before 1F0"),
        (["--plan", "schedule=none.csv"], "schedule=none.csv: it cannot be read"),
        (["--plan", "schedule=good.csv pp=4"], "pp=4, and the order of work has 2 line(s)"),
        (
            ["--plan", "pp=2 schedule=1f1b", "--csv", "order.txt"],
            "its name does not end in .csv. Try --csv order.txt.csv.",
        ),
        (["--csv", "order.csv"], "a plan has an order of work, and none is given"),
        (["--plan", "schedule=bad.csv", "--csv", "order.csv"], "bad.csv, line 2, cell 1"),
        (["--plan", "pp=2 schedule=1f1b", "--csv", "model.json/order.csv"], "it cannot be written"),
    ],
)
def test_refusals_have_code_2_and_leave_nothing_behind(words, said, folder, monkeypatch, capsys) -> None:
    Path("good.csv").write_text("0F0,0B0\n1F0,1B0\n")
    Path("bad.csv").write_text("0F0,0B0\n1B0,1F0\n")
    before = sorted(folder.iterdir())
    monkeypatch.setattr(sys, "argv", ["trainplan", "timeline", "model.json", *words, *map(str, THERE)])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 2
    heard = capsys.readouterr()
    assert said in heard.err
    assert heard.out == ""
    assert sorted(folder.iterdir()) == before
