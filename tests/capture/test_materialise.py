"""Values of one stage are bitwise those of the whole model, and the rest of the model is never in memory."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
import torch
from torch import nn

from trainplan.errors import ModelError
from trainplan.profile.capture.materialise import Skeleton, materialise
from trainplan.profile.capture.tensors import values_of

from .cases import CASES, NAMES


class Inits(nn.Module):
    """Every way to give a parameter its first value that we know of."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = [
            rate.item() for rate in torch.linspace(0, 0.1, 3)
        ]  # values read in the constructor, of no parameter
        self.truncated = nn.Linear(16, 16)
        nn.init.trunc_normal_(self.truncated.weight, std=0.02)
        self.narrow = nn.Linear(16, 16)
        nn.init.trunc_normal_(self.narrow.weight, std=1.0, a=0.5, b=0.6)  # draws until it has enough
        self.orthogonal = nn.Linear(8, 12)
        nn.init.orthogonal_(self.orthogonal.weight)
        self.direct = nn.Parameter(torch.randn(5, 5))
        self.sparse = nn.Linear(8, 8)
        nn.init.sparse_(self.sparse.weight, 0.3)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 9))
        self.copies = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 3)
        self.eye = nn.Linear(4, 4)
        self.eye.weight.data.copy_(torch.eye(4))
        self.recurrent = nn.LSTM(4, 5)
        self.half = nn.Linear(16, 16).half()
        self.convolution = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
        local = nn.Parameter(torch.empty(4, 4))
        self.one, self.two = local, local
        nn.init.kaiming_uniform_(local)
        self.embedding = nn.Embedding(9, 4, padding_idx=0)
        self.last = nn.Linear(7, 7)


BUILDS = {name: CASES[name].build for name in NAMES} | {
    "inits": Inits,
    "half": lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).half(),
    "double": lambda: Inits().double(),
}


@pytest.mark.parametrize("name", list(BUILDS))
def test_any_part_is_bitwise_what_the_whole_build_has(name):
    build = BUILDS[name]
    torch.manual_seed(11)
    whole = values_of(build())
    state = torch.get_rng_state()
    skeleton = Skeleton(build)
    assert all(p.is_meta for p in skeleton.model.parameters())
    for trial in range(3):
        wanted = set(random.Random(trial).sample(list(whole), max(1, len(whole) // 4)))
        values = skeleton.materialise(wanted, seed=11)
        assert values.whole_build == ""
        assert set(values) == wanted
        for key in wanted:
            assert torch.equal(values[key], whole[key]), key
            assert values[key].dtype == whole[key].dtype
            assert isinstance(values[key], nn.Parameter) == isinstance(whole[key], nn.Parameter)
            assert values[key].requires_grad == whole[key].requires_grad
    assert torch.equal(state, torch.get_rng_state())


class Copies(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight.data.copy_(self.a.weight.data * 2)


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 3 if self.a.weight.sum().item() > 100 else 5)


class ReadsOut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        if not self.a.weight.is_meta:
            self.total = float(self.a.weight.detach().numpy().sum())


@pytest.mark.parametrize(
    ("build", "wanted", "why"),
    [
        (Copies, {"b.weight", "c.weight"}, "computed from parameters"),
        (Reads, {"b.weight"}, "values of its parameters"),
        (ReadsOut, {"b.weight"}, "reads a parameter"),
    ],
)
def test_a_constructor_that_needs_the_rest_gets_a_whole_build_and_says_so(build, wanted, why):
    torch.manual_seed(3)
    whole = values_of(build())
    values = materialise(build, wanted, seed=3)
    assert why in values.whole_build
    assert all(torch.equal(values[key], whole[key]) for key in wanted)
    assert set(values) == wanted


def test_a_copy_that_nobody_asked_for_does_no_harm():
    torch.manual_seed(3)
    whole = values_of(Copies())
    values = materialise(Copies, {"c.weight"}, seed=3)
    assert values.whole_build == ""
    assert torch.equal(values["c.weight"], whole["c.weight"])


def test_all_values_and_unknown_names():
    assert set(materialise(Copies, None, seed=3)) == set(values_of(Copies()))
    with pytest.raises(ModelError, match=r"'d\.weight'"):
        materialise(Copies, {"d.weight"})


PEAK = """
import re, torch
from torch import nn
from trainplan.profile.capture.materialise import Skeleton

class Big(nn.Module):
    def __init__(self, width=1024):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(64))   # 4 MiB each, 256 MiB in all
        self.apply(lambda m: nn.init.normal_(m.weight, std=0.02) if isinstance(m, nn.Linear) else None)

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024

Skeleton(lambda: Big(8)).materialise({"layers.3.weight"}, seed=1)   # loads the parts of torch that it needs
open("/proc/self/clear_refs", "w").write("5")   # forget the peak until now
before = peak()
skeleton = Skeleton(Big)
values = skeleton.materialise({f"layers.{i}.weight" for i in range(20, 24)}, seed=1)
assert values.whole_build == ""
print(peak() - before)
"""


def test_peak_memory_is_the_part_and_one_tensor():
    """16 MiB are asked for, of 256."""
    environment = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "PATH": ""}
    import trainplan

    environment["PYTHONPATH"] = trainplan.__path__[0].removesuffix("/trainplan")
    out = subprocess.run([sys.executable, "-c", PEAK], env=environment, capture_output=True, text=True, check=True)
    assert 15 < float(out.stdout) < 16 + 2 * 4 + 12, out.stdout
