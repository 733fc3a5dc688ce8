"""A profile file that cannot be true is refused, by the place of what is wrong in it."""

import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import processor
import trainplan
from synthetic import chain
from trainplan import files
from trainplan.cluster.parse import cluster
from trainplan.errors import InputError
from trainplan.profile.op import Op
from trainplan.profile.profile import Exchange, Input, Profile
from trainplan.profile.provenance import WholeStep
from trainplan.profile.recipe import Kept, Recipe, Work
from trainplan.profile.sound import checked

ROOT = Path(__file__).parents[2]
KEPT = sorted((ROOT / "benchmarks" / "data").rglob("*.profile.json"))


def whole() -> Profile:
    """A profile with something in every field."""
    made = chain(4, samples=(1, 2, 4), flat=False, skips=((0, 3),), tied=((0, 3),))
    talk = (Exchange("all_reduce", 8.0),)
    blocks = [
        replace(
            block, backward_input_s=(1.0,) * 3, backward_weight_s=(1.0,) * 3, slice_forward=(0.0, 1.0, 0.0), recipe=0,
            forward_talk=talk, again_s=(1.0,) * 3, recompute_s=(0.5,) * 3,
        )
        for block in made.blocks
    ]  # fmt: skip
    op = Op("mm", 8.0, 4, 4, (2, 2, 2))
    recipe = Recipe((2, 4), (Work(op, op, "rows"),), (), (Kept((1.0, 2.0)),))
    return replace(
        made, blocks=tuple(blocks), inputs=(Input("args[0]", (0,), 4.0),), whole=(WholeStep(1, 1.0, 2.0, 0.1),),
        recipes=(recipe,),
    )  # fmt: skip


WHOLE = files.to_json(whole())
Place = tuple[str | int, ...]


def numbers(data: Any, place: Place = ()) -> list[Place]:
    """The places of all numbers."""
    if isinstance(data, dict | list):
        inside = data.items() if isinstance(data, dict) else enumerate(data)
        return [found for key, item in inside for found in numbers(item, (*place, key))]
    return [place] if isinstance(data, int | float) and not isinstance(data, bool) else []


def with_changed(place: Place, value: Any) -> Any:
    data = json.loads(json.dumps(WHOLE))
    inner = data
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return data


def spelled(place: Place) -> str:
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in place)


def read(data: Any) -> Profile:
    return checked(files.from_json(Profile, data, "profile p.json"), "profile p.json")


def test_a_whole_one_is_taken() -> None:
    assert read(WHOLE) == whole()


@given(st.sampled_from(numbers(WHOLE)), st.sampled_from([-5, math.nan, math.inf, -math.inf, 10**400]))
def test_a_number_that_cannot_be_is_refused_by_its_place(place: Place, value: float) -> None:
    with pytest.raises(InputError) as caught:
        read(with_changed(place, value))
    assert spelled(place).partition("[")[0] in caught.value.asked or place[0] == "samples"
    if place[0] != "samples" and place[-1] != "recipe":
        assert f"profile p.json{spelled(place)}" == caught.value.asked
        assert str(value)[:40] in caught.value.why
    assert caught.value.instead


@pytest.mark.parametrize(
    ("place", "value", "asked"),
    [
        (("blocks", 2, "forward_s"), [1.0], ": block 2 of the profile"),
        (("blocks", 2, "backward_input_s"), [1.0], ".blocks[2].backward_input_s"),
        (("blocks", 2, "slice_forward"), [1.0], ".blocks[2].slice_forward"),
        (("blocks", 2, "recipe"), 1, ".blocks[2].recipe"),
        (("blocks", 2, "forward_talk", 0, "what"), "talk", ".blocks[2].forward_talk[0].what"),
        (("blocks",), [], ": profile"),
        (("samples",), [4, 2, 1], ": profile"),
        (("samples",), [0, 1, 2], ": profile"),
        (("samples_per_epoch",), 0, ".samples_per_epoch"),
        (("batch",), 0, ".batch"),
        (("tp",), 0, ".tp"),
        (("device",), "", ".device"),
        (("sequence",), "maybe", ".sequence"),
        (("recompute",), "full", ".recompute"),
        (("update_apart",), 0, ".update_apart"),
        (("whole", 0, "samples"), 0, ".whole[0].samples"),
        (("crossings", 1, "consumers"), [77], ".crossings[1].consumers"),
        (("crossings", 1, "consumers"), [], ".crossings[1].consumers"),
        (("crossings", 1, "consumers"), [1], ".crossings[1].consumers"),
        (("crossings", 1, "consumers"), [3, 2], ".crossings[1].consumers"),
        (("crossings", 1, "producer"), 4, ".crossings[1].producer"),
        (("crossings", 1, "saved_by"), [4], ".crossings[1].saved_by"),
        (("parameters", 0, "blocks"), [], ".parameters[0].blocks"),
        (("parameters", 0, "blocks"), [4], ".parameters[0].blocks"),
        (("parameters", 0, "count"), 0, ".parameters[0].count"),
        (("parameters", 0, "ready"), 1.5, ".parameters[0].ready"),
        (("parameters", 0, "bytes"), 10**25, ".parameters[0].bytes"),
        (("inputs", 0, "blocks"), [4], ".inputs[0].blocks"),
        (("recipes", 0, "samples"), [4, 4], ".recipes[0].samples"),
        (("recipes", 0, "forward", 0, "cut"), "corners", ".recipes[0].forward[0].cut"),
        (("recipes", 0, "forward", 0, "large", "shape"), [2], ".recipes[0].forward[0].large.shape"),
    ],
)  # fmt: skip
def test_what_contradicts_the_rest_is_refused_by_its_place(place: Place, value: Any, asked: str) -> None:
    with pytest.raises(InputError) as caught:
        read(with_changed(place, value))
    assert caught.value.asked == f"profile p.json{asked}"
    assert "trainplan profile MODEL -o" in caught.value.instead


def test_blocks_that_take_no_time_are_refused() -> None:
    still = [{**block, "forward_s": [0, 1, 1], "backward_s": [0, 1, 1]} for block in WHOLE["blocks"]]
    with pytest.raises(InputError, match=r"p.json.blocks: .* takes time for 1 samples"):
        read(with_changed(("blocks",), still))


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_kept_profiles_are_taken(path: Path) -> None:
    assert Profile.load(path).blocks


def test_a_long_one_is_checked_in_no_time() -> None:
    long = chain(1000, samples=(1, 2, 4, 8))
    took = []
    for _ in range(5):
        began = time.process_time()
        checked(long, "profile")
        took.append(time.process_time() - began)
    assert min(took) < 0.02 * processor.slower()


@pytest.mark.parametrize("text", ["[" * 100_000, '{"trainplan": ' + "9" * 5000 + "}"])
def test_what_no_reader_of_json_takes_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(InputError, match="it is no JSON that can be read"):
        Profile.load(tmp_path / "p.json")


def test_values_made_in_python_are_held_to_the_same() -> None:
    """Compiled loops would read beyond what is there."""
    made, there = chain(4), cluster("2xTitanRTX")
    late = replace(made, crossings=(*made.crossings, replace(made.crossings[0], consumers=(99,))))
    with pytest.raises(InputError, match=r"profile\.crossings\[\d\]\.consumers: it is \(99,\), and blocks after"):
        trainplan.predict(late, "single", there, batch=4)
    with pytest.raises(InputError, match=r"cluster\.backend: it is 'morse'"):
        trainplan.predict(made, "single", replace(there, backend="morse"), batch=4)
