"""A device of a cluster that names its device file: its numbers, and estimates by that file and no other."""

import json
from dataclasses import replace
from functools import partial

import pytest

import trainplan
from trainplan.cluster import catalogue
from trainplan.cluster.cluster import Cluster
from trainplan.cluster.measured import measured_device
from trainplan.cluster.overrides import with_overrides
from trainplan.cluster.parse import cluster
from trainplan.cluster.yaml_form import load_yaml
from trainplan.cluster.yaml_write import save_yaml
from trainplan.errors import InputError
from trainplan.profile.device import known
from trainplan.profile.device.model import Model
from trainplan.profile.roofline import speed_of

from .device_files import CEILING, MEMORY, PAPER
from .device_files import paper as checked_paper

# How good a file is takes its time to tell; one point is there, which is near the ceiling in fp32.
FEW = tuple(c for c in checked_paper().checks if c.name == "product.nt.fp32")
paper = partial(checked_paper, checks=FEW)
GPT = "gpt:layers=1,hidden=64,heads=2,seq=16,vocab=64,batch=2"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Files of a part of an H200, of a device that the catalogue has not, and of a core."""
    found = tmp_path_factory.mktemp("files")
    part = "none, a slice of 50 % under MPS"
    paper(device="H200", machine=part, processors=66).save(found / "half.json")
    paper(peak={}, memory_peak=0.0).save(found / "other.json")
    paper(device="cpu", processors=1, host={}, peak={}, memory_peak=0.0).save(found / "core.json")
    return found


def test_what_a_cluster_knows_of_it(folder, monkeypatch):
    there, whole = cluster(f"2x4x{folder / 'half.json'}+eth100"), catalogue.device("H200")
    device = there.device(0)
    assert (there.world, len(there.nodes), there.backend, there.name) == (8, 2, "nccl", "2x4xhalf.json+eth100")
    assert (device.name, device.processors, device.capability) == ("half", 66, (9, 0))
    assert (device.memory_bytes, device.host_rate) == (whole.memory_bytes, whole.host_rate)
    assert (device.flops, device.memory_rate) == (PAPER.flops, PAPER.memory_rate)  # data sheet's
    assert device.sources["flops.bf16"] == "data sheet, in device file half.json"
    monkeypatch.chdir(folder)
    assert cluster("2x4xhalf.json+eth100") == there
    assert cluster("half.json").nodes == cluster("1xhalf.json").nodes
    best = measured_device("other.json")
    assert (best.flops, best.memory_rate) == ({p: CEILING[p] for p in ("fp32", "tf32", "bf16")}, MEMORY)
    assert best.sources["memory_rate"] == "measured: device file other.json"
    core = cluster("2xcore.json")
    assert (core.backend, core.device(0).name) == ("gloo", "cpu")


def test_estimates_are_by_this_file_and_no_other(folder, monkeypatch):
    monkeypatch.setattr(known, "packaged", lambda: pytest.fail("another file was looked at"))
    monkeypatch.setattr(known, "own", lambda: pytest.fail("another file was looked at"))
    found = trainplan.predict(GPT, "dp=2", f"2x{folder / 'half.json'}")
    assert "estimated for half from its device file (measured 2026-01-02" in str(found)
    device = cluster(f"1x{folder / 'half.json'}").device(0)
    model = known.model_of(device)
    assert (model.file, model.scaled) == (paper(device="H200", machine=model.file.machine, processors=66), False)
    assert known.model_of(device) is model  # a search asks often
    slower = known.model_of(replace(device, memory_rate=device.memory_rate / 2))
    assert (slower.scaled, slower.memory_rate) == (True, MEMORY / 2)
    core = trainplan.predict(GPT, "dp=1", f"1x{folder / 'core.json'}")  # which is here, and is not measured
    assert "estimated for cpu from its device file" in str(core)


def test_a_file_that_is_measured_again_is_read_again(folder, tmp_path):
    path = tmp_path / "own.json"
    paper(device="H200", processors=132).save(path)
    device = cluster(f"1x{path}").device(0)
    before = known.model_of(device)
    paper(device="H200", processors=132, made="2027-01-01T00:00:00+00:00").save(path)
    assert known.model_of(device).file.made != before.file.made


def test_in_a_cluster_file(folder):
    path = folder / "lab.yaml"
    path.write_text(
        """
nodes:
- devices: [{file: half.json, memory: 70GiB, count: 2}, {file: other.json, memory: 8GiB, name: Other}, H200]
  inside: pcie5
""",
        encoding="utf-8",
    )
    there = load_yaml(path)
    half, _, other, whole = there.nodes[0].devices
    assert (half.memory_bytes, half.sources["memory"], half.file) == (70 * 2**30, "given", str(folder / "half.json"))
    assert (other.name, other.memory_bytes) == ("Other", 8 * 2**30)
    assert (whole.name, whole.file) == ("H200", "")
    changed = with_overrides(there, {"memory_rate": "100GB/s"})
    for one in (there, changed):
        save_yaml(one, folder / "again.yaml")
        assert load_yaml(folder / "again.yaml") == replace(one, source=load_yaml(folder / "again.yaml").source)
        one.save(folder / "again.json")
        assert Cluster.load(folder / "again.json") == one
    path.write_text("nodes: [{devices: [{file: half.json, device: A100-40}]}]", encoding="utf-8")
    like = load_yaml(path).device(0)
    assert (like.memory_bytes, like.processors) == (catalogue.device("A100-40").memory_bytes, 66)


def test_what_cannot_be_is_refused(folder, monkeypatch):
    monkeypatch.chdir(folder)
    with pytest.raises(
        InputError, match=r"2xother.json: Paper is not in the catalogue, .*memory.*Try a cluster file.*"
    ):
        cluster("2xother.json")
    with pytest.raises(InputError, match=r"nosuch.json: it cannot be read"):
        cluster("4xnosuch.json")
    with pytest.raises(InputError, match="a DGX-H200 has room for 8 H200, not 9"):
        cluster("2x9xhalf.json")
    (folder / "bad.yaml").write_text("nodes: [{devices: [{file: other.json}]}]", encoding="utf-8")
    with pytest.raises(InputError, match=r"bad.yaml: nodes\[0\].devices\[0\]: Paper is not in the catalogue"):
        cluster("bad.yaml")
    cluster("H200").save(folder / "whole.json")
    with pytest.raises(InputError, match="it is a trainplan cluster, and a device was expected"):
        cluster("4xwhole.json")
    data = json.loads((folder / "half.json").read_text(encoding="utf-8"))
    data["data"]["ceiling"]["fp32"] = -1.0
    (folder / "broken.json").write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(InputError, match=r"broken.json.ceiling.fp32: -1.0: it must be above zero"):
        cluster("4xbroken.json")


# -- devices without numbers in 32 bits -------------------------------------------------------------------------------


def test_a_file_without_fp32_has_a_roofline_in_bf16(folder, tmp_path):
    path = tmp_path / "narrow.json"
    every = paper()
    curves = tuple(curve for curve in every.curves if curve.family != "product" or curve.precision == "bf16")
    paper(curves=curves, ceiling={"bf16": CEILING["bf16"]}, peak={}).save(path)
    found = trainplan.roofline(GPT, device=str(path), batch=2, precision="bf16").bounds
    assert {row.peak for row in found.rows} == {CEILING["bf16"]}
    with pytest.raises(InputError, match=r"in fp32 for narrow: its peak in fp32 is not known, only in bf16"):
        trainplan.roofline(GPT, device=str(path), batch=2)


def test_a_device_of_a_cluster_without_fp32_is_told_what_is_missing():
    device = replace(PAPER, name="Narrow", flops={"bf16": 1e14})
    for precision in ("fp32", "bf16"):  # one is not the way out of the other
        with pytest.raises(InputError, match=r"its peak in fp32 is not known, only in bf16.*Try giving it"):
            speed_of(device, precision)


# -- what is traced ---------------------------------------------------------------------------------------------------


def test_a_roofline_is_traced_as_the_device_and_its_torch_would_run_it(folder, monkeypatch):
    asked = []
    import trainplan.profile.estimate as estimate

    traced = estimate.traced

    def spied(*args, **options):
        asked.append((options["capability"], options["version"]))
        return traced(*args, **options)

    monkeypatch.setattr(estimate, "traced", spied)
    for device in ("A100-80", str(folder / "half.json")):
        trainplan.roofline(GPT, device=device, batch=2)
    file = Model(known.packaged()[0]).file
    assert asked == [((8, 0), file.versions["torch"]), ((9, 0), "2.11.0")]


# -- files that this user has measured --------------------------------------------------------------------------------


def test_a_broken_file_of_the_user_is_named_and_passed_over(folder, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    known.place_of("H200").parent.mkdir(parents=True)
    known.place_of("Aaa").write_text('{"trainplan": "dev', encoding="utf-8")
    paper().save(known.place_of("Paper"))
    with pytest.warns(UserWarning, match=r"passed over: .*Aaa.json: broken JSON at line 1"):
        assert known.model_of(PAPER, measured_here=True).file.device == "Paper"
    with pytest.warns(UserWarning, match="Aaa.json"):
        assert "H200" in str(trainplan.device("show", "H200"))
