"""Families of operators: what they have in common, and the work that a shape stands for.

An operator is found on a device's curves by a *place*: its family, a variant of that, the precision, and a shape. The
shape alone says how many FLOPs and bytes there are, so a file of curves needs shapes and seconds only.

    family          variants                                 shape
    product         nn, nt, tn (and -odd: see `odd`)         batch, rows, inner, columns
    convolution     forward, input, weight                   samples, channels in, out, places, kernel, stride, groups
    attention       forward, backward (and -causal)          heads of all samples, queries, keys, width
    elementwise     relu, add, gelu, dropout                 bytes
    reduction       sum, columns, softmax (and _backward)    bytes, length of what becomes one
    normalisation   layer_norm, batch_norm (and _backward)   bytes, numbers of a row (layer) or channels (batch), places
    pooling         max, average (and _backward)             bytes
    gather          embedding, embedding_backward            bytes, width of a row
    optimizer       foreach, fused                           bytes, tensors
    copy            contiguous, strided, transposed,         bytes
                    cast, cast-up, in, out                   (in, out: from and to the host's memory)

Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainplan.profile.composite import COMPOSITE, pieces

if TYPE_CHECKING:
    from trainplan.profile.op import Op

VARIANTS: dict[str, tuple[str, ...]] = {
    "product": ("nn", "nt", "tn", "nn-odd", "nt-odd", "tn-odd"),
    "convolution": ("forward", "input", "weight"),
    "attention": ("forward", "backward", "forward-causal", "backward-causal"),
    "elementwise": ("relu", "add", "gelu", "dropout"),
    "reduction": ("sum", "softmax", "softmax_backward", "columns"),
    "normalisation": ("layer_norm", "layer_norm_backward", "batch_norm", "batch_norm_backward"),
    "pooling": ("max", "max_backward", "average", "average_backward"),
    "gather": ("embedding", "embedding_backward"),
    "optimizer": ("foreach", "fused"),
    "copy": ("contiguous", "transposed", "cast", "in", "out", "strided", "cast-up"),
}
DIMENSIONS = {
    "product": 4, "convolution": 7, "attention": 4, "elementwise": 1, "reduction": 2, "normalisation": 3, "pooling": 1,
    "gather": 2, "optimizer": 2, "copy": 1,
}  # fmt: skip
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
ITEM_BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp64": 8}
ARITHMETIC = ("product", "convolution", "attention")  # families with FLOPs that count; the others move bytes


@dataclass(frozen=True)
class Place:
    """Where on a device's curves an operator is, and its work."""

    family: str
    variant: str
    precision: str
    shape: tuple[int, ...]
    flops: float
    bytes: float


def place(family: str, variant: str, precision: str, shape: tuple[int, ...]) -> Place:
    """The place of a shape, with the work that it stands for.

    >>> at = place("product", "nt", "bf16", (1, 512, 4096, 1024))
    >>> round(at.flops / at.bytes)
    315
    """
    flops, moved = amounts(family, variant, precision, shape)
    return Place(family, variant, precision, shape, float(flops), float(moved))


def amounts(family: str, variant: str, precision: str, shape: Any) -> tuple[Any, Any]:
    """(FLOPs, bytes) of a shape; or of many, where each of its sizes is an array (of floats, which do not overflow)."""
    size = ITEM_BYTES[precision]
    if family == "product":
        batch, rows, inner, columns = shape
        return 2 * batch * rows * inner * columns, size * batch * (rows * inner + inner * columns + rows * columns)
    if family == "convolution":
        samples, ins, outs, places, kernel, stride, groups = shape
        read, weights = samples * places * ins * stride**2, ins * outs * kernel // groups
        return convolution_flops(shape), size * (read + samples * places * outs + weights)
    if family == "attention":
        heads, queries, keys, width = shape
        backward = variant.startswith("backward")
        done = (10.0 if backward else 4.0) * (0.5 if "causal" in variant else 1.0)
        return done * heads * queries * keys * width, size * heads * width * (queries + keys) * (4 if backward else 2)
    return 0.0 * shape[0], shape[0]


def convolution_flops(shape: Any) -> Any:
    """FLOPs of a convolution of such a shape; backward takes as many for its input, and again for its weights.

    >>> convolution_flops((32, 64, 128, 28 * 28, 9, 1, 1)) == 2 * 32 * 28 * 28 * 64 * 128 * 9
    True
    """
    samples, ins, outs, places, kernel, _, groups = shape
    return 2.0 * samples * places * kernel * (ins // groups) * outs


def odd(layout: str, rows: int, inner: int, columns: int, precision: str) -> bool:
    """Whether tensor cores cannot read a product's factors in whole words of 16 bytes.

    What must be whole is how long a row is in memory: of the first factor, of the second, and of what is written.

    >>> odd("nt", 512, 1024, 50257, "bf16"), odd("nt", 512, 1024, 50257, "fp32"), odd("nt", 511, 1024, 50304, "bf16")
    (True, False, False)
    """
    words = {"fp32": 1, "tf32": 4}.get(precision, 8)
    lengths = (rows if layout[0] == "t" else inner, inner if layout[1] == "t" else columns, columns)
    return any(length % words for length in lengths if length > 1)


# -- from operators ---------------------------------------------------------------------------------------------------

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_euclidean_dist", "_grouped_mm")
_FOUND = 8  # bytes of a copy of 32 bits, by which those of numbers that lie in some other order are measured
# Words in the names of operators → (family, variant); the first that fits counts.
_WORDS = (
    ("fused_adam", "optimizer", "fused"), ("fused_sgd", "optimizer", "fused"), ("foreach", "optimizer", "foreach"),
    ("layer_norm", "normalisation", "layer_norm"), ("rms_norm", "normalisation", "layer_norm"),
    ("batch_norm", "normalisation", "batch_norm"), ("group_norm", "normalisation", "layer_norm"),
    ("softmax", "reduction", "softmax"),
    ("embedding", "gather", "embedding"), ("index", "gather", "embedding"), ("gather", "gather", "embedding"),
    ("scatter", "gather", "embedding_backward"),
    ("nll_loss_backward", "elementwise", "relu"), ("nll_loss2d_backward", "elementwise", "relu"),
    ("nll_loss", "gather", "embedding"),
    ("max_pool", "pooling", "max"), ("avg_pool", "pooling", "average"),
    ("dropout", "elementwise", "dropout"),
    ("gelu", "elementwise", "gelu"), ("silu", "elementwise", "gelu"), ("tanh", "elementwise", "gelu"),
    ("sigmoid", "elementwise", "gelu"), ("exp", "elementwise", "gelu"), ("pow", "elementwise", "gelu"),
    ("relu", "elementwise", "relu"), ("threshold", "elementwise", "add"),
    ("_to_copy", "copy", "cast"), ("clone", "copy", "contiguous"), ("copy_", "copy", "contiguous"),
    ("cat", "copy", "contiguous"),
)  # fmt: skip
REDUCTIONS = ("sum", "mean", "amax", "var", "linalg_vector_norm", "argmax")


def places(op: Op, precision: str) -> tuple[Place, ...]:
    """The places of an operator, which takes the seconds of all: a convolution's backward pass is two pieces of work.

    `precision` is what products of 32-bit numbers run in, fp32 or tf32; other numbers are their own.
    """
    if op.name in COMPOSITE:
        return tuple(one for part, count in pieces(op) for one in places(part, precision) * count)
    kind = precision if op.precision in ("", "fp32", "fp64") else op.precision
    if op.name in _PRODUCTS and len(op.shape) == 3:
        rows, inner, columns = op.shape
        batch = max(1, round(op.flops / max(1.0, 2.0 * rows * inner * columns)))
        layout = op.layout if op.layout in ("nn", "nt", "tn") else "nn"
        variant = f"{layout}-odd" if odd(layout, rows, inner, columns, kind) else layout
        return (place("product", variant, kind, (batch, rows, inner, columns)),)
    if op.name in ("convolution", "_convolution") and len(op.shape) == 7:
        samples, ins, _, written, _, stride, _ = op.shape
        given = _copies(op.layout, samples * ins * written * stride**2)
        return (*given, place("convolution", "forward", kind, op.shape))
    if op.name == "convolution_backward" and len(op.shape) == 7:
        whole = op.flops > 1.5 * convolution_flops(op.shape)  # else its input needs no gradient
        parts = (("input",) if whole else ()) + ("weight",)
        samples, _, outs, written, *_ = op.shape
        gradient = _copies(op.layout, samples * outs * written)
        return (*gradient, *(place("convolution", part, kind, op.shape) for part in parts))
    if op.name in ("attention", "attention_backward") and len(op.shape) == 4:
        kind = "fp32" if kind == "tf32" else kind  # its kernels do not look at that setting
        pass_ = "backward" if op.name.endswith("backward") else "forward"
        return (place("attention", pass_ + ("-causal" if op.share < 1 else ""), kind, op.shape),)
    kind = "fp32" if kind == "tf32" else kind  # nothing else has tensor cores
    family, variant = _by_name(op.name)
    if variant == "sum" and op.layout == "t":
        variant = "columns"
    if variant == "cast" and kind in ("bf16", "fp16") and op.written > op.read:
        variant = "cast-up"
    if variant.startswith("batch_norm") and kind == "fp16":
        kind = "fp32"  # by the same kernels, cudnn's, since autocast leaves weights in fp32; of bf16 they take none
    # A table is read row by row, whatever its size.
    rows_only = family == "gather" and not variant.endswith("backward")
    moved = 2 * op.written if rows_only else op.read + op.written
    if op.name == "copy_":
        moved = op.read  # what is copied, and what is written over, which nobody reads
    if op.name.startswith("nll_loss") and op.name.endswith("backward"):
        moved = op.written  # zeros, and one number a row; of what it is given only the size is read
    if op.layout and family in ("elementwise", "copy"):
        return _copies(op.layout, max(op.elements, moved // _FOUND))
    if variant.startswith("batch_norm") and len(op.shape) == 3:
        sizes = op.shape[1:]
    else:
        sizes = (op.shape[0] if len(op.shape) == 1 else 1024, 1)  # a usual width, where the operator does not say
    first = _copies(op.layout, op.elements) if family == "normalisation" or "softmax" in variant else ()
    return (*first, place(family, variant, kind, (max(1, moved), *sizes)[: DIMENSIONS[family]]))


def _copies(layout: str, elements: int) -> tuple[Place, ...]:
    """Copies of numbers that do not lie in a row, one for each letter of a layout.

    What takes time is to find each number, however many bytes it has and however many tensors there are.
    """
    ways = {"s": "strided", "t": "transposed"}
    return tuple(
        place("copy", ways[letter], "fp32", (max(1, _FOUND * elements),)) for letter in layout if letter in ways
    )


def family_of(name: str) -> str:
    """The family of an operator.

    >>> family_of("addmm"), family_of("native_batch_norm_backward"), family_of("mul")
    ('product', 'normalisation', 'elementwise')
    """
    if name in _PRODUCTS or name in COMPOSITE:
        return "product"
    if "convolution" in name:
        return "convolution"
    return "attention" if name.startswith("attention") else _by_name(name)[0]


def _by_name(name: str) -> tuple[str, str]:
    if name in REDUCTIONS:
        return "reduction", "sum"
    for word, family, variant in _WORDS:
        if word in name:
            back = f"{variant}_backward"
            return family, back if "backward" in name and back in VARIANTS[family] else variant
    return "elementwise", "add"
