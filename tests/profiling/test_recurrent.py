"""Recurrent layers, and other operators that are products under another name: their FLOPs, and what these take."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import trainplan
from trainplan.cluster.catalogue import device
from trainplan.profile.device.known import model_of
from trainplan.profile.estimate import estimate
from trainplan.profile.on_gpu import OnGpu
from trainplan.profile.op import Op
from trainplan.profile.operators import Recorder
from trainplan.profile.roofline import pass_seconds, speed_of

aten = torch.ops.aten
STEPS, BATCH, READ, HIDDEN = 6, 5, 32, 16
GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1}


def recorded(name: str, layers: int, both: bool, gpu: bool = True) -> list[Op]:
    kind = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn_tanh": nn.RNN}[name]
    with FakeTensorMode():
        layer = kind(READ, HIDDEN, layers, bidirectional=both, batch_first=True)
        state = torch.zeros(layers * (1 + both), BATCH, HIDDEN)
        given = torch.zeros(BATCH, STEPS, READ, requires_grad=True)
        states = (state, state) if name == "lstm" else state
        call = getattr(aten, name).input
        asked = (given, states, layer._flat_weights, True, layers, 0.0, True, both, True)
        with OnGpu() if gpu else torch.enable_grad(), Recorder(gpu) as recorder:
            out = call(*asked)[0]
            assert out.shape == (BATCH, STEPS, HIDDEN * (1 + both))
            out.sum().backward()
        assert given.grad is not None
        assert all(weight.grad is not None for weight in layer.parameters())
    return recorder.ops


def by_hand(name: str, layers: int, both: bool) -> float:
    directions = 1 + both
    widths = [READ] + [HIDDEN * directions] * (layers - 1)
    return sum(2.0 * BATCH * STEPS * GATES[name] * HIDDEN * (width + HIDDEN) * directions for width in widths)


@pytest.mark.parametrize(("name", "layers", "both"), [("lstm", 1, False), ("lstm", 3, True), ("gru", 2, True)])
def test_a_gpu_runs_all_layers_as_one_operator_with_flops_by_closed_form(name, layers, both):
    found = {op.name: op for op in recorded(name, layers, both) if op.flops}
    assert {name: op.flops for name, op in found.items()} == {
        "_cudnn_rnn": by_hand(name, layers, both),
        "_cudnn_rnn_backward": 2 * by_hand(name, layers, both),
    }
    assert "_cudnn_rnn" in {op.name for op in recorded("rnn_tanh", 1, False)}


def test_a_cpu_runs_an_lstm_layer_by_layer():
    found = [op for op in recorded("lstm", 2, True, gpu=False) if op.name.startswith("mkldnn_rnn_layer")]
    assert len(found) == 8
    assert sum(op.flops for op in found) == 3 * by_hand("lstm", 2, True)


@pytest.mark.parametrize("file", [True, False])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_pass_takes_its_flops_at_the_peak_and_its_steps_one_after_the_other(file, precision):
    """They were operators of a CPU that cost their bytes: 5 ms where 42 is the least."""
    gpu = device("A100-80")
    speed = speed_of(gpu, "fp32", model_of(gpu) if file else None)
    shape = (256, 64, 2048, 2048, 4, 2, 1, 2048)
    forward = 2 * 2.0 * 256 * 64 * 4 * 2048 * (2048 + 2048)
    there = Op("_cudnn_rnn", forward, 2**30, 2**29, shape, precision=precision)
    back = replace(there, name="_cudnn_rnn_backward", flops=2 * forward)
    peak = gpu.flops["tf32" if precision == "fp32" else "bf16"]
    taken = [pass_seconds([op], speed) for op in (there, back)]
    assert taken[0] > forward / peak
    assert taken[1] > 2 * forward / peak
    assert sum(taken) < 8 * 3 * forward / peak
    short = replace(there, shape=(256, 1, 8, 8, 4, 2, 1, 8), flops=2 * 2.0 * 256 * 4 * 8 * 16)
    assert pass_seconds([short], speed) > 2 * 256 * 2e-6  # two kernels a step and layer


def test_products_under_another_name_are_counted():
    with FakeTensorMode(), Recorder(gpu=True) as recorder:
        left, right, weight = torch.zeros(5, 16), torch.zeros(5, 24), torch.zeros(8, 16, 24)
        F.bilinear(left, right, weight)
        torch.cdist(torch.zeros(3, 40, 8), torch.zeros(3, 48, 8))
    found = {op.name: (op.flops, op.shape) for op in recorder.ops if op.flops}
    assert found["_trilinear"] == (2.0 * 5 * 8 * 16 * 24, (5, 16, 24))
    # Distances are one product, with the squares of both as two more columns.
    assert found["_euclidean_dist"] == (3 * 2.0 * 40 * (8 + 2) * 48, (40, 10, 48))


class Spectrum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.rfft(F.gelu(self.layer(x)).cumsum(1)).abs()


def test_an_operator_of_which_nothing_is_known_but_its_bytes_is_noted_by_name():
    workload = trainplan.load(Spectrum(), inputs=(torch.zeros(4, 16), torch.zeros(4, 9)), loss="mse", batch=4)
    (found,) = estimate(workload, device("A100-80"), samples=[2]).notes
    assert found == "estimated by its bytes alone, whatever it computes: _fft_c2c, _fft_r2c"
