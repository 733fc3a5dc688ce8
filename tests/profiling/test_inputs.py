"""Functions that make batches as people do, who look at values on the way: what is planned needs no others."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

from trainplan.profile.attention import Gpu
from trainplan.profile.listing import listed
from trainplan.profile.modelled import modelled
from trainplan.workload.load import load

DATA = TensorDataset(torch.arange(48.0).view(12, 4) / 48, torch.arange(12) % 3)


def plain(samples, seed):
    return torch.ones(samples, 4), torch.zeros(samples, dtype=torch.long)


def picked(samples, seed):
    return default_collate([DATA[i] for i in torch.randint(len(DATA), (samples,)).tolist()])


def loader(samples, seed):
    return next(iter(DataLoader(DATA, batch_size=samples, shuffle=True)))


def scaled(samples, seed):
    return torch.randn(samples, 4) * torch.rand(1).item(), torch.zeros(samples, dtype=torch.long)


def silent(what, share):
    """Nobody is told how far it is."""


def job(inputs):
    return load(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)), inputs=inputs, loss="cross_entropy")


@pytest.mark.parametrize("gpu", [None, Gpu()], ids=["cpu", "gpu"])
@pytest.mark.parametrize("inputs", [picked, loader, scaled])
def test_what_a_batch_is_made_of_does_not_change_what_is_planned(inputs, gpu):
    ours, plainly = (modelled(job(of), [2, 4], gpu, silent) for of in (inputs, plain))
    assert ours.traces == plainly.traces
    assert listed(job(inputs), 4, gpu) == listed(job(plain), 4, gpu)
