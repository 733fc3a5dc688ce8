"""Our lists of operators against a profiler's: here for CPUs, and for a GPU from what was recorded on one."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from trainplan.profile.attention import Asked, Gpu, kernel_of
from trainplan.profile.listing import VIEWS, listed, profiled
from trainplan.profile.on_gpu import at_once
from trainplan.workload.load import load

from . import models

ROOT = Path(__file__).parents[2]
MODEL = "gpt:layers=2,hidden=64,heads=4,seq=32,vocab=100"
RECORDED = ROOT / "benchmarks/data/operators-gpu.json"
PARTS = ("forward", "backward", "update")
H200, A100 = Gpu((9, 0)), Gpu((8, 0))


def shown(ops):
    return [(op.name, op.shapes) for op in ops]


@pytest.mark.parametrize(
    "name",
    ["gpt:layers=1,hidden=8,heads=2,seq=4,vocab=9,batch=4", f"{ROOT}/benchmarks/densenet.py:build"],
    ids=["gpt", "densenet"],
)
def test_on_a_cpu_the_list_is_the_profiler_s(name):
    """Names and shapes of all operators in their order; where branches meet, autograd may take another way back."""
    workload = load(name)
    ours, theirs = listed(workload, 2, None), profiled(workload, 2, "cpu")
    for part in PARTS:
        seen = shown(op for op, _ in theirs[part])
        assert Counter(shown(ours[part])) == Counter(seen)
        if part == "forward":
            assert shown(ours[part]) == seen
        assert len(seen) > 5


class Parts(nn.Module):
    """One of each of what a GPU does in its own way."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.flat = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.BatchNorm1d(8)
        self.layer, self.dropout, self.out = nn.LayerNorm(8), nn.Dropout(0.5), nn.Linear(8, 4)

    def forward(self, x):
        x = self.norm(self.conv(x)).flatten(2).transpose(1, 2)
        heads = x.contiguous()[:, None]
        x = self.layer(x) + F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.1)[:, 0]
        return self.out(self.dropout(self.flat(x.mean(1))))


def on_a_gpu(precision, gpu=H200):
    workload = models.of(Parts(), (3, 6, 6), optimizer="adamw")
    parts = listed(workload, 4, gpu, precision)
    return {part: {op.name: op.precision for op in ops} for part, ops in parts.items()}


def test_what_a_gpu_runs_in_fp32():
    found = on_a_gpu("fp32")
    assert {
        "cudnn_batch_norm",
        "native_batch_norm",
        "_scaled_dot_product_efficient_attention",
        "native_dropout",
    } <= set(found["forward"])
    assert {
        "cudnn_batch_norm_backward", "native_batch_norm_backward", "_scaled_dot_product_efficient_attention_backward",
        "native_dropout_backward", "convolution_backward",
    } <= set(found["backward"])  # fmt: skip
    assert not {"bernoulli_", "_softmax"} & set(found["forward"])
    assert all(name.startswith("_foreach_") for name in found["update"] if name != "_local_scalar_dense")
    assert set(found["forward"].values()) <= {"fp32", ""}


def test_what_a_gpu_runs_under_autocast():
    """Products in bf16; norms, softmax and loss in fp32; weights are cast once."""
    found = on_a_gpu("bf16", A100)
    forward = found["forward"]
    assert forward["convolution"] == forward["addmm"] == forward["_scaled_dot_product_flash_attention"] == "bf16"
    assert forward["native_layer_norm"] == forward["_log_softmax"] == forward["nll_loss_forward"] == "fp32"
    assert found["backward"]["native_batch_norm_backward"] == "bf16"
    assert "cudnn_batch_norm" not in forward  # cudnn's takes no bf16
    assert forward["_to_copy"]
    assert found["update"]["_foreach_lerp_"] == "fp32"


def test_attention_is_another_kernel_on_another_device():
    """In half precision Hopper's is cudnn's, and Ampere's flash; masks and dropout may change that, so may torch."""

    def asked(dtype=torch.bfloat16, width=64, **more):
        given = torch.empty(2, 4, 32, width, dtype=dtype)
        return Asked(given, given, given, **more)

    dense = torch.empty(2, 1, 32, 32)
    spread = torch.empty(1, 1, 1, 1).expand(2, 1, 32, 32)
    before, since = Gpu((9, 0), torch=(2, 11)), Gpu((9, 0), torch=(2, 12))
    turing = Gpu((7, 5))
    for gpu, what, kernel in [
        (H200, asked(), "cudnn"), (A100, asked(), "flash"), (turing, asked(), "math"),
        (turing, asked(torch.float16), "efficient"), (H200, asked(torch.float32), "efficient"),
        (H200, asked(torch.float64), "math"),
        (H200, asked(mask=dense), "cudnn"), (A100, asked(mask=dense), "efficient"), (H200, asked(mask=spread), "math"),
        (H200, asked(mask=dense.clone().requires_grad_()), "efficient"),
        (before, asked(dropout=0.1), "cudnn"), (since, asked(dropout=0.1), "flash"),
        (since, asked(dropout=0.25), "cudnn"), (H200, asked(width=44), "flash"),
        (H200, asked(width=200), "cudnn"), (Gpu((10, 0)), asked(width=200), "flash"),
        (Gpu((8, 6)), asked(width=200), "efficient"), (H200, asked(torch.float32, width=6), "math"),
        (Gpu(any_width=True), asked(torch.float32, width=6), "efficient"),
    ]:  # fmt: skip
        assert kernel_of(what, gpu) == kernel


def test_pure_bf16_has_no_casts():
    found = on_a_gpu("pure-bf16")
    assert "_to_copy" not in found["forward"] | found["backward"]
    assert set(found["forward"].values()) <= {"bf16", ""}


def test_a_weight_is_cast_once_however_often_it_is_used():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(self.linear(x))

    parts = listed(models.of(Twice(), (4,)), 2, H200, "bf16")
    casts = [op.shapes[0] for op in parts["forward"] if op.name == "_to_copy"]
    assert casts.count((4, 4)) == 1
    assert casts.count((4,)) == 1


def test_an_optimizer_that_was_told_how_to_go_goes_so():
    weight = nn.Parameter(torch.ones(2))
    assert at_once(torch.optim.SGD([weight], lr=0.1)).param_groups[0]["foreach"] is True
    assert at_once(torch.optim.SGD([weight], lr=0.1, foreach=False)).param_groups[0]["foreach"] is False
    assert at_once(torch.optim.Adam([weight], fused=True)).param_groups[0]["foreach"] is None


# -- what was recorded on a GPU ---------------------------------------------------------------------------------------

FILE = json.loads(RECORDED.read_text())
THERE = Gpu((9, 0), tuple(map(int, FILE["versions"]["torch"].split(".")[:2])))
# The first recording took these for composed: in torch 2.11 they have a form by the names of dimensions, which is (2.13
# has none of them any more). So it has what they call: of numbers that are counted a cast, and otherwise nothing.
FORMS_BY_NAME = {"sum", "mean", "cat", "cumsum", "gather"}
# And it has no casts that autocast makes inside of operators that a model calls itself, rather than by a module.
CALLED = {"hf:gpt2": {"addmm", "pow"}}
# Another transformers turned positions to angles by a product of matrices; that of today multiplies number by number.
# (precision → what is here, what was there)
ANGLES = {
    "fp32": (
        [("_to_copy", ((1, 32, 1),)), ("mul", ((1, 32, 1), (8,)))],
        [("_to_copy", ((1, 1, 32),)), ("bmm", ((1, 8, 1), (1, 1, 32)))],
    ),
    "bf16": (
        [("_to_copy", ((1, 32, 1),)), ("mul", ((1, 32, 1), (8,)))],
        [
            *[("_to_copy", ((1, 1, 32),))] * 2, ("_to_copy", ((1, 8, 1),)), ("bmm", ((1, 8, 1), (1, 1, 32))),
            *[("_to_copy", ((1, 32, 16),))] * 2,
        ],
    ),
    "pure-bf16": (
        [("_to_copy", ((1, 32, 1),)), ("_to_copy", ((8,),)), ("mul", ((1, 32, 1), (8,)))],
        [("_to_copy", ((1, 8, 1),)), ("_to_copy", ((1, 1, 32),)), ("bmm", ((1, 8, 1), (1, 1, 32)))],
    ),
}  # fmt: skip


def as_first_recorded(ops, model):
    """Our operators, as the first recording would have shown them."""
    found = []
    for op in ops:
        if op.name in FORMS_BY_NAME:
            found += [("_to_copy", op.shapes)] if "sum" in op.name and not op.precision else []
            continue
        while op.name in CALLED.get(model.split(",")[0], ()) and found[-1][0] == "_to_copy":
            found.pop()
        found.append((op.name, op.shapes))
    return found


@pytest.fixture
def earlier(monkeypatch):
    """As in the transformers of the recording: today's makes a learned mask dense, so that a fused kernel reads it."""
    home = pytest.importorskip("transformers.integrations.sdpa_attention")
    made = getattr(home, "create_position_bias_mask", None)

    def as_it_comes(*args):
        with monkeypatch.context() as patched:
            patched.setattr(torch.Tensor, "contiguous", lambda tensor: tensor)
            return made(*args)

    if made is not None:
        monkeypatch.setattr(home, "create_position_bias_mask", as_it_comes)


def holds(row):
    """Whether all operators of a recorded step are those of our list: names and shapes, and how many of each."""
    model = row["model"].replace("benchmarks/", f"{ROOT}/benchmarks/")
    ours = listed(load(model), row["samples"], THERE, row["precision"])
    for part in PARTS:
        seen = Counter((name, tuple(map(tuple, shapes))) for name, shapes, _ in row["operators"][part])
        seen -= Counter({key: count for key, count in seen.items() if key[0] in VIEWS})
        mine = Counter(shown(ours[part]) if "form" in FILE else as_first_recorded(ours[part], row["model"]))
        here, there = (Counter(ops) for ops in ANGLES[row["precision"]])
        if row["model"].startswith("hf:llama") and here <= mine and there <= seen:
            mine = mine - here + there
        assert (part, mine - seen, seen - mine) == (part, Counter(), Counter())
        assert len(seen) > 2
    return True


def rows(*wanted):
    """Those of some models and precisions; none: all."""
    names = {f"{row['model']} {row['precision']}": row for row in FILE["rows"]}
    return pytest.mark.parametrize("row", [names[name] for name in wanted or names], ids=wanted or names)


@rows(f"{MODEL},dropout=0.1 bf16", "benchmarks/densenet.py:build fp32")
def test_on_a_gpu_the_list_is_the_profiler_s_for_some(row):
    """One with attention, dropout and autocast's casts, and one with convolutions and batch norms."""
    assert holds(row)


@pytest.mark.slow
@rows()
def test_on_a_gpu_the_list_is_the_profiler_s(row, earlier):
    """What was recorded on a GPU by `python benchmarks/operators.py`, operator by operator."""
    assert holds(row)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16", "pure-bf16"])
def test_the_list_is_that_of_the_gpu_here(precision):
    workload = load("gpt:layers=1,hidden=64,heads=2,seq=16,vocab=99,batch=4")
    here = Gpu(torch.cuda.get_device_capability())
    ours, theirs = listed(workload, 2, here, precision), profiled(workload, 2, "cuda", precision)
    for part in PARTS:
        mine, seen = (Counter(op.name for op in ops) for ops in (ours[part], [op for op, _ in theirs[part]]))
        assert (part, mine - seen, seen - mine) == (part, Counter(), Counter())
