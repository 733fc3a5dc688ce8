"""The study of data movement: shares of a step by hand, what the command answers, and Xu 2021, table 2."""

import json
from functools import cache
from pathlib import Path

import pytest

from trainplan import study
from trainplan.errors import InputError
from trainplan.program.timeline import Event, Timeline
from trainplan.report.movement import Moved, Movement, shares
from trainplan.studies import NETWORKS


def timeline(*events: tuple[str, str, int, float, float]) -> Timeline:
    """Two equal steps of these operations, one after the other."""
    long = max(end for *_, end in events)
    made = [
        Event(name if step == 0 else f"{name}@{step}", kind, rank, start + step * long, end + step * long, 0)
        for step in (0, 1)
        for name, kind, rank, start, end in events
    ]
    return Timeline("predicted", 2, 2, tuple(made))


def test_shares_by_hand() -> None:
    """Of the first device: 1 s until the batch is there, 1 s until half of it has gone on, 2 s of weights, 4 s of
    compute, 2 s until the gradients are there. What the second one waits for does not count."""
    found = shares(
        timeline(
            ("0LOAD", "LOAD", 0, 0.0, 1.0), ("0SEND_INPUT0", "SEND_INPUT", 0, 1.0, 2.0),
            ("0SEND_W0", "SEND_W", 0, 2.0, 4.0), ("0F0", "F", 0, 4.0, 6.0), ("0B0", "B", 0, 6.0, 8.0),
            ("0RECV_G0", "RECV_G", 0, 9.0, 10.0), ("0RECV_W0^1", "RECV_W", 1, 3.0, 4.0), ("0F0^1", "F", 1, 4.0, 9.0),
        )
    )  # fmt: skip
    assert found == pytest.approx((10.0, 0.2, 0.4))


@pytest.mark.system("data-movement", "P")
def test_the_command(tmp_path: Path) -> None:
    """Inputs and weights take more of a step on more devices; loaded ahead, inputs take none."""
    file, picture = tmp_path / "movement.json", tmp_path / "movement.svg"
    answer = study(
        "data-movement", workers="1,3", models="vgg11:mnist,bn=0", batch=64, output=str(file), picture=[str(picture)]
    )
    assert isinstance(answer, Movement)
    rows = {(row.devices, row.preload): row for row in answer.found}
    assert {row.how for row in answer.found} == {"predicted"}
    assert rows[3, "off"].batch == 63  # equal parts
    assert rows[1, "off"].model == rows[1, "on"].model == 0
    assert rows[3, "off"].input > rows[1, "off"].input > 0.001
    assert rows[3, "off"].model > 0.05
    assert rows[3, "on"].input == pytest.approx(0, abs=1e-6)
    assert rows[3, "on"].step_s < rows[3, "off"].step_s
    assert len(json.loads(file.read_text())["data"]["rows"]) == 4
    assert "<svg" in picture.read_text()


def test_what_does_not_fit_has_a_cross() -> None:
    rows = tuple(Moved("net", count, "off", "predicted", 8, count > 1, 0.1, 0.25, 0.1) for count in (1, 2))
    one, two = str(Movement(rows, "GTX1080Ti", "", "")).splitlines()[3:5]
    assert one.split()[-4:] == ["×"] * 4
    assert two.split()[-4:] == ["100", "25.00", "10.00", "35.00"]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ({"device": "GTX1080"}, "GTX1080Ti"),
        ({"steps": 8}, "this machine has no GTX1080Ti"),
        ({"device": "cpu", "steps": 2}, "warm up"),
        ({"batch": 3}, "want a sample each"),
        ({"workers": "one"}, "whole"),
        ({"picture": ["a.txt"]}, "pictures end in"),
        # It is measured, at the rate that its memory has; and refused before that takes minutes.
        ({"device": "cpu", "set": ["memory_rate=5GB/s"]}, "measured here, and would not change with it"),
    ],
)
def test_refusals(words: dict, why: str) -> None:
    with pytest.raises(InputError, match=why):
        study("data-movement", **words)


def test_of_a_device_with_slower_memory_steps_are_estimated_anew() -> None:
    def step(*changes: str) -> float:
        answer = study("data-movement", workers="1", models="vgg11:mnist,bn=0", batch=64, set=list(changes))
        return answer.found[0].step_s

    assert step("memory_rate=48GB/s") > 1.5 * step()


@pytest.mark.slow
def test_real_workers() -> None:
    """What is measured is what is predicted in kind: weights take their share of two workers' step, and none of one's;
    loaded ahead, inputs take less."""
    answer = study("data-movement", workers="1,2", models="vgg11:mnist,bn=0", batch=4, device="cpu", steps=8)
    rows = {(row.devices, row.preload, row.how): row for row in answer.found}
    assert len(rows) == 8
    for how in ("predicted", "measured"):
        assert rows[1, "off", how].model == 0
        assert rows[2, "off", how].model > 0.02
        assert rows[2, "off", how].input > rows[2, "on", how].input


# -- Xu 2021, table 2 -------------------------------------------------------------------------------------------------

# Percent of the execution time in moving (input, model), batches of 256, on 1 to 4 devices; None: out of memory.
TABLE = {
    "resnet34": ((12.63, 0), (22.17, 4.11), (26.20, 5.29), (31.14, 8.57)),
    "resnet50": (None, None, (16.89, 3.61), (22.53, 6.52)),
    "vgg19": (None, None, (8.54, 12.58), (11.29, 21.17)),
    "mobilenetv2": (None, (23.13, 0.64), (30.59, 0.85), (38.17, 1.01)),
}


@cache
def table_2(host: str) -> dict[tuple[str, int], Moved]:
    found = study("data-movement", models=NETWORKS, set=[f"host_link={host}"]).found
    return {(row.network.partition(":")[0], row.devices): row for row in found if row.preload == "off"}


@pytest.mark.slow
@pytest.mark.parametrize("host", ["15.75GB/s", "1.6GB/s"])
def test_what_fits_and_the_orders_of_table_2(host: str) -> None:
    """Who made the table names a GTX 1080 Ti elsewhere, and no link. Which of its 16 cells ran out of memory comes out
    on that device; so does that both shares grow with devices, and which networks move most of what."""
    rows = table_2(host)
    for network, cells in TABLE.items():
        for devices, published in enumerate(cells, 1):
            assert rows[network, devices].fits == (published is not None), (network, devices)
        for less in (1, 2, 3):
            assert rows[network, less].input < rows[network, less + 1].input
            assert rows[network, less].model < rows[network, less + 1].model
        assert rows[network, 1].model == 0
    for devices in (3, 4):
        at = {network: rows[network, devices] for network in TABLE}
        by_input = sorted(at, key=lambda network: at[network].input)
        assert by_input == sorted(TABLE, key=lambda network: TABLE[network][devices - 1][0])
        ratio = {network: row.model / row.input for network, row in at.items()}
        assert ratio["vgg19"] > 2.5 * max(ratio["resnet34"], ratio["resnet50"])
        assert min(ratio["resnet34"], ratio["resnet50"]) > 2.5 * ratio["mobilenetv2"]


@pytest.mark.slow
def test_shares_of_inputs_in_table_2() -> None:
    """A host link of 1.6 GB/s, as copies from memory that is not pinned have, is what its first cell asks for. Then the
    others come out within 19 %, and those of MobileNet within 27 %: its compute may be estimated too fast."""
    rows = table_2("1.6GB/s")
    for network, cells in TABLE.items():
        for devices, published in enumerate(cells, 1):
            if published is not None:
                close = 0.27 if network == "mobilenetv2" else 0.19
                assert 100 * rows[network, devices].input == pytest.approx(published[0], rel=close), (network, devices)
