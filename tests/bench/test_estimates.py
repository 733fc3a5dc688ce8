"""The list of whole models by which estimates are judged: what it must have, and how a case goes."""

from collections import Counter

import pytest
from benchmarks import estimates

from trainplan.cluster.catalogue import device
from trainplan.errors import InputError
from trainplan.profile.device.known import model_of
from trainplan.profile.estimate import estimate, traced

from ..profiling import models


def _cases(which):
    return [(name, size, precision) for name, sizes, precision in estimates.wanted(which) for size in sizes]


@pytest.mark.parametrize("which", ["usual", "blind"])
def test_the_cases_are_those_that_were_asked_for(which):
    cases = _cases(which)
    assert len(set(cases)) == len(cases) >= 60
    assert min(Counter(precision for *_, precision in cases).values()) >= 15
    for word in (*estimates.ZOO, "llama", "vit", "bert", "t5", "convnext", "densenet", "hidden=768", "hidden=1280"):
        assert sum(word in name for name, *_ in cases) >= 3
    for network in estimates.ZOO:  # in two precisions, so that neither stands for the other
        assert len({precision for name, _, precision in cases if name.startswith(network)}) == 2


def test_no_blind_case_was_ever_looked_at():
    """Neither a shape of the usual list, nor a network of the zoo in a precision in which it was."""
    usual, blind = _cases("usual"), _cases("blind")
    assert not {(name, size) for name, size, _ in usual} & {(name, size) for name, size, _ in blind}
    assert not {(name, precision) for name, _, precision in usual} & {(name, precision) for name, _, precision in blind}


def test_a_case_is_estimated_then_measured_and_told(tmp_path, monkeypatch):
    name = "gpt:layers=4,hidden=32,heads=2,seq=16,vocab=64"
    [row] = estimates.estimated(name, (2,), "tf32", model_of(device("H200")))
    assert row.estimated_s > 0
    assert row.estimated_bytes > 0
    monkeypatch.setattr(estimates, "TIMED_S", 0.0)
    done = estimates.measured(estimates.replace(row, precision="fp32"), "cpu")
    assert done.measured_s > 0
    path = str(tmp_path / "rows.json")
    estimates.Rows(path).note(done)
    assert estimates.Rows(path).rows == {done.key: done}
    assert "all: median" in estimates.said([done])


def test_autocast_makes_arithmetic_narrow_and_is_refused_where_it_is_not_known():
    network = models.skip()
    here = device("H200")
    for word, kind in (("", "fp32"), ("bf16", "bf16")):
        blocks = traced(network, [2], gpu=True, autocast=word).at(2).blocks
        assert {op.precision for block in blocks for op in block.forward if op.name == "addmm"} == {kind}
    with pytest.raises(InputError, match=r"autocast to bf61: .*Try bf16"):
        estimate(network, here, samples=[2], autocast="bf61")
    with pytest.raises(InputError, match="on a CPU"):
        estimate(network, device("cpu"), samples=[2], autocast="bf16")
    with pytest.raises(InputError, match=r"fp32 or tf32\. Try autocast='bf16'"):
        estimate(network, here, samples=[2], precision="bf16")
