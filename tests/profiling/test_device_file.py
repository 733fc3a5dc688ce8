"""Device files: true at what was measured and near between, bounded, scaled, and really measured."""

import json
import re
from dataclasses import replace
from math import copysign, log
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainplan.cluster.catalogue import device
from trainplan.errors import InputError, RunError
from trainplan.profile.device import kernels, known
from trainplan.profile.device.families import DIMENSIONS, VARIANTS, place, places
from trainplan.profile.device.file import Curve, DeviceFile, point
from trainplan.profile.device.measure import measure
from trainplan.profile.device.model import APART_ERROR, SCALED_ERROR, Model
from trainplan.profile.estimate import estimate
from trainplan.profile.op import Op
from trainplan.profile.operators import Recorder
from trainplan.profile.roofline import issue_seconds, pass_seconds, run_seconds, speed_of, update_seconds
from trainplan.profile.timing import clock_of

from . import models
from .device_files import CEILING, FLOOR, MEMORY, PAPER, paper, true_seconds


@pytest.fixture(scope="module")
def file():
    return paper()


@pytest.fixture(scope="module")
def model(file):
    return Model(file)


# -- the model --------------------------------------------------------------------------------------------------------


def test_at_measured_points_the_model_says_what_was_measured(file, model):
    for curve in file.curves:
        for shape, seconds in list(zip(map(tuple, curve.shapes.tolist()), curve.seconds, strict=True))[::71]:
            at = place(curve.family, curve.variant, curve.precision, shape)
            assert model.seconds(at) == pytest.approx(seconds, rel=2e-3)


def test_between_them_it_is_near_and_knows_waves(model):
    assert model.waves
    assert model.error < 0.05
    assert Model(paper(), PAPER).error == model.error
    full, more = (place("product", "nt", "bf16", (1, 4096, 1024, columns)) for columns in (3200, 3208))
    steps = [model.seconds(more) / model.seconds(full), true_seconds(more) / true_seconds(full)]
    assert steps[0] == pytest.approx(steps[1], rel=0.05)
    assert steps[0] > 1.1  # for a four-hundredth more of work


def test_nothing_is_faster_than_what_was_measured(model):
    for shape in ((1, 2**20, 2**15, 2**15), (1, 4096, 4096, 4096), (7, 333, 777, 999)):
        at = place("product", "nt", "bf16", shape)
        assert at.flops / model.seconds(at) <= CEILING["bf16"]
    assert model.seconds(place("elementwise", "add", "fp32", (16,))) >= 0.9 * FLOOR
    assert model.seconds(place("elementwise", "add", "fp32", (2**40,))) >= 2**40 / MEMORY


def test_one_small_point_does_not_make_large_ones_impossible(file):
    """It is faster than whole tiles would be, and slower than the ceiling; neither is true of large products."""
    small = Curve("product", "nt", "bf16", (point((1, 8, 65536, 8), 2.1e-6),))
    model = Model(replace(file, curves=(small,)))
    at = place("product", "nt", "bf16", (1, 8192, 8192, 8192))
    assert model.seconds(at) == pytest.approx(at.flops / CEILING["bf16"])


def test_a_device_like_it_is_scaled_and_its_error_is_wider(file, model):
    half = replace(
        PAPER, name="Half", flops={p: rate / 2 for p, rate in PAPER.flops.items()}, memory_rate=2e12, processors=50
    )
    scaled = Model(file, half)
    assert scaled.scaled
    # All rates that are there are half as large, of arithmetic as of memory.
    assert scaled.error == pytest.approx(model.error + SCALED_ERROR + APART_ERROR * log(2))
    for at in (place("product", "nt", "bf16", (1, 8192, 4096, 4096)), place("elementwise", "add", "fp32", (2**30,))):
        assert scaled.seconds(at) == pytest.approx(2 * model.seconds(at), rel=0.1)
    # With half the processors, half the rows take as long.
    whole, part = (place("product", "nt", "bf16", (1, rows, 1024, 1024)) for rows in (256, 128))
    assert scaled.seconds(part) == pytest.approx(model.seconds(whole), rel=0.15)
    # The same name with other rates is another device; measured rates of it are not.
    assert Model(file, replace(PAPER, memory_rate=1e12)).scaled
    assert not Model(file, replace(PAPER, memory_rate=3e12, sources={"memory_rate": "measured: copy"})).scaled


@given(st.floats(0.05, 20), st.floats(0.05, 20), st.floats(1, 4))
def test_the_distance_by_which_an_error_is_wider(file, arithmetic, memory, further):
    """More for every factor between its rates and those that were measured, whether they are higher or lower."""

    def distance(arithmetic, memory):
        flops = {precision: rate * arithmetic for precision, rate in PAPER.flops.items()}
        return Model(file, replace(PAPER, name="Other", flops=flops, memory_rate=PAPER.memory_rate * memory)).distance

    near, far = distance(arithmetic, memory), distance(arithmetic * further ** copysign(1, arithmetic - 1), memory)
    assert far - near == pytest.approx(log(further) / 2, abs=1e-9)
    assert near == pytest.approx(distance(1 / arithmetic, memory)) == pytest.approx(distance(arithmetic, 1 / memory))


def test_the_error_that_is_told_covers_what_published_tables_showed():
    """Medians of rows that were predicted by the H200's file, and how far all of a table's were off at once."""
    data = json.loads((Path(__file__).parents[2] / "benchmarks/data/published.json").read_text())
    steps = data["vtrain_single_node_subset.csv"]["no labelled row, scaled from the H200"]["median"]
    networks = data["timm_train_rtx3090_subset.csv"]
    shown = {
        "A100-80": steps,
        "RTX3090": max(abs(networks[f"{layout}, torch 1.12"]["constant"] - 1) for layout in ("nchw", "nhwc")),
    }
    for name, error in shown.items():
        told = known.model_of(device(name)).error
        assert error <= told <= 1.5 * error, name
    # The nearer, the better: an H100 computes as an H200 does.
    assert (
        known.model_of(device("H100-SXM")).error
        < known.model_of(device("B200")).error
        < known.model_of(device("A100-80")).error
    )


def test_what_was_not_measured_is_stood_in_for_and_named(file):
    few = replace(file, curves=tuple(c for c in file.curves if c.family in ("elementwise", "product")))
    model = Model(few)
    conv = place("convolution", "forward", "bf16", (8, 64, 64, 784, 9, 1, 1))
    assert model.seconds(conv) > 0
    assert model.seconds(place("pooling", "max", "fp32", (2**20,))) > 0
    assert model.stood_in == {
        "convolution.forward.bf16": "the roofline alone",
        "pooling.max.fp32": "elementwise.add.fp32",
    }
    words = speed_of(PAPER, "fp32", model).words
    assert "; not measured, so taken: convolution.forward.bf16 as the roofline alone, pooling.max.fp32 as" in words


def test_every_operator_of_a_network_has_a_place():
    linear = Op("addmm", 2.0 * 8 * 16 * 32, 0, 0, (8, 16, 32), precision="bf16", layout="nt")
    assert places(linear, "fp32")[0].shape == (1, 8, 16, 32)
    assert places(replace(linear, shape=(8, 16, 33)), "fp32")[0].variant == "nt-odd"
    assert places(replace(linear, flops=4 * linear.flops, name="bmm"), "fp32")[0].shape == (4, 8, 16, 32)
    conv = Op("convolution_backward", 2 * 2.0 * 4 * 16 * 9 * 8 * 8, 0, 0, (4, 8, 8, 16, 9, 1, 1), precision="fp32")
    assert [at.variant for at in places(conv, "tf32")] == ["input", "weight"]
    assert [at.variant for at in places(replace(conv, flops=conv.flops / 2), "tf32")] == ["weight"]
    table = Op("embedding", 0.0, 4 * 10**8, 4096, precision="fp32")
    assert places(table, "fp32")[0].bytes == 2 * 4096  # not the whole table
    assert places(Op("native_batch_norm_backward", 0.0, 8, 8, precision="bf16"), "tf32")[0].variant == (
        "batch_norm_backward"
    )
    loss = places(Op("nll_loss_backward", 0.0, 10**9, 10**8, precision="bf16"), "fp32")[0]
    assert (loss.family, loss.bytes) == ("elementwise", 10**8)  # what it is given is not read


@pytest.mark.parametrize("family", VARIANTS)
def test_what_is_measured_at_a_place_is_what_is_looked_up_there(family):
    """The operator that is called for a place has that place, and its bytes."""
    shapes = {"product": (1, 64, 96, 128), "convolution": (2, 8, 16, 64, 9, 1, 1), "attention": (16, 64, 64, 32)}
    for variant in VARIANTS[family]:
        if variant in ("in", "out"):
            continue  # they need a GPU
        shape = shapes.get(family, (2**20, 64, 16 if variant.startswith("batch") else 1)[: DIMENSIONS[family]])
        shape = (1, 65, 97, 129) if variant.endswith("odd") else (2**20, 4) if family == "optimizer" else shape
        at = place(family, variant, "bf16" if variant.endswith("odd") else "fp32", shape)
        call = kernels.work(at, torch.device("cpu"), 0)
        with Recorder(gpu=False) as recorder:
            call()
        found = max((p for op in recorder.ops for p in places(op, "fp32")), key=lambda p: p.bytes)
        unseen = {"input": "weight", "cast": "contiguous", "cast-up": "contiguous"}  # by name they are these
        assert (found.family, found.variant) == (family, unseen.get(variant, variant))
        assert found.bytes == pytest.approx(at.bytes, rel=0.15 if variant == "fused" else 0.05)
        if family in ("normalisation", "gather", "reduction"):
            assert found.shape[1:] == at.shape[1:]


# -- estimates --------------------------------------------------------------------------------------------------------


def test_estimates_use_a_file_where_there_is_one(model):
    profile = estimate(models.skip(), PAPER, samples=[4], model=model)
    assert "from its device file (measured 2026-01-02, torch 2.11.0): operators within" in profile.provenance.machine
    speed = speed_of(PAPER, "fp32", model)
    product, other = Op("mm", 2.0 * 512**3, 0, 0, (512, 512, 512), precision="fp32", layout="nn"), Op("mul", 0.0, 4, 4)
    assert run_seconds(product, speed) == model.seconds(place("product", "nn", "fp32", (1, 512, 512, 512)))
    assert issue_seconds([product, product, other], "forward", speed) == pytest.approx(2.5e-5)
    assert issue_seconds([product, other, Op("max_pool2d", 0.0, 4, 4)], "backward", speed) == pytest.approx(5e-5)
    # Convolutions of 32-bit numbers run in tf32 unless torch is told otherwise.
    conv = Op("convolution", 1.0, 0, 0, (8, 64, 64, 784, 9, 1, 1), precision="fp32")
    assert run_seconds(conv, speed) == model.seconds(place("convolution", "forward", "tf32", conv.shape))


def test_an_update_takes_its_bytes_however_it_is_listed(model):
    speed = speed_of(PAPER, "fp32", model)
    big, tensors, kinds = 2**26, 8, 3
    apart = [Op("add_", 0.0, 2 * big, big, precision="fp32")] * (tensors * kinds)
    at_once = [Op("_foreach_add_", 0.0, 2 * big * tensors, big * tensors, precision="fp32")] * kinds
    moved = 3 * big * tensors * kinds
    for ops in (apart, at_once):
        run, issue_s = update_seconds(ops, tensors, speed)
        assert moved / MEMORY <= run <= 1.2 * moved / MEMORY
        assert issue_s == pytest.approx(tensors * kinds * 1e-6 + kinds * 1e-5)
    # Four blocks share one step: its kernels start once, not once for each.
    whole, part = ([Op("_foreach_add_", 0.0, 2 * size, size)] * kinds for size in (2**18, 2**16))
    shared = update_seconds(part, 2, speed, (3 * kinds * 2**18, 8))
    assert [4 * lane for lane in shared] == pytest.approx(update_seconds(whole, 8, speed))
    assert shared[0] < 0.5 * update_seconds(part, 2, speed)[0]
    assert update_seconds([], 0, speed) == (0.0, 0.0)


def test_a_file_is_found_by_name_or_by_likeness(file, monkeypatch, tmp_path):
    monkeypatch.setattr(known, "packaged", lambda: ())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert known.model_of(PAPER, measured_here=True) is None
    file.save(known.place_of("Paper"))
    assert known.model_of(PAPER) is None  # ranks that plan by themselves do not look at one machine's files
    assert not known.model_of(PAPER, measured_here=True).scaled
    like = known.model_of(device("A100-80"), measured_here=True)
    assert like.scaled
    assert "scaled from the device file of Paper by data sheets" in speed_of(device("A100-80"), "fp32", like).words
    assert known.model_of(device("TitanRTX"), measured_here=True) is None  # it has no tf32: another kind of device
    assert known.model_of(device("cpu"), measured_here=True) is None


def test_files_of_the_package_are_of_devices_of_the_catalogue():
    assert {file.device for file in known.packaged()} >= {"H200"}
    for file in known.packaged():
        assert known.model_of(device(file.device)).file is file
        assert not known.model_of(device(file.device)).scaled
        assert file.whole
        assert not re.search(r"/(root|home|tmp|work)\b", file.command + file.machine)


def test_the_file_of_the_h200_is_near_what_it_was_not_made_of():
    """Shapes that were held back, and every fiftieth point of each curve when the others are asked."""
    file = next(file for file in known.packaged() if file.device == "H200")
    model = Model(file)
    assert sum(len(check.points) for check in file.checks) >= 100
    assert model.error < 0.08
    for family, most in (("product", 0.06), ("convolution", 0.12), ("attention", 0.1)):  # of the last, 30 shapes
        assert model.error_of(family) < most
    kept, out = [], []
    for curve in file.curves:
        left = curve.points[25::50]
        kept.append(replace(curve, points=tuple(point for point in curve.points if point not in left)))
        out += [replace(curve, points=left)] if left else []
    assert sum(len(curve.points) for curve in out) > 100
    assert Model(replace(file, curves=tuple(kept), checks=tuple(out))).error < 0.1


# -- measuring --------------------------------------------------------------------------------------------------------


def test_measuring_a_cpu_in_seconds(monkeypatch, tmp_path):
    """With a family that fails: what there is, is there, and the rest is named."""

    def broken(at, make):
        raise RuntimeError("no kernel image\nis available")

    monkeypatch.setitem(kernels._MAKERS, "pooling", broken)
    said = []
    path = tmp_path / "cpu.json"
    found = measure("cpu", 1.0, path, quick=True, progress=lambda what, share: said.append(share), command="test")
    assert DeviceFile.load(path) == found
    assert {curve.family for curve in found.curves} == set(VARIANTS) - {"pooling"}
    assert all("RuntimeError: no kernel image" in error for error in found.missing.values())
    assert {name.split(".")[0] for name in found.missing} == {"pooling"}
    assert found.skipped > 0  # those of the family that fails
    assert found.seconds < 60
    assert (found.device, found.command, found.peak, found.host) == ("cpu", "test", {}, {})
    assert found.versions.keys() >= {"torch", "python", "trainplan"}
    assert found.noise >= 0
    assert said == sorted(said)
    assert Model(found).seconds(place("product", "nt", "fp32", (1, 256, 256, 256))) > 0


def test_numbers_that_lie_apart_are_found_one_by_one():
    """By numbers, not by bytes; what norms and convolutions copy first comes on top."""
    add = Op("add", 0.0, 2 * 2**20, 2**20, precision="bf16", elements=2**19)
    assert [(at.family, at.bytes) for at in places(add, "fp32")] == [("elementwise", 3 * 2**20)]
    for layout, variant in (("s", "strided"), ("t", "transposed")):
        [at] = places(replace(add, layout=layout), "fp32")
        assert (at.family, at.variant, at.bytes) == ("copy", variant, 8 * 2**19)
    norm = Op("native_layer_norm_backward", 0.0, 8, 8, (64,), precision="fp32", layout="ts", elements=100)
    assert [at.variant for at in places(norm, "fp32")] == ["transposed", "strided", "layer_norm_backward"]
    image = Op("convolution", 1.0, 8, 8, (2, 3, 4, 25, 9, 1, 1), precision="fp32", layout="tb")
    assert places(image, "fp32")[0].bytes == 8 * 2 * 3 * 25
    assert [at.variant for at in places(image, "fp32")] == ["transposed", "forward"]


def test_the_bias_of_a_convolution_is_issued_beside_it():
    speed = speed_of(device("H200"), "fp32", known.model_of(device("H200")))
    plain = Op("convolution_backward", 1.0, 8, 8, (2, 3, 4, 25, 9, 1, 1), precision="fp32")
    host = speed.model.file.host
    more = issue_seconds([replace(plain, layout="b")], "backward", speed) - issue_seconds([plain], "backward", speed)
    assert more == pytest.approx(host["reduction"].backward_s)


def test_copies_in_pieces_that_were_not_measured_are_between_the_others():
    model = Model(replace(paper(), curves=tuple(curve for curve in paper().curves if curve.variant != "strided")))
    ways = [model.seconds(place("copy", way, "fp32", (2**26,))) for way in ("contiguous", "strided", "transposed")]
    assert ways == sorted(ways)
    assert "copy.strided.fp32" in model.stood_in


def test_what_cannot_be_measured_is_refused(monkeypatch):
    monkeypatch.setattr("trainplan.profile.device.measure.work", None)
    with pytest.raises(RunError, match=r"no product or no copy could be measured \(.*TypeError"):
        measure("cpu", 1.0, quick=True)
    with pytest.raises(InputError, match=r"0\.05 to 120 minutes"):
        measure("cpu", 0.0)
    if not torch.cuda.is_available():
        with pytest.raises(InputError, match="no CUDA device"):
            measure("cuda:0", 1.0)


def test_a_device_is_slowed_by_what_it_does_on_average():
    hot = Model(replace(paper(), sustained={"fp32": 0.8}, warms_from={"fp32": 0.3}))
    assert hot.slowed("fp32", 1.0) == pytest.approx(0.25)
    assert hot.slowed("fp32", 0.3) == hot.slowed("fp32", 0.1) == 0.0
    assert hot.slowed("fp32", 0.65) == pytest.approx(0.125)
    assert hot.slowed("bf16", 1.0) == 0.0  # not measured
    speed = speed_of(PAPER, "fp32", hot)
    product = Op("mm", 2.0 * 4096**3, 8 * 4096**2, 4 * 4096**2, (4096, 4096, 4096), precision="fp32", layout="nn")
    copies = [Op("add", 0.0, 2**29, 2**28, precision="fp32")] * 400
    alone, rest = run_seconds(product, speed), sum(run_seconds(op, speed) for op in copies)
    use = product.flops / alone / hot.ceiling("fp32")
    assert 0.5 < use < 0.8
    assert pass_seconds([product], speed) == pytest.approx(alone * (1 + use * hot.slowed("fp32", use)))
    assert pass_seconds([product, *copies], speed) == pytest.approx(alone + rest)  # it is cool most of the time


@pytest.mark.gpu
def test_measuring_a_gpu(tmp_path):
    found = measure("cuda:0", 1.0, tmp_path / "gpu.json", quick=True)
    assert found.missing == {}
    assert set(found.host) >= {"product", "convolution", "attention", "elementwise", "normalisation"}
    assert all(0 < one.forward_s < 1e-3 and 0 < one.backward_s < 1e-3 for one in found.host.values())
    assert {curve.family for curve in found.curves} == set(VARIANTS)
    assert found.host_rounds >= 1
    assert 0 <= found.host_spread < 1
    assert found.processors > 10
    assert 0 < found.floor_s < 2e-5
    assert found.update_tensor_s > 0


@pytest.mark.gpu
def test_copies_take_longer_the_more_their_numbers_are_apart_on_a_gpu():
    here = torch.device("cuda", 0)
    clock, taken = clock_of(here), {}
    for variant in ("contiguous", "strided", "transposed"):
        call = kernels.work(place("copy", variant, "fp32", (2**28,)), here, 2**25)
        for _ in range(3):
            taken[variant] = clock.time(variant, call).run_s
    assert taken["contiguous"] < 0.9 * taken["strided"] < 0.9 * taken["transposed"]


@pytest.mark.gpu
def test_precisions_are_told_apart_on_a_gpu():
    here = torch.device("cuda", 0)
    clock = clock_of(here)
    taken = {}
    with kernels.arithmetic(here) as choose:
        for precision in ("fp32", "tf32", "bf16"):
            choose(precision)
            for family, variant, shape in (
                ("product", "nt", (1, 4096, 4096, 4096)), ("convolution", "forward", (64, 256, 256, 784, 9, 1, 1)),
            ):  # fmt: skip
                call = kernels.work(place(family, variant, precision, shape), here, 2**25)
                for _ in range(3):  # the first one tells the clock how long issuing takes
                    taken[family, precision] = clock.time((family, precision), call).run_s
    for family in ("product", "convolution"):
        assert taken[family, "fp32"] > 1.5 * taken[family, "tf32"] > 1.2 * taken[family, "bf16"]
