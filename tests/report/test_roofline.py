"""The roofline of a model: intensities as published, bounds, the picture, and what is not said."""

import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

import trainplan
from profiling.device_files import paper
from trainplan.errors import InputError
from trainplan.profile.bounds import Bounds
from trainplan.report.device import MeasuredDevice
from trainplan.report.picture import check_picture
from trainplan.report.roofline import Roofline, draw, utilisation


def layers():
    """One of each operator that the published table has, from 4096 to 1024 features at the end."""
    return nn.Sequential(
        nn.MaxPool2d(3, stride=1, padding=1), nn.ReLU(), nn.Flatten(), nn.LayerNorm(4096), nn.Linear(4096, 1024)
    )


def asked(**options):
    def inputs(samples, seed):
        return torch.zeros(samples, 16, 16, 16), torch.zeros(samples, dtype=torch.long)

    return trainplan.roofline(
        layers(), device="A100-80", precision="bf16", inputs=inputs, loss="cross_entropy", optimizer="sgd", **options
    )


@pytest.fixture(scope="module")
def answer(tmp_path_factory):
    return asked(batch=512, output=str(tmp_path_factory.mktemp("picture") / "roof.svg"))


def forward(found: Roofline):
    return {row.name: row for row in found.bounds.rows if row.passing == "forward"}


@pytest.mark.system("roofline", "P")
def test_the_published_table(answer):
    """Intensities in half precision on an A100 (arXiv 2202.10435, table 6); its machine is a V100's, so 139 FLOP/B.

    A pool of 3 × 3 has 2.25 only at stride 1.
    """
    rows = forward(answer)
    assert round(rows["addmm"].intensity) == 315
    assert rows["addmm"].bound == "compute"
    one = forward(asked(batch=1))["addmm"]
    assert (round(one.intensity), one.bound) == (1, "memory")
    assert rows["max_pool2d_with_indices"].intensity == pytest.approx(2.25)
    assert rows["relu"].intensity == 0.25
    assert 1 < rows["native_layer_norm"].intensity < 10
    for name in ("max_pool2d_with_indices", "relu", "native_layer_norm"):
        assert rows[name].bound == "memory"
    assert answer.bounds.memory_rate == 2039e9
    assert rows["addmm"].peak == 312e12


def test_text_json_and_picture(answer):
    text = str(answer)
    assert "roofs    2,039 GB/s; 312 TFLOP/s from 153 FLOP/B on, 19.5 TFLOP/s from 9.56 FLOP/B on" in text
    assert "on A100-80 (scaled from the device file of H200 by data sheets" in text
    assert "of the host to issue them" in text
    data = answer.to_json()
    assert {row["bound"] for row in data["rows"]} == {"compute", "memory"}
    assert 0 < data["utilisation"] <= 1
    with open(answer.path, encoding="utf-8") as stream:
        drawn = stream.read()
    assert "<svg" in drawn
    assert drawn.count("<use ") > 5  # dots


def test_no_share_of_a_peak_that_is_not_known_and_none_above_all(answer):
    found: Bounds = answer.bounds
    unknown = replace(found, peak_known=False)
    assert utilisation(unknown) is None
    assert "no share of the peak is given, because the peak is not known" in str(Roofline(unknown))
    impossible = replace(found, run_s=found.ideal_s / 2, issue_s=0.0)
    assert utilisation(impossible) is None
    assert "of the peak" not in str(Roofline(impossible))


def test_pictures_that_cannot_be_drawn(answer, monkeypatch, tmp_path):
    with pytest.raises(InputError, match=r"pictures end in \.svg, \.png, \.pdf\. Try roof\.txt\.svg"):
        check_picture("roof.txt")
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot be written"):
        draw(answer.bounds, str(tmp_path / "file" / "roof.svg"))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InputError, match="a picture needs matplotlib, which is not installed"):
        asked(batch=4, output=str(tmp_path / "roof.svg"))


def test_devices_are_refused_with_the_nearest_name(tmp_path, monkeypatch):
    with pytest.raises(InputError, match="Try A100-40, A100-80"):
        trainplan.roofline("resnet18:cifar10", device="A100")
    with pytest.raises(InputError, match=r"no such precision\. Try bf16"):
        trainplan.roofline("resnet18:cifar10", device="A100-80", precision="bf61")
    with pytest.raises(InputError, match="the device has fp32, fp16"):
        trainplan.roofline("resnet18:cifar10", device="V100-16", precision="bf16")
    with pytest.raises(InputError, match=r"shown or measured\. Try measure"):
        trainplan.device("measur")
    with pytest.raises(InputError, match="Try --device cpu"):
        trainplan.device("measure", "cpu")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("trainplan.profile.device.known.packaged", lambda: ())
    with pytest.raises(InputError, match="no device has been measured here"):
        trainplan.device("show", "H200")


def test_a_device_file_is_shown_and_used(tmp_path, monkeypatch):
    path = tmp_path / "paper.json"
    paper(missing={"pooling.max.bf16": "RuntimeError: no kernel"}, skipped=3).save(path)
    shown = trainplan.device("show", str(path))
    assert isinstance(shown, MeasuredDevice)
    for words in (
        "600 TFLOP/s at best (75.0 % of the data sheet)",
        "missing  pooling.max.bf16: RuntimeError",
        "error  ",
    ):
        assert words in str(shown)
    assert shown.to_json()["file"]["device"] == "Paper"
    found = trainplan.roofline("gpt:layers=1,hidden=64,heads=2,seq=16,vocab=64", device=str(path), batch=2)
    assert "from its device file (measured 2026-01-02" in found.bounds.words
    assert found.bounds.peak_known


def test_a_device_without_its_own_file_is_shown_as_what_it_is_scaled_from(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("trainplan.profile.device.known.packaged", lambda: (paper(checks=()),))
    shown = trainplan.device("show", "a100-80")
    assert "A100-80 has no file of its own, and is scaled from that of Paper by their data sheets" in str(shown)
    assert "1,835 GB/s; 15.6 TFLOP/s fp32, 125 TFLOP/s tf32, 234 TFLOP/s bf16 at best; 108 processors" in str(shown)
    assert shown.to_json()["scaled_to"] == "A100-80"
    with pytest.raises(InputError, match=r"nor of a device like it: estimates are by its data sheet"):
        trainplan.device("show", "TitanRTX")
    with pytest.raises(InputError, match=r"no such device in the catalogue, and no file of it. Try H100-SXM"):
        trainplan.device("show", "H100SXM")
