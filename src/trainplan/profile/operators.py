"""Operators as they would run: a dispatch mode that writes down each one with its FLOPs and the bytes it moves.

Run under fake tensors, it also keeps the books of an allocator that never allocates: which storages are alive.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from trainplan.profile.arithmetic import NAMES
from trainplan.profile.attention import Gpu
from trainplan.profile.composite import TRILINEAR, recurrent_flops
from trainplan.profile.device.families import REDUCTIONS, convolution_flops
from trainplan.profile.memory import storage_bytes
from trainplan.profile.on_gpu import shown
from trainplan.profile.op import BIAS, RECURRENT, Op
from trainplan.profile.recurrent import described
from trainplan.profile.traced import Life
from trainplan.profile.unpriced import is_unpriced

aten = torch.ops.aten
# Attention: where among its arguments is whether it is causal.
_ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu: 4,
    aten._scaled_dot_product_efficient_attention: 6,
}
_ATTENTION_BACKWARD = {
    aten._scaled_dot_product_flash_attention_for_cpu_backward: 7,
    aten._scaled_dot_product_efficient_attention_backward: 11,
}
# Where the two factors of a product are among its arguments.
_FACTORS = {
    "mm": slice(2), "bmm": slice(2), "addmm": slice(1, 3), "baddbmm": slice(1, 3), "_grouped_mm": slice(2),
}  # fmt: skip
_COPIES = {"clone", "copy_", "_to_copy"}  # element by element, too
# Where among their arguments is what these copy first, unless its numbers are in a row (`contiguous()` in their code).
_IN_A_ROW = {
    "native_layer_norm": (0,), "native_layer_norm_backward": (0, 1), "native_group_norm": (0,),
    "native_group_norm_backward": (0, 1), "_softmax": (0,), "_softmax_backward_data": (0, 1), "_log_softmax": (0,),
    "_log_softmax_backward_data": (0, 1), "convolution": (0,), "_convolution": (0,), "convolution_backward": (0,),
}  # fmt: skip
# These neither compute nor move anything.
_FREE = {aten.detach, aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}


@dataclass(frozen=True)
class Listed:
    """An operator as a profiler shows it."""

    name: str
    shapes: tuple[tuple[int, ...], ...]  # of the tensors that it is given, but for lists of them and single numbers
    precision: str


class Recorder(TorchDispatchMode):
    """Writes every operator that reads or writes memory into `ops`, and follows the bytes alive.

    `gpu`: what a GPU does in one kernel (drawing a dropout mask and applying it) is written as one. `lists`: every
    operator is also `listed` with the name and the shapes that a profiler would show, on a GPU like `like`.
    """

    def __init__(self, gpu: bool, lists: bool = False, like: Gpu | None = None) -> None:
        super().__init__()
        self.gpu, self._like = gpu, like or Gpu()
        self.listed: list[Listed] | None = [] if lists else None
        self._applied: set[int] = set()  # masks that a forward pass has applied
        self.ops: list[Op] = []
        self.unpriced: set[str] = set()  # names of those of which only bytes are known
        self._masks: dict[int, StorageWeakRef] = {}  # storages that dropout filled
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}  # storages that are followed, with their place …
        self._lives: list[Life] = []  # … among these
        self._moment = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = function(*args, **kwargs)
        if function.namespace not in ("aten", "trainplan"):  # ours stand for those of a GPU
            return out
        read, written = _storages((args, kwargs)), _storages(out)
        self._follow([key for key in written if key not in read], written)
        if function.overloadpacket in _FREE or not (read or written):
            return out
        if written and written.keys() <= read.keys() and not function._schema.is_mutable:
            return out  # a view
        if function.overloadpacket is aten.bernoulli_:
            self._masks.update({key: StorageWeakRef(t.untyped_storage()) for key, (t, _) in written.items()})
        if self.gpu and written and written.keys() <= self._masks.keys():
            return out  # part of the kernel that applies the mask
        changed = written or _storages(_written_into(function, args, kwargs))  # some change lists, and return nothing
        self.ops.append(_described(function, args, kwargs, out, _bytes(read), _bytes(changed)))
        if not self.ops[-1].flops and is_unpriced(function):
            self.unpriced.add(self.ops[-1].name)
        if self.listed is not None:
            self.listed.append(self._listed(function, args, kwargs, read))
        return out

    def _listed(self, function: Any, args: Any, kwargs: Any, read: dict[int, tuple[Tensor, int]]) -> Listed:
        """An operator as a profiler would show it."""
        name = function.overloadpacket.__name__
        given = [leaf for leaf in (*args, *kwargs.values()) if isinstance(leaf, Tensor)]
        shapes = tuple(tuple(t.shape) for t in given if t.dim())
        if self.gpu:
            name, shapes = shown(function, args, kwargs, shapes, self._like)
        masks = [key for key in read if key in self._masks]
        if self.gpu and masks and name == "mul":  # forward draws the mask and applies it, backward applies it again
            name = "native_dropout_backward" if masks[0] in self._applied else "native_dropout"
            self._applied.add(masks[0])
        shapes = shapes[:1] if name == "native_dropout" else shapes  # the mask is its own
        touched = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        numbers = next((t.dtype for t in touched if t.is_floating_point()), None)
        return Listed(name, shapes, NAMES.get(numbers, "") if numbers else "")

    def bytes_of(self, tensor: Tensor) -> int:
        """Bytes of a storage: a dropout mask is one byte an element on a GPU, and a number on a CPU."""
        masked = self.gpu and tensor.untyped_storage()._cdata in self._masks
        return tensor.numel() if masked else storage_bytes(tensor)

    # -- bytes alive ----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin a block: from here on, what is made is followed."""
        self._alive, self._lives, self._moment = {}, [], 0

    def pause(self) -> Followed:
        """Leave a block for a while: what its storages are, and the moment. `resume` takes it up again."""
        return Followed(self._alive, self._lives, self.mark())

    def resume(self, followed: Followed) -> int:
        """Take a block up again; returns the moment, at which what has gone meanwhile is gone."""
        self._alive, self._lives, self._moment = followed.alive, followed.lives, followed.moment
        return self.mark()

    def mark(self) -> int:
        """A moment at which nothing is made."""
        self._moment += 1
        self._bury()
        return self._moment

    @property
    def lives(self) -> tuple[Life, ...]:
        return tuple(self._lives)

    def _follow(self, keys: list[int], written: dict[int, tuple[Tensor, int]]) -> None:
        if not keys:
            return
        self._moment += 1
        self._bury()
        for key in keys:
            tensor = written[key][0]
            self._alive[key] = StorageWeakRef(tensor.untyped_storage()), len(self._lives)
            self._lives.append(Life(self.bytes_of(tensor), self._moment, -1))

    def _bury(self) -> None:
        for key in [key for key, (reference, _) in self._alive.items() if reference.expired()]:
            _, place = self._alive.pop(key)
            self._lives[place] = replace(self._lives[place], dies=self._moment)


@dataclass
class Followed:
    """The storages of a block, while another one is at work."""

    alive: dict[int, tuple[StorageWeakRef, int]]
    lives: list[Life]
    moment: int


def _storages(tree: Any) -> dict[int, tuple[Tensor, int]]:
    """The tensors of a tree by storage, with the bytes that its views cover (never more than there are)."""
    found: dict[int, tuple[Tensor, int]] = {}
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, Tensor):
            storage = leaf.untyped_storage()
            before = found[storage._cdata][1] if storage._cdata in found else 0
            found[storage._cdata] = (leaf, min(before + leaf.nbytes, storage.nbytes()))
    return found


def _written_into(function: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that an operator changes."""
    named = [(a, args[i] if i < len(args) else kwargs.get(a.name)) for i, a in enumerate(function._schema.arguments)]
    return [value for a, value in named if a.alias_info is not None and a.alias_info.is_write]


def _bytes(storages: dict[int, tuple[Tensor, int]]) -> int:
    return sum(size for _, size in storages.values())


def _described(function: Any, args: Any, kwargs: Any, out: Any, read: int, written: int) -> Op:
    packet = function.overloadpacket
    name = packet.__name__
    touched = [leaf for leaf in pytree.tree_leaves((args, kwargs, out)) if isinstance(leaf, Tensor)]
    numbers = next((t.dtype for t in touched if t.is_floating_point()), None)
    about: dict[str, Any] = {
        "precision": NAMES.get(numbers, "") if numbers is not None else "",
        "elements": max((t.numel() for t in touched), default=0),
    }
    if packet in _ATTENTION or packet in _ATTENTION_BACKWARD:
        return replace(_attention(packet, args, kwargs, read, written), **about)
    shape = _shape(name, args, out)
    if packet is aten.convolution_backward:
        flops = convolution_flops(shape) * sum(args[10][:2])  # torch counts depthwise weights as if they were dense
    elif name in RECURRENT:
        flops = recurrent_flops(shape, name.endswith("backward"))
    elif name == TRILINEAR:
        flops = 2.0 * prod(_grid(args))
    elif name in ("_euclidean_dist", "_grouped_mm"):  # the first is one product, of squares too
        flops = 2.0 * prod(shape) * (prod(args[0].shape[:-2]) if args[1].dim() == args[0].dim() > 2 else 1)
    else:
        flops = float(flop_registry[packet](*args, **kwargs, out_val=out)) if packet in flop_registry else 0.0
    return Op(name, flops, read, written, shape, layout=_layout(function, args, out), **about)


def _attention(packet: Any, args: Any, kwargs: Any, read: int, written: int) -> Op:
    """Two products of (queries × keys × width) forward; backward five, one of them the scores again."""
    backward = packet in _ATTENTION_BACKWARD
    query, key = args[1:3] if backward else args[:2]
    *batch, queries, width = query.shape
    product = 2.0 * torch.Size(batch).numel() * queries * key.shape[-2] * width
    place = (_ATTENTION_BACKWARD if backward else _ATTENTION)[packet]
    causal = kwargs.get("is_causal", args[place] if len(args) > place else False)
    return Op(
        "attention_backward" if backward else "attention",
        product * (5 if backward else 2),
        read,
        written,
        (torch.Size(batch).numel(), queries, key.shape[-2], width),
        share=0.5 if causal else 1.0,
    )


def _shape(name: str, args: Any, out: Any) -> tuple[int, ...]:
    """What `Op.shape` says of an operator."""
    if name in _FACTORS:
        first, second = args[_FACTORS[name]]
        return (first.shape[-2], first.shape[-1], second.shape[-1])
    if name in RECURRENT:
        return described(name, args)
    if name == TRILINEAR:
        along = args[7] if len(args) > 7 else 1
        first, *others = [size for place, size in enumerate(_grid(args)) if place != along]
        return (first, prod(others[:-1]), others[-1] if others else 1)
    if name == "_euclidean_dist":
        first, second = args
        return (first.shape[-2], first.shape[-1] + 2, second.shape[-2])
    if name in ("convolution", "_convolution", "convolution_backward"):
        backward = name == "convolution_backward"
        given, weight = args[1:3] if backward else args[:2]
        stride, transposed, groups = (args[4], args[7], args[9]) if backward else (args[3], args[6], args[8])
        outs, ins = weight.shape[0], weight.shape[1] * groups
        # A transposed convolution is the backward pass of the one from what it writes to what it reads.
        written = given if transposed else args[0] if backward else out
        return (len(given), ins, outs, written.shape[2:].numel(), weight.shape[2:].numel(), max(stride), int(groups))
    if "batch_norm" in name:
        given = args[0]  # or its gradient, which is as large
        return (given.numel() // given.shape[1], given.shape[1], given.shape[2:].numel())
    if "layer_norm" in name:
        return (prod(next(a for a in args if isinstance(a, list | tuple))),)
    if "softmax" in name:
        return (args[0].shape[args[2] if "backward" in name else args[1]],)
    if "embedding" in name:
        return (args[0].shape[-1],)
    if name in REDUCTIONS and isinstance(out, Tensor) and out.numel() > 1:
        return (args[0].numel() // out.numel(),)
    if "pool" in name:
        # A pool's kernel comes after its input, or after the gradient and the input; an adaptive one has none.
        sizes = next((a for a in args if isinstance(a, list | tuple)), ()) if "adaptive" not in name else ()
        return (prod(sizes),) if sizes else ()
    return ()


def _grid(args: Any) -> list[int]:
    """All places of a trilinear product: three tensors, each of which is repeated along the dimensions that it lacks.

    >>> given, weight = torch.zeros(5, 3), torch.zeros(7, 3, 4)
    >>> _grid((given, weight, torch.zeros(5, 4), [1, 3], [0], [1, 2], [2, 3]))
    [5, 7, 3, 4]
    """
    whole = []
    for tensor, lacks in zip(args[:3], args[3:6], strict=True):
        for dim in sorted(lacks):
            tensor = tensor.unsqueeze(dim)
        whole.append(tensor.shape)
    return [max(sizes) for sizes in zip(*whole, strict=True)]


def _layout(function: Any, args: Any, out: Any) -> str:
    """What `Op.layout` says of an operator."""
    name = function.overloadpacket.__name__
    if name in _FACTORS:
        return "".join("t" if f.stride(-1) != 1 and f.stride(-2) == 1 else "n" for f in args[_FACTORS[name]])
    if name in REDUCTIONS:
        dims = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else ()
        inner = _innermost(args[0])
        return "t" if dims and inner is not None and inner not in {dim % args[0].dim() for dim in dims} else ""
    if name == "cat":
        return "" if all(tensor.is_contiguous() for tensor in args[0]) else "s"
    if name in _IN_A_ROW:
        found = "".join(_copied_first(name, args[place], args) for place in _IN_A_ROW[name])
        biased = args[10][2] if name == "convolution_backward" else "convolution" in name and args[2] is not None
        return found + BIAS * bool(biased)
    if name in _COPIES or torch.Tag.pointwise in function.tags:
        return _order([t for t in (*args, *pytree.tree_leaves(out)) if isinstance(t, Tensor)])
    return ""


def _order(given: list[Tensor]) -> str:
    """Whether tensors that are gone through together lie alike in memory.

    torch goes through them as through one long row only if they do (`TensorIterator`); else it works out for every
    number where it is, and where they are in different orders, reads or writes each from a line of its own.

    >>> x = torch.zeros(4, 8, 2)
    >>> heads, turned = torch.zeros(8, 4, 2).transpose(0, 1), torch.zeros(4, 2, 8).mT
    >>> [_order([x, other]) for other in (x, x[0], heads, turned)]
    ['', 's', 's', 't']
    """
    size = max((tensor.numel() for tensor in given), default=0)
    whole = [tensor for tensor in given if tensor.numel() == size]
    if size <= 1:
        return ""
    if len({_innermost(tensor) for tensor in whole}) > 1:
        return "t"
    dense = all(tensor.stride() == whole[0].stride() for tensor in whole) and _dense(whole[0])
    return "" if dense and all(tensor.numel() in (1, size) for tensor in given) else "s"


def _copied_first(name: str, given: Tensor, args: Any) -> str:
    """How a tensor is copied before an operator begins: not at all, in pieces (s), or number by number (t)."""
    if "convolution" in name and given.dim() == 4:  # cudnn takes channels last, where its input has them so
        groups = args[9 if name == "convolution_backward" else 8]
        image = args[1] if name == "convolution_backward" else given
        last = groups == 1 and not image.is_contiguous() and image.is_contiguous(memory_format=torch.channels_last)
        if given.is_contiguous(memory_format=torch.channels_last if last else torch.contiguous_format):
            return ""
    elif given.is_contiguous():
        return ""
    return "s" if _innermost(given) == given.dim() - 1 else "t"


def _innermost(tensor: Tensor) -> int | None:
    """The dimension along which neighbours in memory are; None: there is none."""
    return next(
        (dim for dim in reversed(range(tensor.dim())) if tensor.shape[dim] > 1 and tensor.stride(dim) == 1), None
    )


def _dense(tensor: Tensor) -> bool:
    """Whether a tensor has no holes and nothing twice, whatever the order of its dimensions."""
    expected = 1
    for stride, size in sorted((tensor.stride(dim), size) for dim, size in enumerate(tensor.shape) if size > 1):
        if stride != expected:
            return False
        expected *= size
    return True
