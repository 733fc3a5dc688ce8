"""The optimizer of a part of a model: the same groups everywhere, the same updates as in one piece."""

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from trainplan.errors import InputError, ModelError
from trainplan.workload.load import load
from trainplan.workload.optimizer import make, scheduler_of
from trainplan.workload.workload import Loss, Workload

OPTIMIZERS = [
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.Adadelta,
    torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.ASGD,
    torch.optim.Adafactor,
]  # fmt: skip


def parameters(device: str = "cpu") -> dict[str, nn.Parameter]:
    torch.manual_seed(0)
    shapes = {"a.weight": (3, 2), "a.bias": (3,), "b.weight": (2, 3), "norm": (2,)}
    return {name: nn.Parameter(torch.randn(shape).to(device)) for name, shape in shapes.items()}


def grouped(kind: type, pairs: bool = False):
    """Weights and the others apart, each parameter with or without its name; empty groups are left out."""

    def factory(named):
        kinds = [[p for p in named if (p[1].dim() > 1) == weights] for weights in (True, False)]
        lists = [kinds[i] if pairs else [p for _, p in kinds[i]] for i in (0, 1)]
        return kind([{"params": found, "lr": 0.1 / (i + 1)} for i, found in enumerate(lists) if found])

    return factory


def stepped(optimizer: torch.optim.Optimizer, held: dict[str, nn.Parameter]) -> None:
    for _ in range(2):
        for name, parameter in held.items():
            parameter.grad = torch.full_like(parameter, 0.1 * len(name))
        optimizer.step()


@pytest.mark.parametrize("kind", OPTIMIZERS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("pairs", [True, False], ids=["pairs", "bare"])
def test_parts_are_updated_as_the_whole_is(kind: type, pairs: bool) -> None:
    """The second part has no parameter of the second group, and the third none at all."""
    whole = parameters()
    stepped(grouped(kind, pairs)(list(whole.items())), whole)
    held = parameters()
    for names in (("a.weight", "a.bias", "norm"), ("b.weight",), ()):
        ours = {name: held[name] for name in names}
        optimizer, groups = make(grouped(kind, pairs), parameters("meta"), ours)
        assert groups == (("a.weight", "b.weight"), ("a.bias", "norm"))
        assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.05]
        stepped(optimizer, ours)
        assert set(optimizer.state) <= set(ours.values())
        assert all(v.device.type == "cpu" for state in optimizer.state.values() for v in state.values())
    for name in whole:
        torch.testing.assert_close(held[name], whole[name], rtol=0, atol=0)


def test_factories_that_do_not_keep_to_it() -> None:
    whole = parameters()
    with pytest.raises(ModelError, match=r"it raised AttributeError: 'tuple'.*Try a function of \(name, parameter\)"):
        make(lambda p: torch.optim.SGD([x for x in p if x.dim() > 1], lr=0.1), whole, whole)
    with pytest.raises(ModelError, match="the function returned NoneType"):
        make(lambda p: None, whole, whole)
    with pytest.raises(ModelError, match=r"2 tensors that it was not given, first of shape \(4, 4\)"):
        make(lambda p: torch.optim.SGD(nn.Linear(4, 4).parameters(), lr=0.1), whole, whole)

    with pytest.raises(ModelError, match=r"training with LBFGS: its step takes a closure"):
        make(lambda named: torch.optim.LBFGS([p for _, p in named]), whole, whole)

    def refusing(named):
        raise InputError("lr=2", "it is too large", "lr=1")

    with pytest.raises(InputError, match="too large"):
        make(refusing, whole, whole)


def test_schedulers() -> None:
    workload = Workload("x", nn.Module, None, Loss(None, None), None, 1, 1)
    optimizer = torch.optim.SGD(parameters().values(), lr=0.1)
    assert scheduler_of(workload, optimizer) is None
    workload.schedule = lambda o: lr_scheduler.StepLR(o, 2)
    assert isinstance(scheduler_of(workload, optimizer), lr_scheduler.StepLR)
    workload.schedule = lr_scheduler.ReduceLROnPlateau
    with pytest.raises(ModelError, match="a ReduceLROnPlateau: it is stepped by a loss that somebody evaluates"):
        scheduler_of(workload, optimizer)


def test_an_optimizer_that_is_made_is_refused_with_a_function_that_makes_it() -> None:
    model = nn.Linear(3, 2)
    own = {"inputs": torch.zeros(2, 3), "loss": "mse"}
    made = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    factory = r"Try optimizer=lambda named: torch.optim.SGD\(named, lr=0.1, momentum=0.9\).$"
    with pytest.raises(InputError, match=rf"optimizer=SGD\(…\) for Linear: it has the parameters.*{factory}"):
        load(model, optimizer=made, **own)
    with pytest.raises(InputError, match=r"for resnet18:mnist: .*Try optimizer=lambda named"):
        load("resnet18:mnist", optimizer=made)
    with pytest.raises(InputError, match=r"Try schedule=lambda optimizer: torch.optim.lr_scheduler.StepLR\(optimizer"):
        load(model, schedule=lr_scheduler.StepLR(made, 3), **own)
