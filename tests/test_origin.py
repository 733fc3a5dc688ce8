"""Profiles of the user's own files: of this file, as it is now; neither another folder's nor one that has changed."""

import json
import warnings
from pathlib import Path

import pytest

from tests.test_cli import call
from tests.test_saved import refused
from trainplan.profile.profile import Profile
from trainplan.workload.origin import origin

NET = """
import torch
from torch import nn
from .layers import layer

def build():
    return {{
        "model": nn.Sequential(layer(8, {width}), nn.ReLU(), layer({width}, 2)),
        "inputs": lambda samples, seed: (torch.randn(samples, 8), torch.zeros(samples, dtype=torch.long)),
        "loss": "cross_entropy",
        "batch": 4,
    }}
"""
LAYERS = "from torch.nn import Linear as layer\n"
THERE = ["--cluster", "1xT4", "--plan", "single"]


def folder(place: Path, width: int = 16, layers: str = LAYERS) -> Path:
    place.mkdir()
    (place / "net.py").write_text(NET.format(width=width))
    (place / "layers.py").write_text(layers)
    return place


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model, and a profile of it beside that."""
    here = folder(tmp_path / "mine")
    monkeypatch.chdir(here)
    call("profile", "net.py:build", "--cluster", "1xT4", "-o", "../profile.json")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call("predict", "net.py:build", "--profile", "../profile.json", *THERE)
    return here


def test_another_folders_file_is_another_model(made: Path, monkeypatch, capsys) -> None:
    capsys.readouterr()
    theirs = folder(made.parent / "theirs", width=32)
    monkeypatch.chdir(theirs)
    for words in (["predict", "net.py:build", "--profile", "../profile.json"], ["run", "../profile.json", "--dry-run"]):
        heard = refused([*words, *THERE], monkeypatch, capsys)
        assert f"it was made of {made / 'net.py'} (" in heard
        assert f"and {theirs / 'net.py'} (or what that imports) says otherwise" in heard
        assert "Try its own profile: trainplan profile net.py:build --cluster 1xT4 --output profile.json." in heard
    # What is asked about the profile alone needs no file; and a file that only lies elsewhere is the same one.
    call("predict", "../profile.json", *THERE)
    monkeypatch.chdir(folder(made.parent / "moved"))
    call("run", "net.py:build", "--profile", "../profile.json", *THERE, "--dry-run", "--out", made.parent / "out")


@pytest.mark.parametrize("file", ["net.py", "layers.py"])
def test_a_file_that_has_changed_is_another_model(file: str, made: Path, monkeypatch, capsys) -> None:
    capsys.readouterr()
    with (made / file).open("a") as stream:
        stream.write("more = 1\n")
    heard = refused(["predict", "net.py:build", "--profile", "../profile.json", *THERE], monkeypatch, capsys)
    assert f"it was made of {made / 'net.py'} (" in heard
    assert "which has changed since (or what that imports)" in heard


def test_profiles_without_a_digest_are_taken_and_said_to_be(made: Path) -> None:
    """As files were before there was one."""
    path = made.parent / "profile.json"
    whole = json.loads(path.read_text())
    for key in ("source", "digest"):
        assert whole["data"]["provenance"].pop(key)
    path.write_text(json.dumps(whole))
    with pytest.warns(
        UserWarning, match=r"does not say what its file said .*mine/net.py; trainplan profile net.py:build"
    ):
        call("predict", "net.py:build", "--profile", path, *THERE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call("predict", path, *THERE)


def test_what_is_ours_has_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("gpt", "resnet18", "module", "hf"):
        (tmp_path / f"{name}.py").write_text("")
    names = [
        "gpt:layers=2,hidden=8",
        "resnet18:cifar10",
        "module:Net",
        "hf:gpt2",
        "nowhere.py:build",
        "gpt",
        "no.such:f",
    ]
    assert [origin(name) for name in names] == [None] * len(names)


def test_what_a_file_imports_from_beside_it_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However it is imported, through others, and of packages; what it does not import does not count."""
    monkeypatch.chdir(tmp_path)
    texts = {
        "origin_pack/__init__.py": "",
        "origin_pack/a.py": "from . import b\nfrom .deep.c import x\nimport os\n",
        "origin_pack/b.py": "import origin_pack.d\n",
        "origin_pack/deep/__init__.py": "",
        "origin_pack/deep/c.py": "from ..e import y as x\n",
        "origin_pack/d.py": "import beside\n",
        "origin_pack/e.py": "y = 1\n",
        "beside.py": "import origin_pack.a\n",
        "origin_pack/other.py": "",
        "config.json": "{}",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    for name, counts in (
        ("origin_pack/a.py:f", set(texts) - {"origin_pack/other.py", "config.json"}),
        ("hf:config.json", {"config.json"}),
    ):
        before = origin(name)
        assert before is not None
        assert before.path == str((tmp_path / name.split(":")[name.startswith("hf")]).resolve())
        for file, text in texts.items():
            (tmp_path / file).write_text(f"{text}\n")
            assert (origin(name) != before) == (file in counts), (name, file)
            (tmp_path / file).write_text(text)
        assert origin(name) == before
    by_module, by_path = origin("origin_pack.a:f"), origin("origin_pack/a.py:f,width=3")
    assert by_module == by_path == origin(f"{tmp_path}/origin_pack/a.py:f")


def test_measured_profiles_say_it_too(made: Path) -> None:
    from trainplan.profile.measure import measure
    from trainplan.workload.load import load

    found = measure(load("net.py:build"), samples=[2], repeats=1, seconds=0.1).provenance
    saved = Profile.load("../profile.json").provenance
    assert (found.source, found.digest) == (saved.source, saved.digest) == (str(made / "net.py"), saved.digest)
