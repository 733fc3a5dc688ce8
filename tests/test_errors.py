"""What is refused names what works: by the form of every error in the source, and by taking its advice."""

import ast
import dataclasses
import json
import shlex
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import trainplan
from synthetic import chain
from tests.test_cli import call
from tests.test_house import PACKAGE, modules
from trainplan import errors, files
from trainplan.cluster import reading, yaml_form
from trainplan.cluster.yaml_form import read_cluster
from trainplan.engine import worker
from trainplan.engine.job import Job
from trainplan.engine.trainer import build
from trainplan.errors import InputError, PlanError, TrainplanError
from trainplan.plan.plan import plan
from trainplan.profile.profile import Profile
from trainplan.workload.load import load

KINDS = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, TrainplanError)}

# Errors that end in something else, or that no user can cause; by file and by what is asked.
WITHOUT = {
    ("engine/faults.py", "asked"): 2,  # the traceback of the rank that failed comes last, or what torchrun said
    ("bench/pool.py", "asked"): 1,  # the same
    ("engine/decided.py", "'summing gradients'"): 1,  # a rank that only saw another one go: the launcher tells of that
    ("engine/loads.py", "f'rank {self.run.rank} at {at}'"): 1,  # the same
    ("engine/runner.py", "f'rank {self.rank} at {at}'"): 1,  # the same
    ("profile/capture/stage.py", "f'stage of blocks {self.first} to {self.last}'"): 1,  # what runs stages feeds them
    ("profile/capture/tidy.py", "'capture of the output'"): 1,  # torch.export contradicts itself
    ("program/builder.py", "f'{op} reads {name!r}'"): 1,  # a lowering that is wrong
    ("program/check/specification.py", "title"): 1,  # the same: all faults, and the lists of operations
}


def silent() -> dict[tuple[str, str], int]:
    """Errors of ours that are made without the nearest thing that works."""
    found: dict[tuple[str, str], int] = {}
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or any(isinstance(argument, ast.Starred) for argument in node.args):
                continue
            name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            if name not in KINDS:
                continue
            given = {**dict(enumerate(node.args)), **{keyword.arg: keyword.value for keyword in node.keywords}}
            instead = given.get(2, given.get("instead"))
            if instead is None or (isinstance(instead, ast.Constant) and not instead.value):
                key = (str(path.relative_to(PACKAGE)), ast.unparse(node.args[0]))
                found[key] = found.get(key, 0) + 1
    return found


def test_every_error_names_what_works() -> None:
    assert silent() == WITHOUT


# -- files ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Inner:
    word: Literal["on", "off"]
    pair: tuple[int, str]


@dataclasses.dataclass(frozen=True)
class Outer:
    count: int
    rate: float
    name: str
    flag: bool
    many: tuple[float, ...]
    inner: Inner
    each: tuple[Inner, ...]
    table: dict[str, int]
    maybe: int | None
    free: int = 3


GOOD = files.to_json(Outer(1, 0.5, "x", True, (1.0,), Inner("on", (1, "a")), (Inner("off", (2, "b")),), {"k": 1}, None))
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=6,
)


@given(st.sampled_from(sorted(GOOD)), ANYTHING)
def test_what_a_file_is_said_to_need_is_what_it_takes(key: str, value: Any) -> None:
    """Whatever stands at any key: what is suggested for that place is taken there."""
    data = {**GOOD, key: value}
    for _ in range(20):  # every answer mends one place, and there are not more than that
        try:
            assert isinstance(files.from_json(Outer, data), Outer)
            return
        except InputError as error:
            place = error.asked.removeprefix("Outer")
            data = mended(data, place, error)
    pytest.fail(f"{data} is refused again and again")


def test_what_is_no_finite_number_is_null(tmp_path: Path) -> None:
    """JSON has no word for it: what other programs read must not have Python's."""
    text = files.text_of({"loss": (1.5, float("nan")), "most": -float("inf")})
    assert json.loads(text, parse_constant=pytest.fail) == {"loss": [1.5, None], "most": None}
    files.write(tmp_path / "rank.json", "rank", [float("nan")])
    assert "NaN" not in (tmp_path / "rank.json").read_text()
    assert files.read(tmp_path / "rank.json", "rank") == [None]
    with pytest.raises(InputError, match=r"float was expected, found None. Try 1\.0"):
        files.from_json(Outer, {**GOOD, "rate": None})
    with pytest.raises(InputError, match=r"float was expected, found 'nan'. Try 1\.0"):
        files.from_json(Outer, {**GOOD, "rate": "nan"})


def mended(data: Any, place: str, error: InputError) -> Any:
    """The data as an error suggests them."""
    if not place:
        key, _, text = error.instead.partition(": ")
        return {**data, json.loads(key): json.loads(text)} if "missing" in error.why else json.loads(error.instead)
    head, rest = first(place)
    if not rest and error.why == "there is no such key":
        return {key: item for key, item in data.items() if key != head}
    changed = list(data) if isinstance(data, list) else dict(data)
    if rest or "missing" in error.why:
        changed[head] = mended(data[head], rest, error)
    else:
        changed[head] = json.loads(error.instead)
    return changed


def first(place: str) -> tuple[Any, str]:
    """`.a[1].b` as ("a", "[1].b")."""
    ends = [at for at, letter in enumerate(place) if at and letter in ".["] + [len(place)]
    head, rest = place[: ends[0]], place[ends[0] :]
    return (int(head[1:-1]) if head[0] == "[" else head[1:]), rest


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"trainplan": "cluster"}', '{"trainplan": "profile", "format": 0}', b"\xff"]
)
def test_broken_files_say_what_makes_another(text: str | bytes, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InputError) as caught:
        Profile.load(path)
    assert "trainplan profile MODEL" in caught.value.instead


def test_a_file_that_is_not_there_may_be_its_neighbour(tmp_path: Path) -> None:
    (tmp_path / "profile.json").write_text("{}")
    with pytest.raises(InputError) as caught:
        files.read(tmp_path / "profil.json", "profile")
    assert caught.value.instead.startswith(f"{tmp_path / 'profile.json'}, a profile that is made by trainplan profile")
    with pytest.raises(InputError) as caught:
        files.read(tmp_path / "quite-another.json", "rank")
    assert caught.value.instead == "making the rank again"


@pytest.mark.parametrize("line", files.MADE_BY.values(), ids=list(files.MADE_BY))
def test_what_makes_a_file_is_a_command(line: str) -> None:
    name, *words = shlex.split(line)
    assert name == "trainplan"
    command = [word for word in words[:2] if word.islower() and word[0] != "-"]
    known = call(*command[:1], "--help") if command[0] != "bench" else call(*command, "--help")
    assert set(command[1:]) <= set(known.replace(":", " ").replace(",", " ").split()) | {"run"}
    for option in (word for word in words if word.startswith("-")):
        assert option in known


# -- what nothing fits in ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [("--memory", "1B"), ("--set", "memory=1B")])
def test_a_byte_of_memory_is_too_little(words: tuple[str, str], tmp_path: Path) -> None:
    """The margin leaves nothing of it, and shares of nothing cannot be told."""
    chain(4).save(tmp_path / "p.json")
    there = (tmp_path / "p.json", "--cluster", "2xcpu")
    assert "; try devices with" in call("recommend", *there, *words)
    assert "DOES NOT FIT" in call("predict", *there, "--plan", "dp=2", "--set", "memory=1B")


# -- numbers that nothing has ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--batch", 10**11), "a step of more than 100,000,000 samples is none"),
        (("--batch", 10**21), "a step of more than 100,000,000 samples is none"),
        (("--set", "memory=1e30GiB"), "that would be 1.07e+39"),
        (("--set", "latency=1e300s"), "that would be 1e+300"),
        (("--set", "slowdown=1e300"), "that would be 1e+300"),
        (("--set", "cores=1e30"), "that would be 1e+30"),
    ],
)
def test_a_number_that_was_mistyped_is_refused(words: tuple[str, object], why: str, tmp_path: Path) -> None:
    """It took all memory, or an answer of nonsense was made of it."""
    chain(4).save(tmp_path / "p.json")
    with pytest.raises(TrainplanError) as caught:
        call("recommend", tmp_path / "p.json", "--cluster", "2xcpu", *words)
    assert caught.value.why.startswith(why)


@pytest.mark.parametrize(("option", "number"), [("--width", 10**9), ("--steps", 10**11)])
def test_a_drawing_has_an_end(option: str, number: int, tmp_path: Path) -> None:
    chain(4).save(tmp_path / "p.json")
    with pytest.raises(InputError, match=r"nobody reads more|the timeline has no such step"):
        call("timeline", tmp_path / "p.json", "--cluster", "2xcpu", "--plan", "dp=2", option, number)


# -- what people write ------------------------------------------------------------------------------------------------


@given(st.sampled_from([reading.whole, reading.number, reading.share]), ANYTHING, st.integers(0, 3))
def test_a_number_that_is_suggested_is_taken(read: Any, value: Any, least: int) -> None:
    words = {"least": least} if read is reading.whole else {}
    try:
        read(value, **words)
    except InputError as error:
        said = float(error.instead.partition(",")[0])
        assert read(int(said) if read is reading.whole else said, **words) >= words.get("least", 0)


NODE = {"devices": ["2x T4"], "inside": "pcie3"}
CARD = {"name": "Mine", "memory": "8GiB", "memory_rate": "300GB/s", "flops": {"fp32": "8TFLOP/s"}}


@pytest.mark.parametrize(
    ("change", "instead"),
    [
        ({"pairs": 3}, "[{between: [0, 1], link: nvlink2}]"),
        ({"pairs": [{"between": [[0, 1], 2], "link": "nvlink2"}]}, "[0, 1]"),
        ({"pairs": [{"between": 2, "link": "nvlink2"}]}, "[0, 1]"),
        ({"devices": [{k: v for k, v in CARD.items() if k != "memory"}]}, "memory: 24GiB; or device: "),
        ({"devices": [{k: v for k, v in CARD.items() if k != "flops"}]}, "flops: {fp32: 15TFLOP/s}; or device: "),
        ({"pairs": [{"between": [0, 2], "link": "nvlink2"}]}, "devices 0 to 1"),
        ({"sources": "mine"}, "{cores: data sheet}"),
        ({"cores": 2.6}, "3"),
        ({"cores": {"source": "mine"}}, "{value: 25GB/s, source: data sheet}, or the value alone"),
        ({"name": 3}, '"…", in quotes'),
    ],
)
def test_a_cluster_file_is_told_what_it_takes(change: dict, instead: str) -> None:
    with pytest.raises(InputError) as caught:
        read_cluster({"nodes": [{**NODE, **change}]}, "mine.yaml")
    assert caught.value.instead.startswith(instead)


@pytest.mark.parametrize(
    ("key", "value", "instead"),
    [
        ("nodes", 3, "[{type: DGX-H100, count: 2}], or [{devices: [4x T4], inside: pcie3}]"),
        ("collectives", 3, "[{op: all_reduce, ranks: 2, "),
        ("notes", 3, '["…"], texts in quotes'),
    ],
)
def test_a_list_in_a_cluster_file_is_shown(key: str, value: Any, instead: str) -> None:
    with pytest.raises(InputError) as caught:
        read_cluster({"nodes": [NODE], key: value}, "mine.yaml")
    assert caught.value.instead.startswith(instead)


def test_lists_that_are_shown_are_taken() -> None:
    for nodes in yaml_form._NODES.split(", or "):
        assert read_cluster({"nodes": [{"network": "eth10", **yaml.safe_load(nodes)[0]}]}, "mine.yaml").world > 1
    curves = yaml.safe_load(yaml_form._CURVES)
    assert read_cluster({"nodes": [NODE], "collectives": curves}, "mine.yaml").collectives


# -- models from Python -----------------------------------------------------------------------------------------------


def test_inputs_of_another_size_are_told_what_decides_it() -> None:
    def inputs(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(samples + 1, 4), torch.zeros(samples + 1, 2)

    with pytest.raises(TrainplanError, match=r"for \d+ samples: the function gave \d+\. Try tensors whose first dim"):
        trainplan.predict(nn.Linear(4, 2), "single", "1xT4", inputs=inputs, loss=nn.functional.mse_loss)


def test_a_plan_of_more_ranks_says_how_to_start_them() -> None:
    with pytest.raises(PlanError) as caught:
        build(plan(dp=2), load("gpt:layers=1,hidden=8,heads=2,seq=4,vocab=16,batch=4"))
    assert caught.value.why == "it needs 2 ranks, and 1 was started"
    assert caught.value.instead == "torchrun --nproc-per-node 2 FILE, or a plan of 1, such as single"


@pytest.mark.parametrize(("line", "count"), [("dp=2", 2), ("pp=2 dp=3", 6), ("dp=2,1 pp=2", 3), ("ps-bsp dp=2", 3)])
def test_a_line_of_more_ranks_in_a_process_alone_says_how_to_start_them(line: str, count: int, monkeypatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(PlanError, match="this process is alone: torchrun did not start it") as caught:
        trainplan.build(line, nn.Linear(2, 2), "cross_entropy", inputs=(torch.zeros(8, 2), torch.zeros(8).long()))
    assert caught.value.instead == f"torchrun --nproc-per-node {count} FILE, or a plan of 1, such as single"


# -- jobs -------------------------------------------------------------------------------------------------------------


def test_what_torchrun_starts_wants_a_job_and_says_what_makes_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        worker.main(["odd.py:conv"])
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert "it is not a job file" in said
    assert "Try trainplan run odd.py:conv --plan PLAN --dry-run --out FOLDER, which writes FOLDER/job.json" in said


@pytest.mark.parametrize("field", ["batch", "steps"])
def test_a_job_of_nothing_is_refused(field: str, tmp_path: Path) -> None:
    path = dataclasses.replace(Job("gpt", {}, 8, 3, str(tmp_path)), **{field: 0}).save()
    with pytest.raises(InputError) as caught:
        Job.load(path)
    assert caught.value.asked == f"job {path}.{field}"
    assert "--dry-run" in caught.value.instead
