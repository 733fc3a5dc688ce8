"""Many equal layers made of few: the same as if the model had been captured whole, and not used where it is not."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from trainplan.profile import modelled as way
from trainplan.profile.attention import Gpu
from trainplan.profile.modelled import equal_layers, in_one_piece, modelled
from trainplan.profile.repeated import expanded, same
from trainplan.workload.load import load

from . import models

SHAPE = "gpt:layers=8,hidden=8,heads=2,seq=6,vocab=11,batch=4"


def quietly(what, share):
    pass


class Layer(nn.Module):
    """Does something else from some number on, or where it is told to."""

    def __init__(self, number=0, odd=10**9):
        super().__init__()
        self.number, self.odd = number, odd
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        made = self.linear(x)
        return x + (made.tanh() if self.number >= self.odd else made.relu())


class Tower(nn.Module):
    """A list of layers whose numbers they know."""

    def __init__(self, count=8, odd=10**9):
        super().__init__()
        self.layers = nn.ModuleList(Layer(number, odd) for number in range(count))
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def test_a_model_of_equal_layers_is_the_same_as_captured_whole(monkeypatch):
    workload = load(SHAPE)
    copied = modelled(workload, (), Gpu(), quietly)
    monkeypatch.setattr(way, "equal_layers", lambda model: None)
    whole = modelled(workload, (), Gpu(), quietly)
    assert same(copied, whole)
    assert [block.name for block in copied.base.blocks] == [block.name for block in whole.base.blocks]
    assert [p.name for p in copied.base.parameters] == [p.name for p in whole.base.parameters]
    identities = [block.identity for block in copied.traces[0].blocks]
    assert len(set(identities)) == 5  # embedding, first, those between, last, head


def test_what_differs_is_noticed():
    workload = models.of(Tower(), (4,), classes=3)
    found = in_one_piece(Tower(4), workload, workload.inputs(2, 0), (), None)
    three = in_one_piece(Tower(3), workload, workload.inputs(2, 0), (), None)
    assert same(expanded(three, "layers", 4), found)
    other = in_one_piece(Tower(4, odd=2), workload, workload.inputs(2, 0), (), None)
    assert not same(expanded(three, "layers", 4), other)


def test_a_layer_that_does_something_else_by_its_number_is_captured(monkeypatch):
    model = Tower(odd=6)
    assert equal_layers(model).path == "layers"  # nothing about them says so
    found = modelled(models.of(model, (4,), classes=3), (), None, quietly)
    names = [{op.name for op in block.forward} for block in found.traces[0].blocks]
    assert ["tanh" in block for block in names] == [False] * 6 + [True] * 2 + [False]


@pytest.mark.parametrize("change", ["class", "width", "setting", "shared", "few"])
def test_layers_that_are_not_alike(change):
    model = Tower(7 if change == "few" else 8)
    if change == "class":
        model.layers[5] = nn.Linear(4, 4)
    elif change == "width":
        model.layers[5].linear = nn.Linear(4, 4, bias=False)
    elif change == "setting":
        model.layers[5].odd = 3
    elif change == "shared":
        model.layers[5].linear.weight = model.layers[3].linear.weight
    assert equal_layers(model) is None


@pytest.mark.slow
def test_a_hugging_face_model_of_eight_layers():
    pytest.importorskip("transformers")
    name = "hf:llama,num_hidden_layers=8,hidden_size=16,intermediate_size=16,num_attention_heads=2,vocab_size=11,seq=4"
    found = modelled(load(name), (), Gpu(), quietly)
    assert len({block.identity for block in found.traces[0].blocks}) == 5 < len(found.base.blocks)
    assert found.base.parameter_count == sum(p.numel() for p in load(name).build().parameters())


def test_lots_that_leave_out_no_layer_do_not_keep_a_model_from_being_short():
    with FakeTensorMode(), way._Names() as names:
        left_out = bool(torch.rand([]) < 0.0)
    assert not left_out
    assert [name for name, _ in names.seen] == ["aten.rand.default", "aten.lt.Scalar"]


def test_layers_come_back_after_a_short_look():
    model = Tower()
    layers = equal_layers(model)
    with layers.only(model, 3):
        assert [layer.number for layer in model.layers] == [0, 1, 7]
        assert model(torch.ones(2, 4)).shape == (2, 3)
    assert [layer.number for layer in model.layers] == list(range(8))
