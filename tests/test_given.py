"""Orders of work at the command line: written for a plan, edited, and given back; or refused, nothing half-done."""

import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import trainplan
from search.models import model
from synthetic import chain
from tests.test_cli import call
from trainplan import cli
from trainplan.errors import PlanError
from trainplan.plan.rules import CHUNKED, SLICED
from trainplan.plan.text import from_json, to_json
from trainplan.program.schedules import SCHEDULES
from trainplan.units import seconds

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


MORE = (  # what the file does not say must be in the line
    "schedule=1f1b placement=0,1,1,0,2 stages=2,4,5,6 micro=8",
    "dp=2 pp=2 schedule=1f1b micro=4",
    "dp=2 pp=2 schedule=zb-v chunks=2 micro=4 placement=1,0,0,1 overlap=off",
    "gpipe pp=4 micro=4",
    "pp=4 schedule=chimera pairs=2 micro=8 bucket=1MiB",
    "pp=4 schedule=gems micro=4 recompute=full bucket=4096B",
    "dp=2,1,1 pp=3 schedule=1f1b micro=8 bucket=1MiB",
)


def test_every_order_is_written_and_given_back(folder) -> None:
    """By the line that is printed, and nothing else."""
    words = [schedule for schedule in SCHEDULES if schedule not in (SLICED, "lockstep")]
    sizes = {schedule: "pp=2 stages=2,4,6" if schedule in CHUNKED else "pp=4 stages=2,4,6" for schedule in words}
    for line in [*(f"schedule={schedule} {size} micro=8 bucket=1MiB" for schedule, size in sizes.items()), *MORE]:
        said = call("timeline", "model.json", "--plan", line, *THERE, "--csv", "mine.csv", "--width", 60)
        again = shlex.split(said.splitlines()[-1])
        assert again[0] == "--plan"
        assert "schedule=mine.csv" in again[1]
        wanted, found = predicted(line), predicted(again[1])
        assert found.step_s == wanted.step_s, line
        assert found.peak_bytes == wanted.peak_bytes, line
        assert found.plan.placement == wanted.plan.placement, line
        assert from_json(to_json(found.plan)) == found.plan


@pytest.mark.parametrize(
    ("line", "path", "why"),
    [
        ("pp=2 schedule=lockstep micro=4", "mine.csv", "not that all ranks wait for each other.* Try .*schedule=gpipe"),
        ("pp=2 schedule=terapipe micro=4 slices=6,4", "mine.csv", "sequences are cut into 2 slices.* Try .*--trace"),
        ("dp=2 micro=2", "mine.csv", "given to several ranks, and a replica has one. Try pp=2"),
        ("pp=2 schedule=1f1b micro=4", "my own.csv", "its name has a space.* Try --csv my-own.csv"),
    ],
)
def test_what_could_not_be_given_back_is_not_written(folder, line: str, path: str, why: str) -> None:
    profile = "text.json" if "slices" in line else "model.json"
    chain(blocks=4, device="TitanRTX", tokens_per_sample=10, whole_sequences=None).save("text.json")
    with pytest.raises(PlanError, match=why):
        call("timeline", profile, "--plan", line, *THERE, "--csv", path)
    assert not Path(path).exists()


def test_a_drawing_is_of_one_step(folder) -> None:
    line = "pp=4 schedule=gpipe micro=4 stages=2,4,6"
    head = call("timeline", "model.json", "--plan", line, *THERE).splitlines()[0]
    assert f": {seconds(predicted(line).step_s)}, " in head
    two = call("timeline", "model.json", "--plan", line, *THERE, "--steps", 2).splitlines()[0]
    assert ": 2 steps, " in two


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
        (["--plan", "schedule=good.csv pp=4"], "pp=4, and the order of work has 2 lines"),
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
