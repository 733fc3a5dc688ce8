"""Measurements of a device that end early: kept, not in the place of whole ones, and told wherever they are used."""

import warnings

import pytest

import trainplan
from trainplan.profile.device import known
from trainplan.profile.device.file import DeviceFile
from trainplan.profile.device.grid import cases
from trainplan.profile.device.measure import keep, measure, part_of

from .device_files import PAPER, paper


@pytest.fixture(scope="module")
def whole():
    return paper()


@pytest.fixture(scope="module")
def early():
    return paper(whole=False, skipped=1000)


def test_measuring_that_is_cut_short_keeps_what_there_is(monkeypatch, tmp_path):
    small = [case for case in cases("cpu", ("fp32", "bf16")) if case.at.flops < 2**28 and case.at.bytes < 2**24]
    monkeypatch.setattr("trainplan.profile.device.measure.cases", lambda *asked: small)
    monkeypatch.setattr("trainplan.profile.device.measure.USED", 0.0)
    found = measure("cpu", 1.0, tmp_path / "cpu.json")
    assert "product" in {curve.family for curve in found.curves}
    assert found.skipped > 4000
    assert DeviceFile.load(tmp_path / "cpu.json") == found


def test_a_device_that_does_not_answer_ends_it_with_what_there_is(monkeypatch, tmp_path):
    runs = iter(range(150))

    def run(reference):
        if next(runs, None) is None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        sum(range(1000))

    monkeypatch.setattr("trainplan.profile.reference.Reference.run", run)
    monkeypatch.setattr("trainplan.profile.device.measure.LOOK_EVERY_S", 0.0)  # after every point
    found = measure("cpu", 1.0, tmp_path / "cpu.json", quick=True)
    assert not found.whole
    assert "does not answer any more: RuntimeError: CUDA error" in found.missing["everything after"]
    assert found.skipped > 0
    assert DeviceFile.load(tmp_path / "cpu.json") == found


def test_an_interrupted_one_leaves_what_was_there_and_what_it_had(monkeypatch, tmp_path, whole):
    """By Ctrl-C, here, after some points; a process that is killed writes no more than that."""
    monkeypatch.setattr("trainplan.profile.device.measure.SAVED_EVERY_S", 0.0)
    path, points = tmp_path / "cpu.json", iter(range(25))
    whole.save(path)

    def stop(what, share):
        if next(points, None) is None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure("cpu", 1.0, path, quick=True, progress=stop)
    assert DeviceFile.load(path) == whole
    assert not DeviceFile.load(part_of(path)).whole


def test_nothing_is_left_beside_one_that_ends(tmp_path, whole, early):
    path = tmp_path / "paper.json"
    assert keep(early, path) == path  # better than nothing
    assert keep(whole, path) == path
    assert keep(early, path) == part_of(path)
    assert DeviceFile.load(path) == whole
    assert keep(whole, path) == path
    assert list(tmp_path.iterdir()) == [path]


def test_what_cannot_be_read_is_no_whole_one(tmp_path, early):
    path = tmp_path / "paper.json"
    path.write_text("{")
    assert keep(early, path) == path


def test_estimates_take_no_file_that_ended_early_unless_it_is_named(monkeypatch, tmp_path, whole, early):
    monkeypatch.setattr(known, "packaged", lambda: (whole,))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    place = known.place_of("Paper")
    early.save(part_of(place))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert known.model_of(PAPER, measured_here=True).file is whole
    early.save(place)  # as older versions left it
    with pytest.warns(UserWarning, match=r"passed over: .*ended early \(cut short before its time, [\d,]+ of"):
        assert known.model_of(PAPER, measured_here=True).file is whole
    with pytest.warns(UserWarning, match="passed over"):
        assert trainplan.device("show", "Paper").file is whole


@pytest.mark.parametrize("ended", [True, False])
def test_predictions_by_a_file_say_how_much_of_it_there_is(tmp_path, ended):
    path = tmp_path / "slow.json"
    file = paper(whole=ended, skipped=1000)
    file.save(path)
    count = sum(len(curve.points) for curve in (*file.curves, *file.checks))
    said = f"; {'' if ended else 'cut short before its time, '}{count:,} of {count + 1000:,} shapes"
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text("name: one\nnodes: [{name: a, devices: [{file: slow.json, memory: 80GiB}]}]\n")
    model = "gpt:layers=1,hidden=64,heads=2,seq=32,vocab=100"
    assert said in str(trainplan.predict(model, "single", str(cluster), batch=2))
    assert said in str(trainplan.roofline(model, str(path), batch=2))
    assert ("cut short" in str(trainplan.device("show", str(path)))) == (not ended)


def test_of_a_file_with_every_shape_nothing_is_said(whole):
    assert whole.coverage == ""
