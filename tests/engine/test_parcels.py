"""Parcels: each storage once, nothing that others hold, and back to the last bit."""

import gc
import weakref

import pytest
import torch
from torch import nn

from tests.profiling.models import of
from trainplan.engine.parcels import Host, Saving
from trainplan.engine.trainer import build
from trainplan.plan.plan import plan
from trainplan.predict.clock import play
from trainplan.predict.memory import peaks
from trainplan.profile.measure import measure
from trainplan.program.lower import lower

CPU = torch.device("cpu")


def there_and_back(saving: Saving, section: int = 0) -> int:
    """Send a parcel away, forget what was on the device, bring it back; its bytes."""
    host, parcel, noted = Host(CPU), saving.parcels[section], []
    storages = [weakref.ref(slot.storage) for slot in parcel.slots]
    host.offload(parcel, lambda: 0, lambda *moments: noted.append(moments)).wait()
    gc.collect()
    assert all(slot.storage is None for slot in parcel.slots)
    assert not any(reference() for reference in storages)
    host.fetch(parcel, lambda: 0, lambda *moments: noted.append(moments)).wait()
    assert len(noted) == 2
    return parcel.size


def test_each_storage_goes_once_and_weights_stay() -> None:
    weight, x = nn.Parameter(torch.randn(6, 4)), torch.randn(3, 4)
    saving = Saving(1, [weight, x], CPU)
    with saving.hooks():
        h = (x @ weight.t()).exp()  # exp saves what it makes
        y = (h[:, :3] * h[:, 3:]).sum() + h.pow(2).sum()  # views of it are saved, and itself
    saving.over(0, {})
    del h
    want = torch.autograd.grad(_again(x, weight), weight)[0]
    assert there_and_back(saving) == 3 * 6 * 4
    torch.testing.assert_close(torch.autograd.grad(y, weight)[0], want, rtol=0, atol=0)


def _again(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    h = (x @ weight.t()).exp()
    return (h[:, :3] * h[:, 3:]).sum() + h.pow(2).sum()


def test_what_is_still_read_goes_with_its_last_reader() -> None:
    weight = nn.Parameter(torch.randn(4))
    saving = Saving(2, [weight], CPU)
    with saving.hooks():
        h = (torch.ones(5, 4) * weight).exp()
        saving.over(0, {"h": h})
        y = h.pow(2).sum()
        del h
    saving.over(1, {})
    assert saving.parcels[0].size == 5 * 4 * 4  # what exp made is not in it, but what was multiplied
    assert there_and_back(saving, 1) == 5 * 4 * 4
    there_and_back(saving, 0)
    y.backward()
    torch.testing.assert_close(weight.grad, 10 * (2 * weight.detach()).exp(), rtol=1e-5, atol=1e-6)


def test_memory_of_the_host_is_used_again() -> None:
    host = Host(CPU)
    used = set()
    for _ in range(3):
        saving = Saving(1, [], CPU)
        with saving.hooks():
            y = torch.randn(8, requires_grad=True).exp().sum()
        saving.over(0, {})
        parcel = saving.parcels[0]
        host.offload(parcel, lambda: 0, lambda *moments: None).wait()
        used.add(parcel.slots[0].host.data_ptr())
        host.fetch(parcel, lambda: 0, lambda *moments: None).wait()
        y.backward()
    assert len(used) == 1


# -- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_memory_of_a_gpu_falls_and_values_stay(recompute: str) -> None:
    """Ten layers of which seven go: as much less at the worst moment as the program says, and the same losses."""
    torch.manual_seed(0)
    job = of(nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(10))), (512,), classes=512)
    batch = 32768
    profile = measure(job, device="cuda", samples=(1024, batch), repeats=1, verify=False)
    count = len(profile.blocks)
    found = {}
    for away in ((), ((count - 3,),)):
        chosen = plan(blocks=count, recompute=recompute, offload="activations" if away else "none", away=away)
        trainer = build(chosen, job, device="cuda", seed=1)
        data = job.inputs(batch, 0)
        losses = [trainer.step(data).loss for _ in range(2)]
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        losses.append(trainer.step(data).loss)
        program = lower(chosen, profile, batch, "gloo-staged")
        expected = peaks(play(program, torch.ones(len(program)).numpy()))[0].bytes
        found[bool(away)] = losses, torch.cuda.max_memory_allocated(), expected
        trainer.close()
        del trainer
        gc.collect()
        torch.cuda.empty_cache()
    (losses, plain, foreseen), (other, less, foreseen_less) = found[False], found[True]
    assert other == losses
    assert foreseen_less < 0.8 * foreseen
    assert plain - less == pytest.approx(foreseen - foreseen_less, rel=0.1)
