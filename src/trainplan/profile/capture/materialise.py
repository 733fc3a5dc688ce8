"""The values that a model would start with, for some of its tensors only.

A rank of a pipeline holds one stage. It must start from the values that the whole model, built in one process under
one seed, would have (so that every plan trains the same model), without ever holding the whole model. So the model is
built twice:

1. `Skeleton`: every parameter is replaced by one on the meta device as soon as it is registered. This costs next to
   nothing, is what `capture` is given, and shows which registration ends up under which name.
2. `materialise`: the constructor runs for real, under the seed, and draws every random number that it would draw.
   Parameters that were not asked for give their memory back as soon as the constructor turns to the next parameter,
   and get it again, without its values, should anything touch them later. So random numbers are right by
   construction, and peak memory is the part asked for, plus one tensor, plus buffers.

Values that were given back are gone. A constructor that computes a wanted parameter from an unwanted one, or decides
by its values, is noticed (whatever is computed from lost values counts as lost), and then the whole model is built
after all: `Materialised.whole_build` says why. Values are never silently wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from trainplan.errors import ModelError, nearest
from trainplan.profile.capture.cuts import written_arguments
from trainplan.profile.capture.modules import refuse_modules
from trainplan.profile.capture.tensors import held, values_of
from trainplan.workload.modes import in_training

# In-place operators that leave nothing of what was there before.
_OVERWRITES = {
    "normal_", "uniform_", "random_", "bernoulli_", "exponential_", "geometric_", "cauchy_", "log_normal_",
    "zero_", "fill_", "copy_",
}  # fmt: skip
# Operators that look at the shape of their argument and not at its values.
_SHAPE_ONLY = {
    "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like",
    "new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full",
}  # fmt: skip
# What takes values out of torch.
_READS_OUT = {torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.data_ptr, torch.Tensor.__array__}


class Materialised(dict[str, Tensor]):
    """Values by name. `whole_build` is empty, or says why the whole model had to be built to get them."""

    whole_build: str = ""


@dataclass(frozen=True)
class Registration:
    """One parameter that the constructor registered (or copied), in the order in which it did."""

    key: str
    shape: tuple[int, ...]
    name: str | None  # its first name in the finished model; None if the constructor dropped it again


class Skeleton:
    """A model without values: its parameters are on the meta device. It is in the modes in which it is trained.

    >>> skeleton = Skeleton(lambda: nn.Linear(1000, 1000))
    >>> skeleton.model.weight.is_meta, [event.name for event in skeleton.registrations]
    (True, ['weight', 'bias'])
    """

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        self.build = build
        events: list[tuple[str, nn.Parameter]] = []
        stand_ins: WeakIdKeyDictionary = WeakIdKeyDictionary()

        def replace(key: str, parameter: nn.Parameter) -> nn.Parameter:
            if type(parameter) is not nn.Parameter:
                return parameter
            stand_in = parameter if parameter.is_meta else stand_ins.get(parameter)
            if stand_in is None:
                stand_in = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
                stand_in.__dict__.update(parameter.__dict__)
                stand_ins[parameter] = stand_in  # the same tensor may be registered again, under another name
            events.append((key, stand_in))
            return stand_in

        self.whole_build = ""
        with _random_state_kept():
            try:
                with _parameters_pass(replace):
                    self.model = build()
            except (NotImplementedError, RuntimeError) as error:
                # It reads values that a meta tensor does not have. (If it is broken, it raises again here.)
                self.whole_build = f"the constructor computes with the values of its parameters ({_line(error)})"
                self.model = _emptied(build())
        refuse_modules(self.model)  # here already: lazy parameters have no shapes that anybody could ask for
        in_training(self.model)
        name_of = {id(tensor): name for name, tensor in values_of(self.model).items()}
        self.registrations = [Registration(key, tuple(p.shape), name_of.get(id(p))) for key, p in events]

    def materialise(
        self, names: set[str] | None = None, seed: int = 0, device: torch.device | str = "cpu"
    ) -> Materialised:
        """The values that these tensors have after `torch.manual_seed(seed)` and `build()`; None: all of them."""
        known = held(self.model)
        wanted = set(known) if names is None else set(names)
        unknown = sorted(wanted - set(known))
        if unknown:
            why = "the model has no tensor of that (first) name"
            raise ModelError(f"materialise {unknown[0]!r}", why, nearest(unknown[0], known))
        if self.whole_build or wanted >= {name for name, item in known.items() if item.kind == "parameter"}:
            return _whole(self.build, wanted, seed, device, self.whole_build)
        try:
            return self._part(wanted, seed, device)
        except _Lost as lost:
            return _whole(self.build, wanted, seed, device, str(lost))

    def _part(self, wanted: set[str], seed: int, device: torch.device | str) -> Materialised:
        plan = iter(self.registrations)
        frugal = _Frugal()

        def look(key: str, parameter: nn.Parameter) -> nn.Parameter:
            if type(parameter) is not nn.Parameter:
                return parameter
            event = next(plan, None)
            if event is None or event.key != key or event.shape != tuple(parameter.shape):
                raise _Lost(f"the constructor registered {key!r} out of turn the second time")
            if event.name is not None and event.name not in wanted and parameter.device.type == "cpu":
                frugal.give_up(parameter)
            return parameter

        with _random_state_kept(), _parameters_pass(look), frugal.guarding():
            torch.manual_seed(seed)
            model = self.build()
        values = values_of(model)
        if set(values) != set(held(self.model)):
            raise _Lost("the constructor registered other tensors the second time")
        result = Materialised()
        for name in wanted:
            if frugal.is_lost(values[name]):
                raise _Lost(f"{name!r} is computed from parameters that were not asked for")
            result[name] = _handed_over(values[name], device)
        return result


def materialise(
    build: Callable[[], nn.Module],
    names: set[str] | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Materialised:
    """The values that these tensors of a model have after `torch.manual_seed(seed)` and `build()`.

    >>> def build():
    ...     return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    >>> part = materialise(build, {"1.weight"}, seed=7)
    >>> whole = (torch.manual_seed(7), build())[1]
    >>> list(part), torch.equal(part["1.weight"], whole[1].weight)
    (['1.weight'], True)
    """
    return Skeleton(build).materialise(names, seed, device)


def _whole(
    build: Callable[[], nn.Module], wanted: set[str], seed: int, device: torch.device | str, why: str
) -> Materialised:
    with _random_state_kept():
        torch.manual_seed(seed)
        values = values_of(build())
    result = Materialised({name: _handed_over(values[name], device) for name in values if name in wanted})
    result.whole_build = why
    return result


def _handed_over(value: Tensor, device: torch.device | str) -> Tensor:
    if isinstance(value, nn.Parameter):
        moved = value.detach().to(device)
        return value if moved.data_ptr() == value.data_ptr() else nn.Parameter(moved, value.requires_grad)
    return value.detach().to(device)


def _emptied(model: nn.Module) -> nn.Module:
    """The model with its parameters on the meta device, tied ones still tied."""
    stand_ins: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                empty = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
                module._parameters[key] = stand_ins.setdefault(id(parameter), empty)
    return model


class _Lost(Exception):
    """A value that was given back turned out to be needed."""


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


@contextmanager
def _random_state_kept() -> Iterator[None]:
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        yield


@contextmanager
def _parameters_pass(through: Callable[[str, nn.Parameter], nn.Parameter]) -> Iterator[None]:
    """Every parameter that is registered on a module, or deep-copied, is what `through(name, parameter)` returns."""

    def hook(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        return through(f"{type(module).__name__}.{name}", parameter) if parameter is not None else None

    original = nn.Parameter.__deepcopy__

    def deepcopy(self: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
        # Layers that are made by copying one (nn.TransformerEncoder) are never registered.
        if id(self) in memo:
            return memo[id(self)]
        result = through("copy", original(self, {}))
        memo[id(self)] = result
        return result

    handle = register_module_parameter_registration_hook(hook)  # type: ignore[arg-type]
    nn.Parameter.__deepcopy__ = deepcopy  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Parameter.__deepcopy__ = original  # type: ignore[method-assign]
        handle.remove()


class _Frugal(TorchDispatchMode):
    """Gives back the memory of parameters that are not wanted, and remembers whose values are lost.

    `resize_(0)` on a storage frees its memory, and leaves the tensor what it was: on the CPU, with its shape. Before
    an operator runs, storages that it touches get their memory again.
    """

    def __init__(self) -> None:
        super().__init__()
        self.unwanted: dict[int, tuple[StorageWeakRef, int]] = {}  # storage → (weak reference, bytes)
        self.lost: dict[int, tuple[StorageWeakRef, int]] = {}
        self.current: int | None = None  # the one unwanted storage that has its memory

    @contextmanager
    def guarding(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(self)
            stack.enter_context(_NoReadingOut(self))
            yield

    def give_up(self, parameter: Tensor) -> None:
        """From the next parameter on, this one needs no memory."""
        storage = parameter.untyped_storage()
        key = storage._cdata
        self._turn_to(key)
        self.unwanted[key] = (StorageWeakRef(storage), storage.nbytes())

    def is_lost(self, tensor: Tensor) -> bool:
        return self._known(self.lost, tensor.untyped_storage()._cdata)

    def _known(self, table: dict[int, tuple[StorageWeakRef, int]], key: int) -> bool:
        if key in table and table[key][0].expired():  # another storage may live at that address by now
            del table[key]
        return key in table

    def _turn_to(self, key: int) -> None:
        """An unwanted storage is touched: the one before is freed, and its values are lost."""
        if self.current is not None and self.current != key and self._known(self.unwanted, self.current):
            self._free(self.unwanted[self.current])
        self.current = key

    def _free(self, entry: tuple[StorageWeakRef, int]) -> None:
        storage = torch.UntypedStorage._new_with_weak_ptr(entry[0].cdata)
        if storage is not None and storage.resizable():
            storage.resize_(0)
            self.lost[storage._cdata] = entry

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = _cpu_tensors((args, kwargs))
        for tensor in given:
            key = tensor.untyped_storage()._cdata
            if self._known(self.unwanted, key):
                self._turn_to(key)
        lost = [tensor for tensor in given if self.is_lost(tensor)]
        if not lost or _name(function) in _SHAPE_ONLY:
            return function(*args, **kwargs)
        return self._run_on_lost(function, args, kwargs, lost)

    def _run_on_lost(self, function: OpOverload, args: Any, kwargs: Any, lost: list[Tensor]) -> Any:
        filled = []
        for tensor in lost:
            storage = tensor.untyped_storage()
            if storage.nbytes() == 0:
                storage.resize_(self.lost[storage._cdata][1])
            filled.append(storage)
        name = _name(function)
        result = function(*args, **kwargs)
        if any(not isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(result) if leaf is not None):
            raise _Lost(f"the constructor reads a parameter that was not asked for ({name})")
        written = written_arguments(function, args, kwargs)
        target = args[0] if args and isinstance(args[0], Tensor) else None
        sources = [tensor for tensor in lost if tensor is not target]
        if name in _OVERWRITES and target is not None and not sources and _whole_storage(target):
            # New values: it is unwanted still, and no longer lost.
            del self.lost[target.untyped_storage()._cdata]
            return result
        for tensor in _cpu_tensors((result, written)):
            storage = tensor.untyped_storage()
            if not self.is_lost(tensor):  # computed from lost values: lost as well
                self.lost[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
                filled.append(storage)
        for storage in filled:
            if storage.resizable():
                storage.resize_(0)
        return result


def _name(function: OpOverload) -> str:
    return str(function._schema.name).split("::")[-1]


def _cpu_tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.device.type == "cpu"]


def _whole_storage(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.element_size() >= tensor.untyped_storage().nbytes()


class _NoReadingOut(TorchFunctionMode):
    """Refuses to hand out the memory of a tensor that has none."""

    def __init__(self, frugal: _Frugal) -> None:
        super().__init__()
        self.frugal = frugal

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _READS_OUT and self.frugal.is_lost(args[0]):
            raise _Lost("the constructor reads a parameter that was not asked for")
        return function(*args, **(kwargs or {}))
