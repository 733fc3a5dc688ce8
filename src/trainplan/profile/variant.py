"""A profile of the same model trained another way: shared by several ranks, in another precision, with attention
recomputed. No torch here.

Every operator of a block is known with its shape (`recipe.py`), so what a rank does is worked out operator by operator,
and priced as any other: a slice of a product is a smaller product, which may reach less of the peak.

    tp         ranks that share every block. Of what is cut a rank does, holds and saves a slice; what is not, whole.
    sequence   on: what is not cut is shared out by tokens. A sum over the ranks becomes a scattering and a gathering.
    precision  bf16, fp16: weights, gradients and all that passes in 16 bits; the optimizer keeps the weights in 32 bits
               beside its own states, and a step reads gradients, and writes weights, once more for it.
    selective  the core of attention (scores, their softmax and dropout) is not kept, but computed again going back.

What a layer of a GPT keeps is then, in bytes of 16 bits, s·b·h·(10 + 24/t + 5·a·s/(h·t)), with `sequence` a tth of all,
and with `selective` without the last term: the formulas of Korthikanti et al. 2022, which nothing here says but which
come out (`tests/profiling/test_variant.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from trainplan.cluster.cluster import Device
from trainplan.errors import PlanError
from trainplan.profile.device.known import model_of
from trainplan.profile.device.model import Model
from trainplan.profile.op import Op
from trainplan.profile.profile import Block, Crossing, Exchange, Floats, Parameter, Profile
from trainplan.profile.recipe import Line, Recipe, Work
from trainplan.profile.roofline import Speed, between, issue_seconds, pass_seconds, speed_of, streaming

NARROW = ("bf16", "fp16")  # 16 bits
MASTER_BYTES = 4  # of each weight that the optimizer keeps in 32 bits
# Bytes that a step moves more for each weight in 16 bits: its gradient is read and written in 32 bits, and what the
# optimizer has made of it is read and written in 16.
_CONVERSION = 2 + 4 + 4 + 2


@dataclass(frozen=True)
class Choice:
    """What is not as in the profile."""

    tp: int = 1
    sequence: bool = False
    precision: str = "fp32"
    selective: bool = False


def variant(profile: Profile, device: Device, choice: Choice) -> Profile:
    """The profile of one rank under a choice; the same one where nothing is chosen. Kept with the profile."""
    if choice == Choice():
        return profile
    key = choice, *_rates(device)
    if key not in profile.known_variants:
        refuse(profile, choice)
        made = _all_made(profile, choice, speed_of(device, choice.precision, _model(profile, device)), key[1:])
        profile.known_variants[key] = _variant(profile, choice, made)
    found: Profile = profile.known_variants[key]
    return found


def _rates(device: Device) -> tuple[Any, ...]:
    """What seconds on a device depend on: the same name may stand for other rates, such as those of a what-if."""
    tables = (tuple(sorted(table.items())) for table in (device.flops, device.efficiency))
    return device.name, *tables, device.memory_rate, device.processors, device.capability


def _model(profile: Profile, device: Device) -> Model | None:
    """The model that the profile was estimated with, where it is of this device: it may be the user's own."""
    return profile.known_models.get(_rates(device)) or model_of(device)


def remember(profile: Profile, device: Device, model: Model | None) -> None:
    """Estimate variants of this profile with the model that it was estimated with."""
    if model is not None:
        profile.known_models[_rates(device)] = model


def _all_made(profile: Profile, choice: Choice, speed: Speed, device: tuple[Any, ...]) -> tuple[_Made, ...]:
    """What all recipes come to on a device. Whether the core of attention is kept changes no seconds but its own."""
    key = "made", choice, *device
    if key not in profile.known_variants:
        keeping = replace(choice, selective=False)
        known = _all_made(profile, keeping, speed, device) if choice.selective else (None,) * len(profile.recipes)
        profile.known_variants[key] = tuple(
            _Made(profile, recipe, choice, speed, like) for recipe, like in zip(profile.recipes, known, strict=True)
        )
    found: tuple[_Made, ...] = profile.known_variants[key]
    return found


def seconds_on(profile: Profile, device: Device) -> float:
    """What all blocks would take on another device, forward and backward, with the largest micro-batch that the profile
    has: their operators priced as estimates are. Kept with the profile."""
    where = _rates(device)
    if ("seconds", *where) not in profile.known_variants:
        speed = speed_of(device, profile.precision, _model(profile, device))
        passes = [
            max(one.forward_s[-1], one.forward_issue_s) + max(one.backward_s[-1], one.backward_issue_s)
            for one in _all_made(profile, Choice(precision=profile.precision), speed, where)
        ]
        profile.known_variants["seconds", *where] = sum(passes[block.recipe] for block in profile.blocks)
    return float(profile.known_variants["seconds", *where])


def _variant(profile: Profile, choice: Choice, made: tuple[_Made, ...]) -> Profile:
    narrow = choice.precision in NARROW
    parameters = _parameters(profile, choice.tp, narrow)
    share = _by_block(profile, profile.parameters, parameters)
    state = profile.state_bytes_per_parameter + (MASTER_BYTES if narrow else 0)
    return replace(
        profile,
        blocks=tuple(
            made[block.recipe].block(block, *share[number], narrow) for number, block in enumerate(profile.blocks)
        ),
        crossings=tuple(_crossing(c, choice, narrow) for c in profile.crossings),
        parameters=parameters,
        precision=choice.precision if narrow else profile.precision,
        products_in=profile.products_in if profile.products_in in NARROW else choice.precision,
        convolutions_in=choice.precision if narrow else profile.convolutions_in,
        state_bytes_per_parameter=state,
        loss_bytes=profile.loss_bytes / choice.tp * (0.5 if narrow else 1.0),
        tp=choice.tp,
        sequence="on" if choice.sequence else "off",
        recompute="selective" if choice.selective else "none",
        recipes=(),
        varied=True,
        lowered=narrow,
        whole_sequences=profile.whole_sequences if choice.tp == 1 else "ranks that share blocks take sequences whole",
    )


def refuse(profile: Profile, choice: Choice) -> None:
    """Refused where a profile does not say enough, or a model cannot be shared by so many ranks."""
    words = [f"tp={choice.tp}"] if choice.tp > 1 else []
    words += [f"precision={choice.precision}"] if choice.precision != "fp32" else []
    words += ["recompute=selective"] if choice.selective else []
    asked = f"{' '.join(words)} for {profile.workload}"
    instead = " ".join(word for word in ("tp=1" if choice.tp > 1 else "", "precision=fp32", "recompute=none") if word)
    if not profile.recipes:
        why = f"the profile is {profile.kind} block by block, and does not say which operators a block has"
        raise PlanError(asked, why, f"a profile estimated for a device of the catalogue; or {instead}")
    own = profile.precision if profile.precision in NARROW else profile.products_in
    if choice.precision != "fp32" and own in NARROW:
        kept = "its weights are" if profile.precision in NARROW else "its products are, by autocast,"
        raise PlanError(asked, f"{kept} in {own} as it is, and a plan lowers what is in 32 bits", "precision=fp32")
    if choice.tp == 1:
        return
    if all(recipe.whole for recipe in profile.recipes):
        block = max(profile.blocks, key=lambda b: b.flops)
        why = f"no block can be shared by ranks; of {block.name}: {profile.recipes[block.recipe].whole}"
        raise PlanError(asked, why, "pp or zero, which take blocks whole")
    for what, number in sorted({pair for recipe in profile.recipes for pair in recipe.divides}):
        if number % choice.tp:
            fits = max(tp for tp in range(1, choice.tp) if number % tp == 0)
            instead = f"tp={fits}"
            if what == "vocabulary":
                instead += f", or a vocabulary of {-(-number // choice.tp) * choice.tp}"
            raise PlanError(asked, f"{what} of {number} cannot be shared equally by {choice.tp} ranks", instead)


class _Made:
    """What a recipe comes to under a choice: worked out once, for all blocks that follow it."""

    def __init__(
        self, profile: Profile, recipe: Recipe, choice: Choice, speed: Speed, keeping: _Made | None = None
    ) -> None:  # fmt: skip
        """`keeping`: the same with the core of attention kept, where that is known."""
        self.recipe, self.choice, self.speed, self.sizes = recipe, choice, speed, profile.samples
        # Bytes of a number with a fraction, of those that it has in the profile.
        self.numbers = 0.5 if choice.precision in NARROW and profile.precision not in NARROW else 1.0
        core = tuple(work for work in recipe.forward if work.core)
        once_more = recipe.forward[: len(recipe.forward) - recipe.tail]
        self.forward_s: Floats = keeping.forward_s if keeping else self._seconds(recipe.forward)
        self.again_s = self._seconds(core) if choice.selective else tuple(0.0 for _ in self.sizes)
        back = keeping.backward_s if keeping else self._seconds(recipe.backward)
        self.backward_s: Floats = tuple(a + b for a, b in zip(back, self.again_s, strict=True))
        again = [work.small for work in core] if choice.selective else []
        self.forward_issue_s = issue_seconds([work.small for work in recipe.forward], "forward", speed)
        self.recompute_s: Floats = keeping.recompute_s if keeping else self._seconds(once_more)
        self.recompute_issue_s = issue_seconds([work.small for work in once_more], "forward", speed)
        self.backward_issue_s = issue_seconds([work.small for work in recipe.backward], "backward", speed)
        self.backward_issue_s += issue_seconds(again, "forward", speed)
        self.saved = tuple(self._kept(samples, core=not choice.selective) for samples in self.sizes)
        self.core = tuple(self._kept(n) - self._kept(n, core=False) for n in self.sizes)
        self.forward_share, self.backward_share = self._shrinks(recipe.forward), self._shrinks(recipe.backward)
        self.forward_talk, self.backward_talk = self._talk() if choice.tp > 1 else ((), ())

    def _at(self, work: Work, samples: int) -> Op:
        (a, b) = self.recipe.samples
        whole = between(work.small, work.large, (samples - a) / (b - a))
        return sliced(whole, work, self.choice, self.numbers)

    def _seconds(self, works: Iterable[Work]) -> Floats:
        works = tuple(works)
        return tuple(pass_seconds([self._at(work, n) for work in works], self.speed) for n in self.sizes)

    def _shrinks(self, works: tuple[Work, ...]) -> float:
        """How much of the bytes of its largest operator a rank moves: by so much, workspaces are taken to shrink."""
        most = max(works, key=lambda work: work.large.read + work.large.written, default=None)
        if most is None:
            return 1.0
        op = sliced(most.large, most, self.choice, self.numbers)
        return (op.read + op.written) / max(1, most.large.read + most.large.written)

    def _kept(self, samples: int, core: bool = True) -> float:
        """Bytes that a rank keeps; without those of the core of attention, if asked."""
        whole = self.choice.tp if self.choice.sequence else 1
        return sum(
            self.recipe.at(kept.bytes, samples)
            * (self.numbers if kept.number else 1.0)
            / (self.choice.tp if kept.cut else whole)
            for kept in self.recipe.kept
            if core or not kept.core
        )

    def _talk(self) -> tuple[tuple[Exchange, ...], tuple[Exchange, ...]]:
        """What ranks exchange inside a forward and inside a backward pass."""
        rows = [self._each(line) for line in self.recipe.rows]
        columns = [self._each(line) for line in self.recipe.columns]
        # The largest logit of every token, the sum of all, and that of its target: each a sum of 4 bytes a token.
        losses = [Exchange("all_reduce", 4.0 * self._each_token(), 3)] if any(self.recipe.tokens) else []
        if not self.choice.sequence:
            sums = [Exchange("all_reduce", size) for size in rows]
            return (*sums, *losses), tuple(Exchange("all_reduce", size) for size in columns)
        forward = [Exchange("all_gather", size) for size in columns] + [Exchange("reduce_scatter", s) for s in rows]
        backward = [Exchange("all_gather", size) for size in rows] + [Exchange("reduce_scatter", s) for s in columns]
        # What was gathered is not kept, but gathered once more for the gradients of the weights, beside the product
        # that makes the gradient of the input.
        backward += [Exchange("all_gather", size, hidden=True) for size in columns]
        return (*forward, *losses), tuple(backward)

    def _each(self, line: Line) -> float:
        """Bytes a sample of what is exchanged."""
        (a, b) = self.recipe.samples
        return (line[1] - line[0]) / (b - a) * self.numbers

    def _each_token(self) -> float:
        (a, b) = self.recipe.samples
        return (self.recipe.tokens[1] - self.recipe.tokens[0]) / (b - a)

    def block(self, block: Block, weights: int, count: float, moved: float, narrow: bool) -> Block:
        """A block that follows the recipe. A rank has so many weights of it, which is the share `count` of all, and the
        share `moved` of their bytes."""
        update = block.update_s * count
        if narrow:
            update += streaming(_CONVERSION * weights, self.speed)
        workspace = [
            extra * self.backward_share + (core if self.choice.selective else 0.0)
            for extra, core in zip(block.backward_workspace_bytes, self.core, strict=True)
        ]
        return replace(
            block,
            forward_s=self.forward_s,
            backward_s=self.backward_s,
            forward_issue_s=(self.forward_issue_s,) * len(self.sizes),
            backward_issue_s=(self.backward_issue_s,) * len(self.sizes),
            again_s=self.again_s if self.choice.selective else (),
            recompute_s=self.recompute_s,
            recompute_issue_s=(self.recompute_issue_s,) * len(self.sizes),
            accumulate_s=block.accumulate_s * moved,
            update_s=update,
            saved_bytes=self.saved,
            forward_workspace_bytes=tuple(extra * self.forward_share for extra in block.forward_workspace_bytes),
            backward_workspace_bytes=tuple(workspace),
            update_workspace_bytes=block.update_workspace_bytes * count,
            forward_talk=self.forward_talk,
            backward_talk=self.backward_talk,
            recipe=-1,
            backward_input_s=(),
            backward_weight_s=(),
            backward_input_issue_s=(),
            backward_weight_issue_s=(),
            slice_forward=(),
            slice_backward=(),
        )


def sliced(op: Op, work: Work, choice: Choice, numbers: float = 1.0) -> Op:
    """What a rank does of an operator, in the precision that was chosen.

    >>> product = Op("mm", 2.0 * 8 * 16 * 32, 4 * (8 * 16 + 16 * 32), 4 * 8 * 32, (8, 16, 32))
    >>> part = sliced(product, Work(product, product, "columns"), Choice(tp=4))
    >>> part.shape, part.flops / product.flops, part.read, part.written
    ((8, 16, 8), 0.25, 1024, 256)
    """
    fraction = 1.0 - work.narrow + work.narrow * numbers
    precision = choice.precision if numbers < 1 and op.precision == "fp32" else op.precision
    if work.cut in ("rows", "inner", "columns") and len(op.shape) == 3:
        rows, inner, columns = op.shape
        batch = op.flops / (2.0 * rows * inner * columns)
        place = ("rows", "inner", "columns").index(work.cut)
        cut = tuple(size // choice.tp if at == place else size for at, size in enumerate(op.shape))
        before = rows * inner + inner * columns, rows * columns
        after = cut[0] * cut[1] + cut[1] * cut[2], cut[0] * cut[2]
        read, written = (size * new / old for size, new, old in zip((op.read, op.written), after, before, strict=True))
        flops = 2.0 * batch * cut[0] * cut[1] * cut[2]
        read, written = round(read * fraction), round(written * fraction)
        return Op(op.name, flops, read, written, cut, op.share, precision, op.layout, op.elements)
    parts = choice.tp if work.cut or choice.sequence else 1
    shape = op.shape
    if parts > 1 and shape and op.name.startswith("attention"):
        shape = (max(1, shape[0] // parts), *shape[1:])
    read, written = round(op.read * fraction / parts), round(op.written * fraction / parts)
    return Op(
        op.name, op.flops / parts, read, written, shape, op.share, precision, op.layout, op.elements // parts
    )  # fmt: skip


def _parameters(profile: Profile, tp: int, narrow: bool) -> tuple[Parameter, ...]:
    """What a rank has of all parameters, worked out once: several variants have the same."""
    key = "parameters", tp, narrow
    if key not in profile.known_variants:
        profile.known_variants[key] = tuple(_parameter(p, tp, narrow) for p in profile.parameters)
    found: tuple[Parameter, ...] = profile.known_variants[key]
    return found


def _parameter(parameter: Parameter, tp: int, narrow: bool) -> Parameter:
    parts = tp if parameter.sliced else 1
    wide = parameter.bytes / max(1, parameter.count)
    count = -(-parameter.count // parts)
    return replace(parameter, count=count, bytes=round(count * (2 if narrow else wide)))


def _crossing(crossing: Crossing, choice: Choice, narrow: bool) -> Crossing:
    share = (0.5 if narrow else 1.0) / (choice.tp if choice.sequence else 1)
    return replace(crossing, bytes_per_sample=crossing.bytes_per_sample * share)


def _by_block(
    profile: Profile, before: tuple[Parameter, ...], after: tuple[Parameter, ...]
) -> list[tuple[int, float, float]]:
    """Of each block, how many weights a rank has, which share of all that is, and which of their bytes."""
    sums = [[0, 0, 0, 0] for _ in profile.blocks]
    for old, new in zip(before, after, strict=True):
        own = sums[old.blocks[0]]
        own[0] += old.count
        own[1] += new.count
        own[2] += old.bytes
        own[3] += new.bytes
    return [(b, b / a if a else 1.0, d / c if c else 1.0) for a, b, c, d in sums]
