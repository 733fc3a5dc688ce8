"""How several ranks could share a block: found on the tape of its operators, without knowing the model.

A product with a weight may be cut along its columns if all that follows can be done on slices (`FRIENDLY`: elementwise,
per head, views) until products with other weights, which are then cut along their rows. Where a slice would meet
something whole of its own size (a residual connection), a norm, or the end of the block, it may not. So in

    x + c_proj(attention(c_attn(norm(x))))          c_attn is cut along columns, c_proj along rows

and the same comes out of three products for queries, keys and values, or of two that gate each other. An output layer
whose columns reach a cross entropy is cut along the vocabulary, and so is the largest embedding of tokens.

Going back, each operator is cut as what it reads is: a gradient of a slice is a slice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from trainplan.profile.tape import Seen, Step

PRODUCTS = {"mm", "addmm"}
BATCHED = {"bmm", "baddbmm"}
ATTENTION = {
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_attention_math_for_mps",
}  # fmt: skip
LOSS = {"_log_softmax"}
ADDITIONS = {"add", "add_"}
# What treats the elements of a slice, or its heads, by themselves.
FRIENDLY = BATCHED | ATTENTION | {
    "view", "_unsafe_view", "t", "transpose", "permute", "reshape", "expand", "unbind", "select", "slice", "split",
    "split_with_sizes", "chunk", "squeeze", "unsqueeze", "alias", "detach", "clone", "contiguous", "copy_", "_to_copy",
    "cat", "stack", "empty_like", "zeros_like", "ones_like", "new_zeros", "new_empty", "bernoulli_", "native_dropout",
    "add", "add_", "sub", "mul", "mul_", "div", "div_", "neg", "exp", "pow", "sqrt", "rsqrt", "tanh", "sigmoid", "relu",
    "relu_", "gelu", "silu", "where", "masked_fill", "masked_fill_", "_softmax", "_safe_softmax",
    "repeat", "lift_fresh",
}  # fmt: skip


@dataclass
class Cuts:
    """How a block is cut."""

    columns: dict[int, Seen] = field(default_factory=dict)  # storage of a weight → what its product reads
    rows: dict[int, Seen] = field(default_factory=dict)  # storage of a weight → what its product writes
    vocabulary: set[int] = field(default_factory=set)  # weights of these that lead to the loss
    table: int | None = None  # the weight of the embedding
    embedded: Seen | None = None  # what that writes
    tokens: int = 0  # whose losses are summed
    divides: set[tuple[str, int]] = field(default_factory=set)
    biases: set[int] = field(default_factory=set)  # of columns: cut as these are
    why: str = ""  # why nothing was found

    @property
    def weights(self) -> set[int]:
        """Storages of which a rank has a slice."""
        table = set() if self.table is None else {self.table}
        return {*self.columns, *self.rows, *self.biases, *table}


@dataclass(frozen=True)
class Marks:
    """What becomes of a block's operators and of what they write."""

    forward: dict[int, str]  # by the operator's place: see `Work.cut`
    backward: dict[int, str]
    core: set[int]  # operators of forward that are in the core of attention
    sliced: set[int]  # storages of which a rank has a slice
    inner: set[int]  # storages made inside the core


def cuts(steps: Iterable[Step], weights: Collection[int], made: Collection[int], samples: int) -> Cuts:
    """How a block may be cut, from its forward steps. `weights`: storages of parameters; `made`: of its crossings."""
    steps = list(steps)
    refused: dict[int, str] = {}
    while True:
        found, failed = _attempt(steps, weights, made, samples, refused)
        if not failed:
            break
        refused.update(failed)
    if not found.columns and found.table is None:
        found.why = next(iter(refused.values()), "it has no product with a weight whose result another one takes up")
    return found


def _attempt(
    steps: list[Step], weights: Collection[int], made: Collection[int], samples: int, refused: Mapping[int, str]
) -> tuple[Cuts, dict[int, str]]:
    """All products that are not refused, cut along their columns: what comes of it, and which of them fail."""
    found = Cuts()
    of: dict[int, frozenset[int]] = {}  # storage → the weights of whose columns it has a slice
    through: dict[int, set[tuple[str, int]]] = {}  # weight → what must divide
    reaches: dict[int, bool] = {}
    failed: dict[int, str] = {}
    embeddings: list[tuple[int, int, Seen]] = []  # rows, weight, what is written
    for step in steps:
        origins = frozenset().union(*(of.get(seen.storage, frozenset()) for seen in step.reads))
        if step.name in PRODUCTS:
            first, second = step.reads[-2:]
            weight = next((s for s in (second, first) if s.storage in weights), None)
            given = first if weight is second else second
            out = step.writes[0]
            if weight is not None and not of.get(given.storage):
                if weight.storage not in refused and len(weight.shape) == 2:
                    found.columns[weight.storage] = given
                    of[out.storage] = frozenset({weight.storage})
                    through[weight.storage] = {("width", out.shape[-1])}
                    found.biases |= {s.storage for s in step.reads[:-2] if s.storage in weights}
                continue
            if weight is not None and weight.storage not in found.columns:
                found.rows[weight.storage] = out
                reaches.update(dict.fromkeys(of[given.storage], True))
                continue
        if step.name == "embedding" and step.reads[0].storage in weights:
            grows = step.reads[1].elements % samples == 0 and step.reads[1].elements >= samples > 1
            if grows and step.reads[1].shape[0] == samples:
                embeddings.append((step.reads[0].shape[0], step.reads[0].storage, step.writes[0]))
            continue
        if not origins:
            continue
        if step.name in LOSS:
            rows = step.reads[0].shape
            found.vocabulary |= origins
            found.tokens = step.reads[0].elements // rows[-1]
            for weight_key in origins:
                through[weight_key] = {("vocabulary", rows[-1])}
                reaches[weight_key] = True
            continue  # what follows belongs to the loss
        widest = max((s.elements for s in step.writes), default=0)
        meets = [
            s for s in step.reads if not of.get(s.storage) and s.storage not in weights and s.elements >= widest > 1
        ]
        friendly = step.name in FRIENDLY or _same_view(step)
        if not friendly or (meets and step.name not in ATTENTION | BATCHED and step.writes):
            what = "a residual connection" if friendly else "a norm or another operator over all of it"
            failed.update(dict.fromkeys(origins, f"what it writes goes into {step.name}, {what}"))
            continue
        if step.name in ADDITIONS:  # a bias that is not the product's own
            found.biases |= {s.storage for s in step.reads if s.storage in weights and s.shape == _width(step)}
        if step.name in ATTENTION:
            heads = {("heads", seen.shape[-3]) for seen in step.reads[:3]}
            for key in origins:
                through[key] = (through[key] - {d for d in through[key] if d[0] == "width"}) | heads
        elif step.name in BATCHED:
            for key in origins:
                kept = {d for d in through[key] if d[0] != "width"}
                through[key] = kept | {("heads", max(1, step.reads[-1].shape[0] // samples))}
        for seen in step.writes:
            of[seen.storage] = of.get(seen.storage, frozenset()) | origins
    for key in made:
        failed.update(dict.fromkeys(of.get(key, ()), "what it writes leaves the block"))
    failed.update({k: "nothing takes up what it writes" for k in found.columns if k not in reaches and k not in failed})
    if not failed:
        found.divides = set().union(*(through[key] for key in found.columns)) if found.columns else set()
        if embeddings:
            count, found.table, found.embedded = max(embeddings, key=lambda item: item[0])
            found.divides.add(("vocabulary", count))
    return found, failed


def _same_view(step: Step) -> bool:
    """Whether a step only says in which order the same numbers lie, as attention on a GPU leaves them."""
    return step.name == "as_strided" and step.reads[0].shape == step.writes[0].shape


def _width(step: Step) -> tuple[int, ...]:
    """The shape of a bias of what a step writes."""
    return step.writes[0].shape[-1:] if step.writes else ()


def marks(steps: Iterable[Step], found: Cuts, weights: Collection[int]) -> Marks:
    """What becomes of every operator of a block, forward and back."""
    sliced, core, inner = set(found.weights), set[int](), set[int]()
    cut: tuple[dict[int, str], dict[int, str]] = {}, {}
    vocabulary = max((count for what, count in found.divides if what == "vocabulary"), default=0)
    for step in steps:
        own = cut[step.backward]
        if step.name in PRODUCTS:
            mark = _product(step, sliced)
        elif step.name == "embedding":
            mark = ""
        elif step.name == "embedding_dense_backward":
            mark = "all" if found.table is not None and step.writes[0].shape[0] == vocabulary else ""
        else:
            mark = "all" if any(seen.storage in sliced for seen in step.reads) else ""
        if step.op is not None:
            own[step.op] = mark
        if mark and mark != "inner":
            sliced |= {seen.storage for seen in step.writes}
        if not step.backward and mark == "all":
            within = any(seen.storage in inner for seen in step.reads)
            begins = step.name in BATCHED and not within
            if step.name in ATTENTION or begins or within:
                ends = step.name in ATTENTION or (step.name in BATCHED and within)
                inner |= {seen.storage for seen in (step.writes[1:] if ends else step.writes)}
                core |= {step.op} if step.op is not None else set()
    return Marks(*cut, core, sliced - set(weights), inner)


def _product(step: Step, sliced: Collection[int]) -> str:
    first, second = (seen.storage in sliced for seen in step.reads[-2:])
    if first and second:
        return "inner"
    return "rows" if first else "columns" if second else ""
