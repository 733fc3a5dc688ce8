"""MFU: each kind of arithmetic over the peak of the precision that it ran in, or a reason why it is not given."""

from dataclasses import replace
from pathlib import Path

import pytest

from synthetic import chain
from tests.predict.places import cluster
from trainplan.cluster import catalogue
from trainplan.cluster.parse import cluster as parse
from trainplan.plan.plan import plan
from trainplan.predict.predict import predict
from trainplan.predict.utilisation import utilisation
from trainplan.profile.profile import Profile

QUARTER = Path(__file__).parents[2] / "benchmarks/data/devices/H200-quarter.json"


def where(**flops: float):
    """Two devices with these peaks."""
    found = cluster(devices=2, rate=1e12)
    device = replace(found.nodes[0].devices[0], flops=flops)
    return replace(found, nodes=(replace(found.nodes[0], devices=(device,) * 2),))


def mixed(products_in: str = "fp32", convolutions_in: str = "tf32") -> Profile:
    """Four blocks of 1 MFLOP a sample, three quarters of it in convolutions."""
    profile = chain(4, products_in=products_in, convolutions_in=convolutions_in)
    return replace(profile, blocks=tuple(replace(block, convolution_flops=0.75e6) for block in profile.blocks))


def test_products_alone() -> None:
    found = predict(plan(dp=2, blocks=4), chain(4), where(fp32=1e9), batch=8)
    assert found.mfu == pytest.approx(3 * 4e6 * 8 / (found.step_s * 2e9))
    assert found.mfu_note == (
        "MFU = 3 × forward FLOPs of the batch (recomputation not counted) / (step × devices × 1.00 GFLOP/s fp32 dense)"
    )
    assert found.to_json()["mfu_note"] == found.mfu_note


def test_convolutions_have_a_peak_of_their_own() -> None:
    """1 MFLOP of products at 1 GFLOP/s and 3 of convolutions at 8 take 1.375 ms; three times that for a step."""
    found = utilisation(mixed(), where(fp32=1e9, tf32=8e9), 2, batch=8, step_s=0.1)
    assert found.share == pytest.approx(3 * 8 * 1.375e-3 / (0.1 * 2))
    assert "1.00 GFLOP/s fp32 dense for products (25.0 % of them)" in found.note
    assert "8.00 GFLOP/s tf32 dense for convolutions (75.0 % of them)" in found.note
    # By the fp32 peak alone it would be more than all.
    assert utilisation(mixed(convolutions_in="fp32"), where(fp32=1e9), 2, 8, 0.04).share is None
    assert utilisation(mixed(), where(fp32=1e9, tf32=8e9), 2, 8, 0.04).share == pytest.approx(0.4125)


def test_uneven_devices() -> None:
    """One device could do its part twice as fast as the other."""
    even = where(fp32=1e9)
    fast = replace(even.nodes[0].devices[0], flops={"fp32": 2e9})
    uneven = replace(even, nodes=(replace(even.nodes[0], devices=(even.nodes[0].devices[0], fast)),))
    assert utilisation(chain(4), uneven, 2, 8, 0.1).share == pytest.approx(3 * 4e6 * 8 / (0.1 * 3e9))


@pytest.mark.parametrize(
    ("profile", "peaks", "why"),
    [
        (mixed("", ""), {"fp32": 1e9}, "the profile does not say in which precision products and convolutions ran"),
        (mixed("fp32", ""), {"fp32": 1e9}, "the profile does not say in which precision convolutions ran"),
        (mixed(), {"fp32": 1e9}, "the peak of cpu in tf32 is not known"),
        (chain(4), {}, "the peak of cpu in fp32 is not known"),
        (chain(4), {"fp32": 1e6}, "it would be 4800.0 % of 0.00100 GFLOP/s fp32 dense: what ran needs fewer FLOPs"),
        (replace(chain(1), blocks=(replace(chain(1).blocks[0], flops=0.0),)), {"fp32": 1e9}, "counts no FLOPs"),
    ],
)
def test_what_is_not_known_is_not_guessed(profile: Profile, peaks: dict[str, float], why: str) -> None:
    found = utilisation(profile, where(**peaks), 2, batch=8, step_s=1.0)
    assert found.share is None
    assert found.note.startswith("MFU is not given: ")
    assert why in found.note


def test_the_best_that_was_measured_is_no_peak() -> None:
    """Of a GPU that was probed, the data sheet of its name is; a quarter of its processors has a quarter of that."""
    core = parse("2xcpu")
    found = utilisation(chain(4), core, 2, batch=8, step_s=1.0)
    assert found.share is None
    assert "the peak of cpu in fp32 is not known; 100 GFLOP/s is the best that was measured of it" in found.note
    sheet = catalogue.device("H200")
    probed = replace(sheet, flops={"fp32": 50e12}, sources={"flops.fp32": "measured: products"}, processors=132)
    for processors, share in ((132, 1.0), (33, 0.25), (0, 1.0)):
        assert catalogue.peak(replace(probed, processors=processors), "fp32") == share * sheet.flops["fp32"]
    assert catalogue.peak(replace(probed, name="something else"), "fp32") is None


def test_a_slice_is_used_by_its_share_of_the_peak() -> None:
    """Of an H200 that was measured with 32 of its 132 processors, whatever the file calls its peak."""
    there, whole = parse(f"1x{QUARTER}"), catalogue.device("H200")
    for precision, peak in whole.flops.items():
        assert catalogue.peak(there.device(0), precision) == pytest.approx(peak * 32 / 132)
    found = utilisation(chain(4), there, 1, batch=8, step_s=1e-3)
    beside = utilisation(chain(4), parse("1xH200"), 1, batch=8, step_s=1e-3)
    assert found.share == pytest.approx((beside.share or 0.0) * 132 / 32)
    assert "16.2 TFLOP/s fp32 dense of 32 of 132 processors" in found.note
