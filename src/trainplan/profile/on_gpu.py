"""What a GPU runs where a CPU runs something else: the table by which a trace on CPU tensors is rewritten.

Fake tensors pretend to be on the CPU, because on a machine without a GPU fake GPU tensors do not carry autograd. Three
things differ, and each is told here:

* **names**: one operator in the place of another (`shown`). Attention is one of three fused kernels, or none of them
  (`attention.py` has the rule); batch norm is cudnn's where cudnn has it; dropout is one kernel; recurrent layers of
  a module are one operator (`recurrent.py`).
* **autocast**: which operators a GPU's autocast runs in the lower precision, and which in fp32 (`LOWER`, `SINGLE`,
  `SINGLE_INSIDE`: `ATen/autocast_mode.h`, 2.11 to 2.13). A CPU's has other lists, and a GPU's is ignored on CPU
  tensors; so we cast ourselves, where it would (`OnGpu`).
* **optimizers**: on a GPU torch goes over all tensors at once (`_foreach_add_`), unless told otherwise (`at_once`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from trainplan.profile.attention import Asked, Gpu, attention, kernel_of
from trainplan.profile.composite import GATES
from trainplan.profile.recurrent import recurrent

aten = torch.ops.aten
Shapes = tuple[tuple[int, ...], ...]

# -- names ------------------------------------------------------------------------------------------------------------

_LARGEST_NORM = 2**31 - 1  # elements that cudnn's batch norm takes
_LEAST_EPSILON = 1e-5  # of cudnn's batch norm


def shown(function: OpOverload, args: Any, kwargs: Any, shapes: Shapes, gpu: Gpu) -> tuple[str, Shapes]:
    """What a GPU's profiler shows for an operator that was seen on CPU tensors. (Dropout is the recorder's to tell.)

    `shapes` are those of the tensors that it is given, in their order; a GPU's operator may have them in another.
    """
    name = function.overloadpacket.__name__
    if name.startswith("_scaled_dot_product_flash_attention_for_cpu"):
        return _attention(name, args, kwargs, shapes, gpu)
    if name in ("native_batch_norm", "native_batch_norm_backward"):
        found = _batch_norm(name, args)
        # cudnn has room of its own between forward and backward: none, unless the channels are last.
        return found, (*shapes, (0,)) if found == "cudnn_batch_norm_backward" else shapes
    return name, shapes


def _attention(name: str, args: Any, kwargs: Any, shapes: Shapes, gpu: Gpu) -> tuple[str, Shapes]:
    backward = name.endswith("backward")
    query, key, value = args[1:4] if backward else args[:3]
    dropout, causal = args[6:8] if backward else (*args[3:], *(0.0, False)[len(args) - 3 :])  # defaults are left out
    mask = kwargs.get("attn_mask")
    kernel = kernel_of(Asked(query, key, value, mask, dropout, causal, grouped=True), gpu)
    found = f"_scaled_dot_product_{kernel}_attention"
    if not backward:
        return found, shapes
    gradient, q, k, v, out, sums, *rest = shapes
    if kernel == "efficient":
        return f"{found}_backward", (gradient, q, k, v, *rest, out, sums)
    if kernel == "cudnn":
        sums = (*sums, 1)
    return f"{found}_backward", (gradient, q, k, v, out, sums, *rest)


def _batch_norm(name: str, args: Any) -> str:
    """cudnn's where it is faster: `_select_batch_norm_backend` in `ATen/native/Normalization.cpp`."""
    backward = name.endswith("backward")
    given, weight = (args[1], args[2]) if backward else (args[0], args[1])
    training, epsilon = args[7 if backward else 5], args[8 if backward else 7]
    cudnn = (
        weight is not None
        and given.dtype is not torch.bfloat16
        and weight.dtype is not torch.bfloat16
        and (given.dtype is not torch.float16 or weight.dtype is torch.float32)
        and given.dim() >= 3
        and given.shape[0] <= (880_801 if training else 65_535)
        and given.numel() < _LARGEST_NORM
        and epsilon >= _LEAST_EPSILON
    )
    return name.replace("native_", "cudnn_") if cudnn else name


# -- autocast ---------------------------------------------------------------------------------------------------------

LOWER = {
    "_convolution", "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d", "conv_transpose2d",
    "conv_transpose3d", "convolution", "prelu", "addmm", "addmv", "addr", "matmul", "einsum", "mm", "mv",
    "linalg_vecdot", "linear", "addbmm", "baddbmm", "bmm", "chain_matmul", "linalg_multi_dot", "lstm_cell", "gru_cell",
    "rnn_tanh_cell", "rnn_relu_cell", "scaled_dot_product_attention",
}  # fmt: skip
SINGLE = {
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh",
    "tan", "pow", "softplus", "layer_norm", "native_layer_norm", "group_norm", "frobenius_norm", "nuclear_norm", "norm",
    "cosine_similarity", "poisson_nll_loss", "cosine_embedding_loss", "nll_loss", "nll_loss2d", "nll_loss_nd",
    "hinge_embedding_loss", "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss", "margin_ranking_loss",
    "multilabel_margin_loss", "soft_margin_loss", "triplet_margin_loss", "multi_margin_loss",
    "binary_cross_entropy_with_logits", "dist", "pdist", "cdist", "renorm", "logsumexp", "upsample_nearest1d",
    "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d",
    "upsample_bicubic2d",
}  # fmt: skip
SINGLE_SINCE = {"rms_norm": (2, 12)}  # the version of torch
# These are told to write fp32.
SINGLE_INSIDE = {"softmax", "log_softmax", "sum", "prod", "cumsum", "cumprod", "linalg_vector_norm"}


class OnGpu(TorchFunctionMode):
    """Operators as a GPU runs them: attention by its kernels, and with `lower`, under autocast to that precision."""

    def __init__(self, lower: torch.dtype | None = None, gpu: Gpu | None = None) -> None:
        super().__init__()
        self.lower, self.gpu = lower, gpu or Gpu()
        self._weights: dict[int, tuple[Tensor, Tensor]] = {}  # autocast casts a weight once in a forward pass

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = function.overloadpacket.__name__ if isinstance(function, OpOverload) else function.__name__
        if self.lower is not None and torch.is_grad_enabled():
            if name in LOWER:
                args, kwargs = self._cast((args, kwargs), self.lower)
            elif name in SINGLE or self.gpu.torch >= SINGLE_SINCE.get(name, (99, 0)):
                args, kwargs = self._cast((args, kwargs), torch.float32)
            elif args and isinstance(args[0], Tensor) and args[0].dtype is self.lower:
                if name in SINGLE_INSIDE:
                    return self._in_single(function, name, args, kwargs)
                if name == "cross_entropy":
                    return _cross_entropy(*args, **kwargs)
                if name == "cross_entropy_loss":
                    return _cross_entropy_loss(*args, **kwargs)
        if name == "scaled_dot_product_attention":
            return attention(Asked.of(*args, **kwargs), self.gpu)
        if name in GATES and function is getattr(aten, name).input:
            # Autocast lowers what cudnn is given, weights too (`_cudnn_rnn_cast_reflatten`).
            lower = self.lower if torch.is_grad_enabled() else None
            return recurrent(name, *(self._cast(args, lower) if lower is not None else args))
        if name == "rms_norm":
            return _rms_norm(function, *args, **kwargs)
        return function(*args, **kwargs)

    def _cast(self, tree: Any, to: torch.dtype) -> Any:
        return pytree.tree_map_only(Tensor, lambda tensor: self._cast_one(tensor, to), tree)

    def _cast_one(self, tensor: Tensor, to: torch.dtype) -> Tensor:
        if not tensor.is_floating_point() or tensor.dtype in (to, torch.float64):
            return tensor
        if not (tensor.is_leaf and tensor.requires_grad and to is self.lower):
            return tensor.to(to)
        if id(tensor) not in self._weights:
            self._weights[id(tensor)] = tensor, tensor.to(to)
        return self._weights[id(tensor)][1]

    def _in_single(self, function: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name in ("softmax", "log_softmax"):
            return _soft(name, args[0], args[1] if len(args) > 1 else kwargs["dim"])
        return function(*args, **{**kwargs, "dtype": torch.float32})


def _rms_norm(
    function: Any, given: Tensor, sizes: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """One kernel on a GPU, unless its numbers are of two kinds (`rms_norm_symint` in `ATen/native/layer_norm.cpp`).

    On a CPU it is a row of small operators, each of which would save what it was given. That of a layer norm without
    shift stands for it: it reads, writes and keeps the same, and a mean of each row beside it.
    """
    if given.is_complex() or (weight is not None and weight.dtype is not given.dtype):
        found: Tensor = function(given, sizes, weight, eps)
        return found
    normed: Tensor = aten.native_layer_norm(given, sizes, weight, None, eps or 1e-6)[0]
    return normed


def _soft(name: str, given: Tensor, dim: int) -> Tensor:
    """A softmax that writes fp32: of fp16 in one kernel, of bf16 after a cast (`ATen/native/SoftMax.cpp`)."""
    half = given.dtype is torch.float16
    found: Tensor = getattr(aten, f"_{name}")(given if half else given.float(), dim, half)
    return found


def _cross_entropy(
    given: Tensor, target: Tensor, weight: Tensor | None = None, size_average: Any = None, ignore_index: int = -100,
    reduce: Any = None, reduction: str = "mean", label_smoothing: float = 0.0,
) -> Tensor:  # fmt: skip
    """To autocast a composed operator is what it is made of."""
    number = {"none": 0, "mean": 1, "sum": 2}[reduction]
    return _cross_entropy_loss(given, target, weight, number, ignore_index, label_smoothing)


def _cross_entropy_loss(
    given: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = 1, ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:  # fmt: skip
    if label_smoothing or target.is_floating_point():
        return aten.cross_entropy_loss(given.float(), target, weight, reduction, ignore_index, label_smoothing)
    logs = _soft("log_softmax", given, 1 if given.dim() > 1 else 0)
    return aten.nll_loss_nd(logs, target, weight, reduction, ignore_index)


# -- optimizers -------------------------------------------------------------------------------------------------------


def at_once(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """An optimizer as it goes on a GPU: over all tensors at once, unless it was told how to go."""
    for group in optimizer.param_groups:
        if group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = True
    return optimizer
