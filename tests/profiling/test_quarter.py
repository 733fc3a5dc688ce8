"""What files of devices say: of whole models on a quarter of an H200, against profiles as measured on such a slice; and
of how good they are themselves."""

from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

from trainplan.cluster.catalogue import device
from trainplan.files import to_json
from trainplan.profile.device.file import DeviceFile, read
from trainplan.profile.device.known import packaged
from trainplan.profile.device.model import Model, looked_up
from trainplan.profile.estimate import estimate
from trainplan.profile.profile import Profile
from trainplan.workload.load import load

DATA = Path(__file__).parents[2] / "benchmarks" / "data"
GPT = "gpt:layers=6,hidden=512,heads=8,seq=256,vocab=8192"


@pytest.mark.parametrize(
    ("name", "measured", "middle", "worst"),
    [("vgg11:imagenet", "exchanges-gpu/vgg11", 0.09, 0.18), (GPT, "exchanges-gpu-gpt/gpt", 0.05, 0.1)],
)
def test_passes_of_models_on_a_slice_are_estimated_from_its_file(name, measured, middle, worst):
    model = Model(DeviceFile.load(DATA / "devices" / "H200-quarter.json"))
    there = Profile.load(DATA / f"{measured}.profile.json")
    made = estimate(load(name), device("H200"), samples=there.samples, precision="fp32", model=model)
    passes = [(kind, size) for size in there.samples for kind in ("forward_s", "backward_s")]
    ratios = [made.total(k, 0, len(made.blocks), n) / there.total(k, 0, len(there.blocks), n) for k, n in passes]
    assert median(abs(ratio - 1) for ratio in ratios) < middle
    assert max(abs(ratio - 1) for ratio in ratios) < worst
    whole = estimate(load(name), device("H200"), samples=there.samples, precision="fp32")  # of all processors
    largest = there.samples[-1]
    assert made.total("forward_s", 0, len(made.blocks), largest) > 2 * whole.total(
        "forward_s", 0, len(whole.blocks), largest
    )


@pytest.mark.parametrize("file", [*packaged(), DeviceFile.load(DATA / "devices" / "H200-quarter.json")])
def test_what_a_file_knows_of_its_model_is_what_the_model_finds(file):
    """If this fails, the model of devices has changed: `looked_up(file).save(path)`."""
    assert read(to_json(file), file.device) == file  # which looks at every number, as it does of anybody's file
    assert looked_up(file).found == pytest.approx(file.found)
    fewer = replace(file, checks=file.checks[:3])
    assert Model(fewer).error != pytest.approx(Model(file).error)  # of other points it is found anew
