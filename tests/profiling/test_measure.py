"""Measured profiles: complete, honest about how they were made, and near the model run in one piece."""

import statistics
from itertools import pairwise

import pytest
import torch
from torch import nn

from trainplan.errors import InputError, ModelError
from trainplan.profile import measure as measuring
from trainplan.profile.gap import sum_gap
from trainplan.profile.measure import measure
from trainplan.profile.profile import Profile
from trainplan.units import MIB
from trainplan.workload.load import load

from . import models


@pytest.fixture(scope="module")
def resnet():
    return measure(load("resnet18:cifar10"), samples=[1, 2, 4, 8], repeats=3)


def test_every_number_is_there(resnet):
    assert resnet.kind == "measured"
    assert resnet.device == "cpu"
    assert resnet.samples == (1, 2, 4, 8)
    assert resnet.optimizer == "sgd"
    assert resnet.state_bytes_per_parameter == 4.0  # momentum
    assert resnet.flops == pytest.approx(2 * 0.555e9, rel=0.01)
    for block in resnet.blocks:
        assert all(seconds > 0 for seconds in (*block.forward_s, *block.backward_s)), block.name
        assert block.update_s > 0
        assert block.accumulate_s >= 0
        assert set(block.forward_issue_s) == set(block.backward_issue_s) == {0.0}
    crossings = {crossing.name: crossing for crossing in resnet.crossings}
    # A block's last relu is saved by the block itself and by the next, whose convolution reads it.
    assert crossings["relu_"].saved_by == (0, 1)
    assert all(0 <= parameter.ready <= 1 for parameter in resnet.parameters)


def test_time_and_bytes_grow_with_the_micro_batch(resnet):
    whole = [resnet.total("backward_s", 0, len(resnet.blocks), size) for size in resnet.samples]
    assert whole == sorted(whole)
    assert 3 < whole[3] / whole[0] < 9
    saved = [resnet.total("saved_bytes", 0, len(resnet.blocks), size) for size in resnet.samples]
    assert saved[3] == pytest.approx(8 * saved[0], rel=0.02)


def test_the_sum_of_the_blocks_is_the_whole_step(resnet):
    """A few percent apart; more is allowed here, because tests run beside other processes."""
    gaps = sum_gap(resnet)
    assert set(gaps) == {1, 2, 4, 8}
    assert abs(statistics.median(gaps.values())) < 0.10


def test_gradients_arrive_in_the_order_of_the_parameters(resnet):
    """`parameters` are in order of arrival, so within a block their shares do not fall."""
    by_block: dict[int, list[float]] = {}
    for parameter in resnet.parameters:
        by_block.setdefault(parameter.blocks[0], []).append(parameter.ready)
    for shares in by_block.values():
        assert all(later >= earlier - 0.05 for earlier, later in pairwise(shares))


def test_it_says_how_it_was_made_and_survives_a_file(resnet, tmp_path):
    made = resnet.provenance
    assert made.verified
    assert made.threads == 1
    assert made.repeats >= 3
    assert made.reference_s > 0
    assert set(made.versions) == {"trainplan", "torch", "python"}
    assert "core" in made.machine
    resnet.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == resnet


def test_threads_and_random_numbers_are_as_they_were():
    before, workload = torch.get_num_threads(), models.skip()
    torch.set_num_threads(2)
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    try:
        measure(workload, samples=[2], repeats=1)
        assert torch.get_num_threads() == 2
        assert torch.equal(torch.rand(2), expected)
    finally:
        torch.set_num_threads(before)


def test_a_model_that_does_not_fit_is_measured_block_by_block():
    """Bytes are the same as in the chain; weights that two blocks share, and a skip over blocks, are no obstacle."""
    workload = load("vgg11:mnist")
    whole = measure(workload, samples=[2], repeats=2, seconds=1.0)
    parts = measure(workload, samples=[2], repeats=2, seconds=1.0, memory=64 * MIB)
    assert whole.whole
    assert not parts.whole
    assert not parts.provenance.verified
    for one, other in zip(whole.blocks, parts.blocks, strict=True):
        assert one.saved_bytes == other.saved_bytes
        assert other.backward_s[0] > 0
        assert other.update_s > 0
    assert [c.saved_by for c in whole.crossings] == [c.saved_by for c in parts.crossings]
    assert parts.state_bytes_per_parameter == whole.state_bytes_per_parameter
    seconds = [sum(b.forward_s[0] + b.backward_s[0] for b in profile.blocks) for profile in (whole, parts)]
    assert seconds[1] == pytest.approx(seconds[0], rel=0.5)
    skip = measure(models.skip(), samples=[2], repeats=1, memory=1)
    assert all(block.forward_s[0] > 0 for block in skip.blocks)


def test_sizes_are_powers_of_two_up_to_the_batch_and_as_the_time_allows():
    assert measure(models.of(nn.Linear(8, 4), (8,), batch=6), repeats=1).samples == (1, 2, 4)
    short = measure(load("resnet18:cifar10"), repeats=1, seconds=0.5, verify=False)
    assert 2 <= len(short.samples) < 7


def test_a_model_that_needs_two_samples_begins_at_two():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return self.layer(x) / x[1].abs().mean()

    workload = models.of(Two(), (4,), batch=4)
    assert measure(workload, repeats=1).samples == (2, 4)
    with pytest.raises(ModelError, match="1 samples"):
        measure(workload, samples=[1], repeats=1)


def test_compiled_blocks_are_measured_and_said_to_be_so():
    """With a backend that compiles nothing away: what is tested is that blocks run through torch.compile."""
    calls = []

    def backend(graph, inputs):
        calls.append(graph)
        return graph.forward

    profile = measure(models.skip(), samples=[2, 4], repeats=1, compile={"backend": backend, "dynamic": True})
    assert profile.compiled
    assert len(calls) >= len(profile.blocks)


def test_progress_goes_from_nothing_to_all():
    seen: list[tuple[str, float]] = []
    measure(models.skip(), samples=[1, 2], repeats=2, progress=lambda what, share: seen.append((what, share)))
    shares = [share for _, share in seen]
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)
    assert any("repeat 2" in what for what, _ in seen)


def test_refusals():
    with pytest.raises(InputError, match="no such device"):
        measure(models.skip(), device="gpu")
    with pytest.raises(InputError, match="at least 1"):
        measure(models.skip(), samples=[0, 2])
    if not torch.cuda.is_available():
        with pytest.raises(InputError, match="no CUDA device"):
            measure(models.skip(), device="cuda")
    with pytest.raises(InputError, match="at most 2 samples"):
        measure(load("vgg11:mnist"), samples=[2, 4096], memory=300 * MIB, verify=False)


def test_the_model_is_held_against_eager_unless_told_not_to(monkeypatch):
    called = []
    monkeypatch.setattr(measuring, "hold_against_eager", lambda *a, **_: called.append(a))
    assert measure(models.skip(), samples=[2], repeats=1).provenance.verified
    assert len(called) == 1
    assert not measure(models.skip(), samples=[2], repeats=1, verify=False).provenance.verified
    assert len(called) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["resnet50:imagenet", "gpt:layers=6,hidden=512,heads=8,seq=256"])
def test_on_a_gpu_the_host_and_the_device_have_times_of_their_own(name):
    profile = measure(load(name), device="cuda", samples=[1, 16], seconds=6.0)
    runs = [sum(b.forward_s[i] + b.backward_s[i] for b in profile.blocks) for i in (0, 1)]
    issues = [sum(b.forward_issue_s[i] + b.backward_issue_s[i] for b in profile.blocks) for i in (0, 1)]
    assert runs[1] > 2 * runs[0]  # the device has sixteen times the work
    assert issues[1] == pytest.approx(issues[0], rel=0.4)  # the host issues the same operators
    assert all(abs(gap) < 0.25 for gap in sum_gap(profile).values())
    assert profile.blocks[0].update_issue_s > 0
