"""What commands write: folders on the way are made, files are whole or not there, and what fails leaves nothing."""

import gzip
import json
import os
import stat
from pathlib import Path

import pytest

import trainplan
from search.models import model
from tests.test_cli import call
from tests.test_saved import refused
from trainplan import files
from trainplan.cluster.parse import cluster
from trainplan.errors import InputError, PlanError
from trainplan.report import picture

THERE = "--cluster 2xTitanRTX --batch 16"
OUTPUTS = {
    "a trace": f"timeline model.json --plan dp=2 {THERE} --trace OUT.json",
    "a packed trace": f"predict model.json --plan dp=2 {THERE} --trace OUT.json.gz",
    "an order": f"timeline model.json --plan pp=2 {THERE} --csv OUT.csv",
    "a cluster": "cluster show 2xT4 -o OUT.json",
    "a cluster as YAML": "cluster show 2xT4 -o OUT.yaml",
    "a device": "device show H200 -o OUT.json",
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    model().save("model.json")
    return tmp_path


@pytest.mark.parametrize("line", OUTPUTS.values(), ids=list(OUTPUTS))
def test_folders_of_outputs_are_made_by_all_of_them_or_leave_nothing(line: str, folder, monkeypatch, capsys) -> None:
    words = line.replace("OUT", "new/deeper/mine").split()
    call(*words)
    (written,) = (folder / "new" / "deeper").iterdir()
    assert written.name == Path(words[-1]).name
    assert written.stat().st_size
    assert stat.S_IMODE(written.stat().st_mode) == stat.S_IMODE((folder / "model.json").stat().st_mode)
    capsys.readouterr()
    heard = refused(line.replace("OUT", "model.json/mine").split(), monkeypatch, capsys)  # below a file
    assert "model.json/mine" in heard
    assert "it cannot be written" in heard
    refused(line.replace("OUT", f"other/deeper/{'long' * 80}").split(), monkeypatch, capsys)
    assert not (folder / "other").exists()


def test_files_are_for_whom_the_user_says(folder: Path) -> None:
    before = os.umask(0o027)
    try:
        files.write_text("shared.json", "{}")
    finally:
        os.umask(before)
    assert stat.S_IMODE(Path("shared.json").stat().st_mode) == 0o640


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_what_breaks_off_leaves_what_was_there(error: BaseException, folder: Path) -> None:
    Path("kept.json").write_text("mine")

    def half(path: str) -> None:
        with files.whole(path, "--output") as partial:
            partial.write_text("half")
            raise error

    for path in ("kept.json", "new/one.json"):
        with pytest.raises((InputError, KeyboardInterrupt)):
            half(path)
    assert sorted(p.name for p in folder.iterdir()) == ["kept.json", "model.json"]
    assert Path("kept.json").read_text() == "mine"


def test_what_is_written_is_read_again() -> None:
    call(*OUTPUTS["a cluster as YAML"].replace("OUT", "c").split())
    assert cluster("c.yaml").nodes == cluster("2xT4").nodes
    call(*OUTPUTS["a packed trace"].replace("OUT", "t").split())
    assert json.loads(gzip.decompress(Path("t.json.gz").read_bytes()))["traceEvents"]
    with pytest.raises(InputError, match=r"ends in .yaml or .json. Try --output c.txt.yaml"):
        call("cluster", "show", "2xT4", "-o", "c.txt")


def test_a_timeline_that_is_refused_writes_none_of_its_files(folder: Path) -> None:
    words = ["--csv", "mine.csv", "--trace", "mine.json", "--measured", "none.json"]
    with pytest.raises(InputError, match=r"none\.json: it cannot be read"):
        call("timeline", "model.json", "--plan", "pp=2", *THERE.split(), *words)
    assert [p.name for p in folder.iterdir()] == ["model.json"]


def test_pictures_are_written_so_too(folder: Path) -> None:
    pytest.importorskip("matplotlib")
    picture.save(picture.blank(1, 1), "new/deeper/x.svg")
    assert [p.name for p in (folder / "new" / "deeper").iterdir()] == ["x.svg"]
    with pytest.raises(InputError, match=r"^--picture model.json/x.svg: it cannot be written"):
        picture.save(picture.blank(1, 1), "model.json/x.svg", "--picture")


@pytest.mark.parametrize("verb", ["predict", "explain", "timeline", "run", "compare"])
@pytest.mark.parametrize("line", ["", "  "])
def test_a_plan_that_says_nothing_is_refused(verb: str, line: str, monkeypatch, capsys) -> None:
    """It used to be one device, without a word."""
    heard = refused([verb, "model.json", "--plan", line, "--cluster", "2xTitanRTX"], monkeypatch, capsys)
    assert "it asks for nothing. Try single for one device, dp=2, or what recommend says." in heard


def test_nor_is_it_taken_from_python() -> None:
    for ask in (trainplan.build, lambda plan, model: trainplan.predict(model, plan, "2xTitanRTX")):
        with pytest.raises(PlanError, match="it asks for nothing"):
            ask("", "model.json")
