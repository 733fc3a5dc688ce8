"""What a model costs, block by block: the value that planning works from. No torch here.

A model is a **chain of blocks** (`Block`), the **tensors** that pass between them (`Crossing`: usually from one block
to the next, but a skip connection may reach further), and its **parameters** (`Parameter`, in the order in which
their gradients arrive). Times and bytes that grow with the micro-batch are tuples, one entry for each size in
`Profile.samples`; between two sizes we interpolate.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainplan import files
from trainplan.errors import InputError
from trainplan.lasting import lasting
from trainplan.profile.interpolate import before, through
from trainplan.profile.provenance import Provenance, WholeStep
from trainplan.profile.recipe import Recipe
from trainplan.profile.sound import checked

Floats = tuple[float, ...]  # one number for each micro-batch size of the profile


MIXED = "mixed"  # the first word of `precision` where weights are of several types
UNKNOWN = "nothing is known of what it does with the tokens of a sequence"


class Portion(NamedTuple):
    """A slice of every sequence of a micro-batch: what goes through at once where sequences are cut."""

    samples: int
    tokens: int  # of each sequence
    before: int  # tokens of the same sequences that went through earlier, and that these attend to
    length: int  # tokens of a whole sequence

    @property
    def share(self) -> float:
        """Of the tokens."""
        return self.tokens / self.length

    @property
    def reach(self) -> float:
        """Of the sequence, what these tokens attend to: themselves and those before."""
        return (self.before + self.tokens) / self.length


Amount = float | Portion  # whole samples, or a slice of some


@dataclass(frozen=True)
class Exchange:
    """A collective inside a pass of a block, of all ranks that share it."""

    what: str  # all_reduce, reduce_scatter, all_gather
    bytes_per_sample: float  # of the whole tensor
    times: int = 1
    hidden: bool = False  # goes on beside arithmetic that does not need it


@dataclass(frozen=True)
class Block:
    """The smallest piece that a plan usually moves, recomputes or shards."""

    name: str
    flops: float  # of the forward pass, for one sample
    # Seconds on the device. `backward_s` does not include recomputation. `accumulate_s` is what a backward pass
    # costs more when gradients are there already and are added to.
    forward_s: Floats
    backward_s: Floats
    accumulate_s: float
    update_s: float  # optimizer step of this block's parameters
    # Seconds of the host that issues the work. On a CPU the host is the device and these are zero.
    forward_issue_s: Floats
    backward_issue_s: Floats
    update_issue_s: float
    # Bytes saved for backward inside the block (once per storage; neither parameters nor crossings), and the extra
    # bytes alive at the worst moment of forward and backward beyond inputs, outputs, saved bytes and gradients.
    saved_bytes: Floats
    forward_workspace_bytes: Floats
    backward_workspace_bytes: Floats
    update_workspace_bytes: float = 0.0  # extra bytes alive at the worst moment of a step for its parameters alone
    buffer_bytes: int = 0
    random: bool = False  # draws random numbers in forward (dropout): is seeded before it runs
    convolution_flops: float = (
        0.0  # of `flops`, those by cudnn (recurrent layers, too); the others are of matrix products
    )
    # Backward in two parts, where it was asked for: gradient of the input, gradient of the weights.
    backward_input_s: Floats = ()
    backward_weight_s: Floats = ()
    backward_input_issue_s: Floats = ()  # … of the host; together no less than those of backward in one
    backward_weight_issue_s: Floats = ()
    # Of running it once more for its backward pass, which does not need all that it makes; none: as forward.
    tail_flops: float = 0.0  # of `flops`, those that it does not need
    recompute_s: Floats = ()
    recompute_issue_s: Floats = ()
    branch_bytes: float = 0.0  # a sample of the gradients that the first part keeps for the second
    # Where sequences are cut into slices: bytes a sample of the keys and values that later tokens attend to, and the
    # seconds of a slice as (fixed seconds, shares of what is beyond by length, by length × reach); none: by length.
    carried_bytes: float = 0.0
    slice_forward: Floats = ()
    slice_backward: Floats = ()
    recipe: int = -1  # among the profile's recipes; -1: what it does is not known operator by operator
    # Where ranks share it (`variant.py`): what they exchange inside a pass; and of a backward pass the seconds that are
    # forward once more.
    forward_talk: tuple[Exchange, ...] = ()
    backward_talk: tuple[Exchange, ...] = ()
    again_s: Floats = ()


@dataclass(frozen=True)
class Crossing:
    """A tensor made by one block and read by later ones.

    The model's inputs are not crossings: every stage that reads one gets it from the data loader. What the loss reads
    counts as read by the last block.
    """

    name: str
    producer: int
    consumers: tuple[int, ...]  # blocks that read it, ascending, all after the producer
    bytes_per_sample: float
    fixed_bytes: int = 0  # does not grow with the batch
    needs_grad: bool = True  # a gradient of the same size flows back
    saved_by: tuple[int, ...] = ()  # blocks whose backward needs it

    def bytes(self, samples: Amount) -> int:
        """Bytes of it for a micro-batch, or for a slice of one.

        >>> Crossing("h", 0, (1,), bytes_per_sample=4.0, fixed_bytes=3).bytes(samples=2)
        11
        >>> Crossing("h", 0, (1,), bytes_per_sample=8.0).bytes(Portion(samples=2, tokens=1, before=1, length=4))
        4
        """
        if isinstance(samples, Portion):
            return round(self.bytes_per_sample * samples.samples * samples.share) + self.fixed_bytes
        return round(self.bytes_per_sample * samples) + self.fixed_bytes


@dataclass(frozen=True)
class Input:
    """A tensor of the batch, and who reads it. What the loss compares with counts as read by the last block."""

    name: str  # its place in the batch, such as args[0]
    blocks: tuple[int, ...]  # none: nobody reads it
    bytes_per_sample: float
    fixed_bytes: int = 0  # does not grow with the batch

    def bytes(self, samples: int) -> int:
        """
        >>> Input("args[0]", (0,), bytes_per_sample=12.0).bytes(4), Input("kwargs[mask]", (0, 3), 0.0, 64).bytes(4)
        (48, 64)
        """
        return round(self.bytes_per_sample * samples) + self.fixed_bytes


@dataclass(frozen=True)
class Parameter:
    """A parameter tensor; `Profile.parameters` lists them in the order in which their gradients arrive."""

    name: str
    blocks: tuple[int, ...]  # the blocks that use it; more than one for tied weights
    count: int
    bytes: int
    ready: float = 1.0  # share of the backward pass of its first block that is over when its gradient is there
    trainable: bool = True
    sliced: bool = False  # each of the ranks that share a block has a slice of it

    @lasting
    def low(self) -> int:
        """The first block that uses it."""
        return min(self.blocks)

    @lasting
    def high(self) -> int:
        """The last one."""
        return max(self.blocks)


@dataclass(frozen=True)
class Profile:
    """All that planning needs to know about a model on a device."""

    workload: str
    sample: str  # what a sample is called
    tokens_per_sample: int
    batch: int
    samples_per_epoch: int
    device: str
    kind: Literal["measured", "estimated"]
    compiled: bool
    precision: str  # that the weights are kept in; of several types "mixed fp32 and bf16" (in older files "")
    optimizer: str
    state_bytes_per_parameter: float  # optimizer state beside the parameter and its gradient
    samples: tuple[int, ...]  # the micro-batch sizes, ascending
    blocks: tuple[Block, ...]
    crossings: tuple[Crossing, ...]
    parameters: tuple[Parameter, ...]
    input_bytes_per_sample: float
    provenance: Provenance
    mean_over: str = "samples"
    clip_norm: float = 0.0
    whole: tuple[WholeStep, ...] = ()
    # A step for several blocks needs the workspace of the largest of them, and this share of the others': 0 where the
    # optimizer goes from tensor to tensor, 1 where it works on all of them at once.
    update_adds: float = 1.0
    # What fp32 really was multiplied in (fp32, tf32 …), which torch's settings and the device decide; "": not known.
    products_in: str = ""
    convolutions_in: str = ""
    loss_bytes: float = 0.0  # a sample, that the loss keeps for backward besides what the model returned
    whole_sequences: str | None = UNKNOWN  # why its sequences cannot be cut into slices; None: they can
    recipes: tuple[Recipe, ...] = ()  # what blocks do, operator by operator
    tp: int = 1  # ranks that share every block; the profile is of one of them
    sequence: str = "off"  # on: what they do not slice they share out by tokens
    recompute: str = "none"  # selective: backward passes have the core of attention in them once more
    varied: bool = False  # it is a variant of another (`variant.py`)
    lowered: bool = False  # its weights are copies in 16 bits of those that the optimizer keeps
    inputs: tuple[Input, ...] = ()  # none: it is not known who reads what of the batch
    update_apart: float = 1.0  # how many times longer the steps of all blocks take one by one than at once
    epoch_assumed: bool = False  # nobody said how many samples an epoch has
    notes: tuple[str, ...] = ()  # what is trained in another form than it was written, or estimated by its bytes alone

    def __post_init__(self) -> None:
        sizes = len(self.samples)
        if not sizes or not self.blocks or list(self.samples) != sorted(set(self.samples)) or self.samples[0] < 1:
            why = (
                f"{len(self.blocks)} blocks, micro-batches of {self.samples}: it needs one or more, and ascending sizes"
            )
            raise InputError("profile", why, files.made_by("profile"))
        for number, block in enumerate(self.blocks):
            for name in _CURVES:
                if (found := len(getattr(block, name))) != sizes:
                    why = f"{name} needs {sizes} numbers, one for each size, and has {found}"
                    raise InputError(f"block {number} of the profile", why, files.made_by("profile"))

    @property
    def epoch(self) -> dict[str, int | bool]:
        """What an answer in JSON says of the epoch that its seconds and prices are for."""
        return {"samples_per_epoch": self.samples_per_epoch, "epoch_assumed": self.epoch_assumed}

    # -- reading ------------------------------------------------------------------------------------------------

    @cached_property
    def parameter_count(self) -> int:
        return sum(p.count for p in self.parameters)

    @cached_property
    def one_type(self) -> bool:
        """Whether all weights that are trained are numbers of as many bytes: gradients of several types are in no
        bucket together."""
        return len({p.bytes // max(1, p.count) for p in self.parameters if p.trainable}) <= 1

    @cached_property
    def flops(self) -> float:
        """FLOP of the forward pass of one sample."""
        return sum(block.flops for block in self.blocks)

    @cached_property
    def convolution_flops(self) -> float:
        """Those of them that are in convolutions."""
        return sum(block.convolution_flops for block in self.blocks)

    @cached_property
    def curves(self) -> dict[str, NDArray[np.float64]]:
        """For each quantity a table (size, block) of sums over the blocks before: ranges are differences."""
        tables = {}
        issued = all(block.backward_input_issue_s and block.backward_weight_issue_s for block in self.blocks)
        names = (*_CURVES, *_AGAIN, *(_HALVES if self.has_halves else ()), *(_ISSUED_HALVES if issued else ()))
        for name in names:
            numbers = [getattr(block, name) or getattr(block, _AGAIN.get(name, name)) for block in self.blocks]
            table = np.array(numbers, dtype=np.float64).T
            tables[name] = np.concatenate([np.zeros((len(self.samples), 1)), table.cumsum(axis=1)], axis=1)
        return tables

    def total(self, quantity: str, first: int, last: int, samples: Amount) -> float:
        """Sum of a quantity over blocks first ≤ b < last for a micro-batch of so many samples.

        Linear between measured sizes, and beyond the last two by their slope (never falling); below the smallest
        size it shrinks only as far as a straight line through the two smallest says.
        """
        key = quantity, first, last, samples
        if key not in self._totals:
            self._totals[key] = self._total(*key)
        return self._totals[key]

    @cached_property
    def _totals(self) -> dict[tuple[str, int, int, Amount], float]:
        """Those that were asked for: a search asks for the same again and again."""
        return {}

    def _total(self, quantity: str, first: int, last: int, samples: Amount) -> float:
        if isinstance(samples, Portion):
            return sum(self._of_portion(quantity, block, samples) for block in range(first, last))
        if quantity not in self.curves:
            why = f"it was {self.kind} without the two parts of backward, which the zero-bubble orders need"
            raise InputError("this profile", why, "schedule=1f1b, or trainplan profile on the device itself")
        rows, left = self._rows[quantity], before(self.samples, samples)
        low, high = rows[left], rows[left + 1] if len(rows) > 1 else rows[left]
        return through(self.samples, left, low[last] - low[first], high[last] - high[first], samples)

    @cached_property
    def _rows(self) -> dict[str, list[list[float]]]:
        """The curves as plain numbers: of the few that a total needs, arrays would make objects one by one."""
        return {quantity: table.tolist() for quantity, table in self.curves.items()}

    def slice_terms(self, quantity: str, first: int, last: int, samples: int) -> tuple[float, float, float]:
        """(a, b, c) of the seconds a + share · (b + c · reach) that a slice takes in some blocks."""
        terms = np.zeros(3)
        for index in range(first, last):
            fixed, by_length, by_reach = getattr(self.blocks[index], _BY_SLICE[quantity]) or (0.0, 1.0, 0.0)
            beyond = max(0.0, self.total(quantity, index, index + 1, samples) - fixed)
            terms += (fixed, beyond * by_length, beyond * by_reach)
        return float(terms[0]), float(terms[1]), float(terms[2])

    def _of_portion(self, quantity: str, index: int, portion: Portion) -> float:
        """A quantity of one block for a slice of a micro-batch.

        Most operators treat tokens alone, and take the slice's share. Attention takes its length times its reach. The
        host issues as many operators as ever.
        """
        block, whole = self.blocks[index], self.total(quantity, index, index + 1, portion.samples)
        if quantity in _BY_SLICE:
            fixed, by_length, by_reach = self.slice_terms(quantity, index, index + 1, portion.samples)
            return fixed + portion.share * (by_length + by_reach * portion.reach)
        if quantity == "recompute_s":  # the share of forward that it is of whole sequences
            forward = self.total("forward_s", index, index + 1, portion.samples)
            return self._of_portion("forward_s", index, portion) * (whole / forward if forward else 0.0)
        if quantity.endswith("issue_s"):
            return whole
        if quantity == "saved_bytes" and portion.before:
            # The keys and values of earlier slices are put in front of its own, which makes a copy of all of them.
            return whole * portion.share + block.carried_bytes * portion.samples * portion.reach
        return whole * portion.share

    @cached_property
    def has_halves(self) -> bool:
        """Whether the two parts of backward were measured apart."""
        return all(block.backward_input_s and block.backward_weight_s for block in self.blocks)

    def update_s(self, first: int, last: int) -> float:
        return sum(block.update_s for block in self.blocks[first:last])

    def inputs_of(self, first: int, last: int) -> tuple[Input, ...]:
        """What blocks first ≤ b < last read of the batch. Where that is not known, all who may: the model begins with
        its inputs, and ends with what they are compared with."""
        whole = Input("", (0, len(self.blocks) - 1), self.input_bytes_per_sample)
        return tuple(i for i in self.inputs or (whole,) if any(first <= block < last for block in i.blocks))

    def parameters_of(self, first: int, last: int) -> tuple[Parameter, ...]:
        """The parameters that blocks first ≤ b < last use, in order of gradient arrival."""
        key = first, last
        if key not in self._used:
            places = sorted({place for block in range(first, last) for place in self._places.get(block, ())})
            self._used[key] = tuple(self.parameters[place] for place in places)
        return self._used[key]

    @cached_property
    def largest_gradients(self) -> tuple[int, ...]:
        """Of every block, the bytes of the largest gradient of the weights that it uses."""
        own = [self.parameters_of(block, block + 1) for block in range(len(self.blocks))]
        return tuple(max((p.bytes for p in used if p.trainable), default=0) for used in own)

    @cached_property
    def _places(self) -> dict[int, list[int]]:
        """By block, where the parameters that it uses stand in the list."""
        found: dict[int, list[int]] = {}
        for place, parameter in enumerate(self.parameters):
            for block in parameter.blocks:
                found.setdefault(block, []).append(place)
        return found

    @cached_property
    def _used(self) -> dict[tuple[int, int], tuple[Parameter, ...]]:
        """Those that were asked for."""
        return {}

    @cached_property
    def known_variants(self) -> dict[Any, Any]:
        """Of this profile for ranks that share blocks, or for other precisions (`variant.py`)."""
        return {}

    @cached_property
    def known_models(self) -> dict[Any, Any]:
        """Of devices that it was estimated on, by whatever seconds depend on (`variant.py`)."""
        return {}

    @cached_property
    def known_stages(self) -> dict[Any, Any]:
        """By cuts, what lowering has worked out of its parameters: many plans share them."""
        return {}

    @cached_property
    def known_settings(self) -> dict[Any, Any]:
        """Where programs of this profile were priced (`predict/cost.py`)."""
        return {}

    @cached_property
    def known_footprints(self) -> dict[Amount, Any]:
        """By samples, what `footprint.footprints` has worked out."""
        return {}

    # -- files --------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        files.write(path, "profile", files.to_json(self))

    @staticmethod
    def load(path: str | Path) -> Profile:
        where = f"profile {path}"
        return checked(files.from_json(Profile, files.read(path, "profile"), where), where)


_CURVES = (
    "forward_s",
    "backward_s",
    "forward_issue_s",
    "backward_issue_s",
    "saved_bytes",
    "forward_workspace_bytes",
    "backward_workspace_bytes",
)

_AGAIN = {"recompute_s": "forward_s", "recompute_issue_s": "forward_issue_s"}  # where it is not known, that
_HALVES = ("backward_input_s", "backward_weight_s")
_ISSUED_HALVES = ("backward_input_issue_s", "backward_weight_issue_s")
_BY_SLICE = {"forward_s": "slice_forward", "backward_s": "slice_backward"}
