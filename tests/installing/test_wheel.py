"""A wheel that installs elsewhere: built from the tree, installed by pip in a bare environment, and used from there."""

import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def call(*command: str | Path, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, timeout=240, cwd=cwd, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment into which pip has put our wheel.

    The libraries that it needs are those of the tests: they are big, and whether pip can fetch them is not asked here.
    """
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # a build leaves files behind, so it is not done in the tree itself
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    call(
        sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", folder,
        source, cwd=folder,
    )  # fmt: skip
    (wheel,) = folder.glob("trainplan-*.whl")
    venv.create(folder / "env", with_pip=False)
    there = folder / "env" / "bin" / "python"
    call(sys.executable, "-m", "pip", "--python", there, "install", "--quiet", "--no-deps", wheel, cwd=folder)
    site = next((folder / "env" / "lib").glob("python3.*")) / "site-packages"
    theirs = [path for path in sys.path if path.endswith("site-packages")]
    # The tests' own environment holds trainplan as an editable install; a .pth line after ours is looked at later.
    (site / "zz-libraries.pth").write_text("\n".join(theirs) + "\n")
    # Machine code that numba has kept of the same sources is kept of these too, so that it need not be made again.
    for source in (ROOT / "src").rglob("*.py"):
        copy = site / source.relative_to(ROOT / "src")
        shutil.copystat(source, copy)
        (copy.parent / "__pycache__").mkdir(exist_ok=True)
        for kept in (source.parent / "__pycache__").glob(f"{source.stem}.*.nb[ic]"):
            shutil.copy(kept, copy.parent / "__pycache__")
    return folder / "env"


def test_the_wheel_brings_its_data(installed: Path, tmp_path: Path) -> None:
    where = call(installed / "bin" / "python", "-c", "import trainplan; print(trainplan.__file__)", cwd=tmp_path)
    assert str(installed) in where
    out = call(
        installed / "bin" / "trainplan", "predict", "resnet18:cifar10", "--cluster", "4xTitanRTX", "--batch", "64",
        "--plan", "dp=4", "--json", cwd=tmp_path,
    )  # fmt: skip
    assert json.loads(out)["fits"] is True
    listed = json.loads(call(installed / "bin" / "trainplan", "systems", "--json", cwd=tmp_path))
    assert any(row["key"] == "gpipe" for row in (listed if isinstance(listed, list) else listed["systems"]))


def test_the_wheel_runs_a_plan(installed: Path, tmp_path: Path) -> None:
    net = tmp_path / "net.py"
    net.write_text((ROOT / "examples" / "net.py").read_text())
    out = call(
        installed / "bin" / "trainplan", "run", "net.py:build", "--cluster", "2xcpu", "--plan", "dp=2", "--steps", "3",
        "--json", cwd=tmp_path,
    )  # fmt: skip
    assert out
