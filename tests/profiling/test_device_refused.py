"""Device files are read strictly: what cannot be is refused, with the field, the reason and what would do."""

import json
from dataclasses import replace

import pytest

from trainplan import files
from trainplan.errors import InputError
from trainplan.profile.device.file import DeviceFile, read
from trainplan.profile.device.model import Model
from trainplan.profile.roofline import speed_of

from .device_files import PAPER, paper


@pytest.fixture(scope="module")
def file():
    return paper()


def test_a_file_comes_back_as_it_was_written(file, tmp_path):
    file.save(tmp_path / "paper.json")
    assert DeviceFile.load(tmp_path / "paper.json") == file


@pytest.mark.parametrize(
    ("changed", "field", "rest"),
    [
        ({"peak": {"bf16": 3e14}}, "peak.bf16", "300 TFLOP/s is below the 600 TFLOP/s that was measured"),
        ({"memory_rate": -1.0}, "memory_rate", "above zero"),
        ({"memory_peak": 1e12}, "memory_peak", "1,000 GB/s is below the 3,600 GB/s that was measured"),
        ({"memory_rat": 1.0}, "memory_rat", "there is no such key. Try memory_rate"),
        ({"floor_s": 0.0}, "floor_s", "above zero"),
        ({"processors": 0}, "processors", "at least one"),
        ({"ceiling": {}}, "ceiling", "no product was measured"),
        ({"ceiling": {"bf61": 1e12}}, "ceiling.bf61", "no such precision. Try bf16"),
        ({"host": {"produkt": {"forward_s": 1.0, "backward_s": 1.0}}}, "host.produkt", "Try product"),
        ({"host": {"product": {"forward_s": -1.0, "backward_s": 1.0}}}, "host.product.forward_s", "zero or more"),
        ({"host": {}}, "host", "what the host takes for elementwise work is neither there nor missing"),
        ({"host": {"product": {"forward_s": 1e-5, "backward_s": 1e-5}}}, "host", "['product']: what the host takes"),
        ({"update_op_s": 0.0, "update_tensor_s": 0.0}, "update_op_s", "Try measuring the device again, or saying why"),
        ({"skipped": -1}, "skipped", "zero or more"),
        ({"host_rounds": -1}, "host_rounds", "zero or more"),
        ({}, "curves", "there are none, so nothing was measured"),
        ({"device": "H200", "processors": 1}, "processors", "1, and H200 has 132, or fewer where the machine is a"),
        ({"device": "H200", "processors": 132, "capability": [8, 0]}, "capability", "8.0, and that of H200 is 9.0"),
        ({"device": "cpu", "processors": 1, "capability": [9, 0]}, "capability", "9.0, and that of cpu is none"),
        ({"curves": [["convolution", "forward", "bf16", ["2 8 8 64 9 1 1 1e-15"]]]}, "curves[0].points[0]", "1e-08 s"),
        ({"curves": [["convolution", "forward", "bf16", ["64 512 512 784 9 1 1 1e-6"]]]}, "curves[0].points[0]",
         "of 10 times the ceiling of 600 TFLOP/s"),
        ({"curves": [["elementwise", "add", "fp32", ["4096 1e-15"]]]}, "curves[0].points[0]", "calling an operator"),
        ({"curves": [["elementwise", "add", "fp32", ["1073741824 1e-4"]]]}, "curves[0].points[0]",
         "149.1 % of 2 times the memory, 3,600 GB/s"),
        ({"curves": [["elementwise", "add", "fp32", ["4096 1e-6"]]] * 2}, "curves[1]", "there already, as curves[0]"),
        ({"curves": [["products", "nt", "bf16", ["1 8 8 8 1e-6"]]]}, "curves[0].family", "no such family. Try product"),
        ({"curves": [["product", "tt", "bf16", ["1 8 8 8 1e-6"]]]}, "curves[0].variant", "no such variant of product"),
        ({"curves": [["product", "nt", "bf16", ["8 8 8 1e-6"]]]}, "curves[0].points[0]", "4 sizes and the seconds"),
        ({"curves": [["product", "nt", "bf16", ["1 8 8 8 -1e-6"]]]}, "curves[0].points[0]", "above zero"),
        ({"curves": [["product", "nt", "bf16", ["1 4096 4096 4096 1e-6"]]]}, "curves[0].points[0]", "of the ceiling"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_with_the_field(file, changed, field, rest):
    data = json.loads(json.dumps(files.to_json(replace(file, curves=(), checks=()))))
    if "curves" in changed:
        names = ("family", "variant", "precision", "points")
        changed = {"curves": [dict(zip(names, curve, strict=True)) for curve in changed["curves"]]}
    with pytest.raises(InputError) as refused:
        read(data | changed, "paper.json")
    assert f"paper.json.{field}" in str(refused.value)
    assert rest in str(refused.value)


@pytest.mark.parametrize(
    ("changed", "field", "rest"),
    [
        ({"floor_s": 1.0}, "floor_s", "1.00 s: no kernel takes less, but a point has"),
        ({"memory_rate": 1e30, "memory_peak": 0.0}, "memory_rate", "is the highest rate of its copies and sums"),
        ({"ceiling": {"bf16": 1e30, "fp32": 4e13}, "peak": {}}, "ceiling.bf16", "is the highest rate of its products"),
        ({"ceiling": {"bf16": 6e14, "tf32": 3.2e14, "fp32": 4e13, "fp16": 6e14}}, "ceiling.fp16", "it has no product"),
    ],
)  # fmt: skip
def test_rates_that_no_point_comes_near_are_refused(file, changed, field, rest):
    data = files.to_json(file)
    assert read(data, "paper.json") == file
    with pytest.raises(InputError) as refused:
        read(data | changed, "paper.json")
    assert f"paper.json.{field}" in str(refused.value)
    assert rest in str(refused.value)


def test_a_slice_has_fewer_processors_than_the_catalogue_says(file):
    part = files.to_json(replace(file, device="H200", processors=32, machine="a slice of 25 % under MPS"))
    assert read(part, "part.json").processors == 32
    with pytest.raises(InputError, match=r"part\.json\.processors: 200, and H200 has 132"):
        read(part | {"processors": 200}, "part.json")


def test_keys_beside_the_data_are_refused(file, tmp_path):
    file.save(tmp_path / "paper.json")
    whole = json.loads((tmp_path / "paper.json").read_text(encoding="utf-8"))
    (tmp_path / "paper.json").write_text(json.dumps(whole | {"formt": 1}), encoding="utf-8")
    with pytest.raises(InputError, match=r"paper\.json\.formt: there is no such key beside the data\. Try format"):
        DeviceFile.load(tmp_path / "paper.json")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"host": {}, "missing": {"host": "RuntimeError: no"}},
         "; its host was not measured, so an operator is taken to need 30 µs, and 45 going back"),
        ({"host": {}, "missing": {"host.elementwise": "the host was busy"}}, "; its host was not measured"),
        ({"missing": {"host.pooling": "busy"}}, "; of its host not measured, so taken: pooling as elementwise"),
        ({"update_op_s": 0.0, "update_tensor_s": 0.0, "missing": {"host.optimizer": "busy"}}, "taken: steps as on an"),
        ({}, ""),
    ],
)  # fmt: skip
def test_what_a_file_says_is_missing_of_its_host_is_said_by_who_uses_it(file, changed, said):
    found = read(files.to_json(replace(file, host_rounds=9, host_spread=0.2)) | changed, "paper.json")
    words = speed_of(PAPER, "fp32", Model(found)).words
    assert said in words
    assert ("its host within 20.0 %" in words) == ("its host was not measured" not in words)
    assert ("not measured" in words) == bool(said)


def test_a_core_has_no_host_beside_it(file):
    core = files.to_json(replace(file, device="cpu", processors=1, host={}, update_op_s=0.0, update_tensor_s=0.0))
    assert read(core, "core.json").host_lacks == ()
