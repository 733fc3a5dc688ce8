"""The probe on a GPU: alone, and shared by two workers that talk through host memory."""

import pytest
import torch

from trainplan.cluster.probe import machine
from trainplan.cluster.probe.probe import probe

pytestmark = pytest.mark.gpu


def test_one_gpu():
    held = torch.empty(6 * 2**30, dtype=torch.uint8, device="cuda")  # by another process than the probe's
    found = probe(1, device="cuda", quick=True, cache=False)
    device = found.device(0)
    assert machine.accelerators() >= 1
    assert {"fp32", "tf32", "bf16", "fp16"} == set(device.flops)
    assert device.flops["bf16"] > device.flops["fp32"] > 1e12
    assert device.memory_bytes > 8 * 2**30
    assert 0 < device.context_bytes < 4 * 2**30
    assert device.host_rate > 1e9
    assert "pageable" in device.sources["host_link"]
    del held


def test_two_workers_share_a_gpu():
    found = probe(2, device="cuda", backend="gloo", quick=True, cache=False)
    assert (found.world, found.backend) == (2, "gloo-staged")
    assert {curve.op for curve in found.collectives} == {
        "p2p", "all_reduce", "all_reduces", "all_gather", "reduce_scatter", "broadcast", "stage", "round", "add", "hub",
    }  # fmt: skip
    assert found.link(0, 1).rate > 1e8
    assert found.contention[1] >= 1.0
    assert found.hosts[0] == 1.0 <= found.hosts[1] < 10.0
    assert 1.0 <= found.slowdown.copy <= 20.0
    assert all(1.0 <= value <= 20.0 for value in (found.slowdown.slowed_collective, found.slowdown.slowed_copy))
