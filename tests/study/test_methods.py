"""What methods raise and lower: by hand, as a survey has it, and as the page in docs/ does."""

import json
from pathlib import Path

import pytest

from trainplan import study
from trainplan.errors import InputError
from trainplan.plan.systems import SYSTEMS
from trainplan.report.influence import Influences, lines
from trainplan.study.influence import COLUMNS, METHODS, agrees

DATA = json.loads((Path(__file__).parents[2] / "benchmarks" / "data" / "methods.json").read_text(encoding="utf-8"))
PAGE = DATA["data"]
SMALL = "gpt:layers=4,hidden=512,heads=4,seq=32,vocab=1024"
# Where the survey is not what a program does, and why: docs/methods.md.
OTHERWISE = {
    name: ["weight_gradients"] for name in ("partitioned optimizer states", "… and gradients", "… and parameters")
}


@pytest.fixture(scope="module")
def small() -> Influences:
    """A model so small that a device of 1 GiB is full of its states and activations."""
    return study("methods", models=SMALL, batch=64, set={"memory": "1GiB"})


def arrows(rows: list[dict]) -> dict[str, dict[str, str]]:
    return {line["method"]: dict(zip(COLUMNS, line["arrows"], strict=False)) for line in lines(rows)}


def test_every_arrow_of_the_survey_but_those_that_are_explained() -> None:
    found, compared = arrows(PAGE["rows"]), 0
    for method in METHODS:
        theirs = dict(zip(COLUMNS, method.survey.split(), strict=False))
        others = [name for name in theirs if found[method.name] and not agrees(found[method.name][name], theirs[name])]
        assert others == OTHERWISE.get(method.name, []), method.name
        compared += sum(sign != "?" for sign in theirs.values()) if found[method.name] else 0
    assert compared == 2 * 6 + 2 + 5 * 6


def test_memory_which_the_survey_does_not_have() -> None:
    """Every method is there for the sake of it."""
    assert {row["peak_bytes"] for row in arrows(PAGE["rows"]).values() if row} == {"", "↓"}


def test_another_model_has_the_same_arrows(small: Influences) -> None:
    assert arrows(small.to_json()["rows"]) == arrows(PAGE["rows"])


def test_numbers_by_hand(small: Influences) -> None:
    """Four layers of 512, of 12 × 512² weights, 13 × 512 biases and norms; an embedding of 1024 words and 32 places."""
    found = {row.method: row for row in small.found}
    weights = 4 * (4 * (12 * 512**2 + 13 * 512) + (1024 + 32) * 512 + 2 * 512)
    assert found["data parallelism"].weight_gradients == pytest.approx(4 * 2 * 3 / 4 * weights, rel=1e-6)
    for name in ("partitioned optimizer states", "… and gradients"):
        assert found[name].weights == found[name].weight_gradients == pytest.approx(3 * weights, rel=1e-3)
    crossing = 3 * 64 * 32 * 512 * 4  # three cuts, whole batch, tokens × width of 4 bytes
    for name in ("model parallelism", "pipeline parallelism"):
        assert found[name].activations == found[name].activation_gradients == crossing
        assert found[name].weight_gradients == 2 * 1024 * 512 * 4  # the tied embedding, between two stages
    products = 3 * 2 * 64 * 32 * 512 * 2048  # of all layers but the one that the last norm reads: not needed again
    assert found["rematerialisation"].flops == pytest.approx(4 / 3 * found["one device"].flops - products)
    assert found["offloading of activations"].activations > 0


def test_the_largest_batch_fits_and_the_next_does_not(small: Influences) -> None:
    from trainplan import predict

    one = next(row for row in small.found if row.method == "one device")
    for samples, fits in ((one.samples, True), (one.samples + 1, False)):
        asked = predict(SMALL, "dp=1", "4xA100-80", batch=samples, set={"memory": "1GiB"})
        assert asked.prediction.fits == fits


def test_methods_that_are_not_there_have_no_numbers(small: Influences) -> None:
    """A row whose system has come wants a plan."""
    there = {row.method for row in small.found}
    for method in METHODS:
        assert (method.name in there) == bool(method.line)
        for key in method.keys:
            assert key in SYSTEMS
            if not method.line:
                assert not SYSTEMS[key].choices, f"{key} is there: give {method.name!r} a plan in study/influence.py"
    assert "not yet there: l2l, granular" in str(small)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ({"workers": "2,4"}, "one number of devices"),
        ({"workers": "1"}, "several devices"),
        ({"steps": 3}, "runs nothing"),
        ({"device": "A100-90"}, "A100-80"),
    ],
)
def test_refusals(words: dict, why: str) -> None:
    with pytest.raises(InputError, match=why):
        study("methods", **words)


@pytest.mark.slow
def test_the_page_is_what_is_counted() -> None:
    found = study("methods").to_json()
    assert [row["method"] for row in found["rows"]] == [row["method"] for row in PAGE["rows"]]
    for ours, kept in zip(found["rows"], PAGE["rows"], strict=True):
        assert ours == {**kept, "step_s": pytest.approx(kept["step_s"], rel=0.02)}
