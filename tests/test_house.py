"""The rules of the house: which room may import which, what stays free of torch, and what every file looks like."""

import ast
import doctest
import importlib
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from synthetic import chain
from trainplan.engine.handlers import HANDLERS
from trainplan.plan.plan import WORDS, plan
from trainplan.plan.rules import CHUNKED, SLICED, SPLIT_BACKWARD
from trainplan.predict.cost import RULES
from trainplan.program.lower import lower
from trainplan.program.ops import RECEIVES, SPECS, Kind
from trainplan.program.schedules import SCHEDULES

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "trainplan"

# The order in which the data visits the rooms. A room may import those above it; rooms side by side do not import each
# other, except as BESIDE says.
LEVELS: list[set[str]] = [
    {"amounts", "units", "errors", "files", "lasting", "uninterrupted", "version"},
    {"workload", "cluster"},
    {"profile"},
    {"plan"},
    {"program"},
    {"predict", "engine"},
    {"solve", "search", "study"},
    {"bench", "report"},
    {
        "__init__", "__main__", "api", "benches", "cli", "hardware", "methods", "movements", "renting",
        "run", "saved", "situation", "starting", "studies",
    },
]  # fmt: skip
BESIDE = {
    ("search", "solve"), ("study", "solve"), ("bench", "report"),
    ("units", "errors"), ("files", "errors"), ("amounts", "errors"), ("amounts", "files"),
    ("cli", "api"), ("__init__", "api"), ("api", "situation"),
    ("api", "starting"), ("starting", "situation"), ("api", "hardware"), ("hardware", "situation"), ("__main__", "cli"),
    ("api", "studies"), ("api", "benches"), ("api", "methods"), ("methods", "situation"), ("methods", "starting"),
    ("studies", "movements"), ("studies", "situation"), ("movements", "situation"), ("movements", "starting"),
    ("api", "renting"), ("renting", "situation"), ("situation", "saved"),
}  # fmt: skip
LEVEL = {room: number for number, level in enumerate(LEVELS) for room in level}

# What a laptop needs to answer from a saved profile: no torch, not even when it is asked.
WITHOUT_TORCH = [
    "trainplan", "trainplan.units", "trainplan.errors", "trainplan.files", "trainplan.cluster.cluster",
    "trainplan.profile.profile",
]  # fmt: skip
ROOMS_WITHOUT_TORCH = ("plan", "program", "predict", "solve", "search")


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if "__pycache__" not in path.parts)


def dotted(path: Path) -> str:
    """The name that a file is imported by."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room(module: str) -> str:
    """The first part of its name within the package."""
    return (module.split(".") + ["__init__"])[1]


def imports(path: Path) -> set[str]:
    """The modules of trainplan that a file imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are written out in full"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.startswith("trainplan.")}  # `import trainplan` alone is to find its folder


@pytest.mark.parametrize("path", modules(), ids=dotted)
def test_imports_go_one_way(path: Path) -> None:
    here = room(dotted(path))
    assert here in LEVEL, f"{here} is a new room: say in LEVELS where it stands"
    for name in imports(path):
        there = room(name) if room(name) in LEVEL else "__init__"  # `from trainplan import X` of the public names
        allowed = there == here or LEVEL[there] < LEVEL[here] or (here, there) in BESIDE
        assert allowed, f"{dotted(path)} imports {name}: {here} comes before {there}, or stands beside it"


def test_nothing_but_a_profile_is_needed_to_predict(tmp_path) -> None:
    """Every module of these rooms is imported, a profile is read and a plan predicted, and torch is nowhere."""
    names = WITHOUT_TORCH + [dotted(path) for path in modules() if room(dotted(path)) in ROOMS_WITHOUT_TORCH]
    chain(4).save(tmp_path / "profile.json")
    script = f"""
import importlib, sys
for name in {names!r}:
    importlib.import_module(name)
    assert "torch" not in sys.modules, name
from trainplan.cluster.cluster import Cluster, Device, Link, Node
from trainplan.plan.text import parse
from trainplan.profile.profile import Profile
from trainplan.solve.resolve import resolve
from trainplan.predict.predict import predict
profile = Profile.load({str(tmp_path / "profile.json")!r})
node = Node("node", (Device("cpu", 10**9, {{}}, 1e9),) * 2, Link("inside", 1e-4, 1e9))
cluster = Cluster("two", (node,), "gloo")
plan = resolve(parse("pp=2 schedule=1f1b"), profile, cluster, 8)
assert predict(plan, profile, cluster, 8).fits
assert "torch" not in sys.modules, "predict"
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


# -- every kind of operation has its rules ------------------------------------------------------------------------

# Kinds that wait for the systems that need them.
NOT_LOWERED_YET: set[Kind] = set()


def lowered_kinds() -> set[Kind]:
    """The kinds that plans become today: every word of every choice, on a model that has everything."""
    profile = chain(
        4, skips=((0, 3),), tied=((0, 3),), clip_norm=1.0, mean_over="tokens", tokens_per_sample=3,
        whole_sequences=None,
    )  # fmt: skip
    found: set[Kind] = set()
    for schedule in SCHEDULES:
        chunks = 2 if schedule in CHUNKED else 1
        for recompute in ("none",) if schedule in (*SPLIT_BACKWARD, SLICED) else WORDS["recompute"]:
            for dp in (1, 2):
                choices = plan(
                    dp=dp, pp=2, micro=3, schedule=schedule, chunks=chunks, stages=(1, 2, 3)[: 2 * chunks - 1],
                    blocks=4, recompute=recompute, slices=(2, 1) if schedule == SLICED else (),
                )  # fmt: skip
                kept = "selective" if recompute == "selective" else "none"  # which a profile has in it
                found |= {Kind(int(kind)) for kind in lower(choices, replace(profile, recompute=kept), 8).kind}
    found |= {Kind(int(kind)) for kind in lower(plan(dp=2, zero=3, blocks=4, bucket=1), profile, 8).kind}
    away = plan(blocks=4, micro=2, offload="activations", away=((2,),))
    served = plan(dp=2, blocks=4, exchange="ps-bsp", servers=1)
    decided = plan(dp=2, blocks=4, exchange="horovod", threshold=10**6, cycle=1e-3)
    scattered = plan(dp=2, blocks=4, exchange="dataparallel", preload="off")
    others = (served, decided, scattered, away)
    return found | {Kind(int(kind)) for choices in others for kind in lower(choices, chain(4), 8).kind}


def test_every_kind_has_all_its_rules() -> None:
    assert set(RULES) == set(SPECS) == set(Kind)  # a cost, and what is always true of it
    assert set(WORDS["schedule"]) == set(SCHEDULES)
    lowered = lowered_kinds()
    assert set(Kind) - lowered == NOT_LOWERED_YET
    # Receiving is the interpreter's own work, since it posts receives ahead of their turn.
    assert set(HANDLERS) == lowered - set(RECEIVES)


# -- every file ---------------------------------------------------------------------------------------------------

TEXTS = (".py", ".md", ".toml", ".yaml", ".yml", ".json", ".txt", ".cfg", ".jinja", "")
OURS = ("src", "tests", "benchmarks", "docs", ".ci")


def files() -> list[Path]:
    """What people write: not what tools leave behind."""
    found = [path for path in ROOT.iterdir() if path.is_file() and path.name != ".git"]  # a file in a work tree
    for folder in OURS:
        found += [path for path in (ROOT / folder).rglob("*") if path.is_file()]
    hidden = ("__pycache__", ".egg-info")
    return sorted(path for path in found if path.suffix in TEXTS and not any(part in str(path) for part in hidden))


def test_files_are_short() -> None:
    long = {
        str(p.relative_to(ROOT)): len(p.read_text(encoding="utf-8").splitlines()) for p in files() if p.suffix == ".py"
    }
    assert {name: lines for name, lines in long.items() if lines > 450} == {}


def test_every_module_says_what_it_is() -> None:
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in files() if path.suffix == ".py"}
    silent = [str(p.relative_to(ROOT)) for p, tree in trees.items() if tree.body and not ast.get_docstring(tree)]
    assert silent == []


def test_no_path_of_a_machine_is_written_down() -> None:
    home = re.compile(r"(?<![\w.])/(?:" + "|".join(["work", "root", "home", "Users", "mnt"]) + r")/\w")
    found = []
    for path in files():
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if home.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}")
    assert found == []


@pytest.mark.parametrize("name", [dotted(path) for path in modules() if path.name != "__main__.py"])
def test_examples_in_docstrings(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0
