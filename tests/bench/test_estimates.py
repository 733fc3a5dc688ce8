"""The list of whole models by which estimates are judged: what it must have, and how a case goes."""

from collections import Counter

import pytest
import torch
from benchmarks import estimates

from trainplan.cluster.catalogue import device
from trainplan.errors import InputError
from trainplan.profile.device.file import Issue
from trainplan.profile.device.issue import FAMILIES, HostLane, Lane, Pace
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
    done = estimates.measured(estimates.replace(row, precision="fp32"), "cpu", pace=lambda: 1.5)
    assert done.measured_s > 0
    assert done.pace == 1.5
    path = str(tmp_path / "rows.json")
    estimates.Rows(path).note(done)
    assert estimates.Rows(path).rows == {done.key: done}
    assert "all: median" in estimates.said([done])


def test_a_small_step_is_as_slow_as_its_host_and_a_large_one_is_not():
    model, layers = model_of(device("H200")), "gpt:layers=2,hidden={},heads=2,seq={},vocab=64"
    slow = estimates.Model(estimates.slower(model.file, 2.0))
    for name, bound in ((layers.format(32, 16), True), (layers.format(2048, 512), False)):
        [row], [later] = (estimates.estimated(name, (16,), "tf32", one) for one in (model, slow))
        assert row.host_bound is bound
        assert later.estimated_issue_s == pytest.approx(2 * row.estimated_issue_s)
        assert later.estimated_s / row.estimated_s == pytest.approx(2.0 if bound else 1.0, rel=0.1)


def test_a_file_is_asked_how_fast_the_host_is_that_it_was_made_on():
    """The same code as on a GPU: a file that says twice of what is read has a host of half the pace."""
    lane = Lane(torch.device("cpu"), lambda: None, lambda seconds: None)
    made = HostLane(lane)
    while made.rounds < 20 and set(made.issue) != set(
        FAMILIES
    ):  # a round that somebody came in between of is not counted
        made.read()
    twice = {family: Issue(2 * one.forward_s, 2 * one.backward_s) for family, one in made.issue.items()}
    pair = Pace(lane, made.issue)._pair
    assert sum(pair.expected(twice)) == pytest.approx(2 * sum(pair.expected(made.issue)))
    assert 0.05 < Pace(lane, twice).now() < 5.0  # what it is depends on who else is at it
    with pytest.raises(InputError, match="element by element"):
        Pace(lane, {family: one for family, one in made.issue.items() if family != "elementwise"})


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
