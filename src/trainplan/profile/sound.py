"""Whether a profile that was read from a file can be one: files are edited, cut short and made by other programs.

What is wrong is told by its place, before a clock has made a nonsense of it. A profile of a thousand blocks takes a few
milliseconds. No torch here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from trainplan import files
from trainplan.amounts import POSSIBLE, untrue
from trainplan.errors import InputError

if TYPE_CHECKING:
    from trainplan.profile.profile import Block, Profile

Fault = tuple[str, Any, str]  # the place, what stands there, and what was expected

BY_SIZE = (
    "backward_input_s", "backward_weight_s", "backward_input_issue_s", "backward_weight_issue_s", "again_s",
    "recompute_s", "recompute_issue_s",
)  # fmt: skip
SLICED = ("slice_forward", "slice_backward")
TALKS = ("forward_talk", "backward_talk")
EXCHANGES = ("all_reduce", "reduce_scatter", "all_gather")
CUTS = ("", "all", "rows", "inner", "columns")
WORDS = {"sequence": ("off", "on"), "recompute": ("none", "selective")}


def checked(profile: Profile, where: str) -> Profile:
    """The profile, if it can be one; `where` names the file in errors."""
    for place, value, expected in faults(profile):
        raise InputError(f"{where}.{place}", f"it is {value!r:.60}, and {expected}", files.made_by("profile"))
    return profile


def faults(profile: Profile) -> Iterator[Fault]:
    """All that cannot be true of a profile, but of its numbers only the first."""
    bad = untrue(profile, free=("recipe",))
    if bad is not None:
        yield bad[0].lstrip("."), bad[1], POSSIBLE
        return
    if not profile.device:
        yield "device", profile.device, "the name of one was expected"
    for name, words in WORDS.items():
        if getattr(profile, name) not in words:
            yield name, getattr(profile, name), f"{' or '.join(words)} was expected"
    for name in ("batch", "samples_per_epoch", "tp"):
        if getattr(profile, name) < 1:
            yield name, getattr(profile, name), "1 or more was expected"
    if not profile.update_apart:
        yield "update_apart", profile.update_apart, "more than 0 was expected"
    for number, whole in enumerate(profile.whole):
        if whole.samples < 1:
            yield f"whole[{number}].samples", whole.samples, "1 or more was expected"
    for number, block in enumerate(profile.blocks):
        yield from _of_block(block, f"blocks[{number}]", len(profile.samples), len(profile.recipes))
    for at, size in enumerate(profile.samples):
        if not any(block.forward_s[at] or block.backward_s[at] for block in profile.blocks):
            yield "blocks", "forward_s and backward_s of nought", f"some block takes time for {size} samples"
    yield from _of_tensors(profile)
    for number, recipe in enumerate(profile.recipes):
        if recipe.samples[0] < 1 or recipe.samples[1] <= recipe.samples[0]:
            yield f"recipes[{number}].samples", recipe.samples, "two sizes were expected, the smaller one first"
        for name in ("forward", "backward"):
            for at, work in enumerate(getattr(recipe, name)):
                place = f"recipes[{number}].{name}[{at}]"
                if work.cut not in CUTS:
                    yield f"{place}.cut", work.cut, f"one of {', '.join(map(repr, CUTS))} was expected"
                if len(work.small.shape) != len(work.large.shape):
                    yield f"{place}.large.shape", work.large.shape, f"as many numbers as small's {work.small.shape}"


def _of_block(block: Block, place: str, sizes: int, recipes: int) -> Iterator[Fault]:
    for name in BY_SIZE:
        if len(getattr(block, name)) not in (0, sizes):
            yield f"{place}.{name}", getattr(block, name), f"{sizes} numbers were expected, one for each size, or none"
    for name in SLICED:
        if len(getattr(block, name)) not in (0, 3):
            yield f"{place}.{name}", getattr(block, name), "3 numbers were expected, or none"
    if not -1 <= block.recipe < recipes:
        yield f"{place}.recipe", block.recipe, f"-1 to {recipes - 1} was expected, as there are {recipes} recipes"
    for name in TALKS:
        for number, exchange in enumerate(getattr(block, name)):
            if exchange.what not in EXCHANGES:
                yield f"{place}.{name}[{number}].what", exchange.what, f"one of {', '.join(EXCHANGES)} was expected"


def _of_tensors(profile: Profile) -> Iterator[Fault]:
    """Crossings, parameters and inputs: blocks that are there, and in the order in which tensors pass."""
    last = len(profile.blocks) - 1
    for number, crossing in enumerate(profile.crossings):
        place, readers = f"crossings[{number}]", crossing.consumers
        if not _are_blocks((crossing.producer,), last):
            yield f"{place}.producer", crossing.producer, _blocks(last)
        elif not readers or not _are_blocks(readers, last) or min(readers) <= crossing.producer:
            expected = f"blocks after its producer were expected, {crossing.producer + 1} to {last}"
            yield f"{place}.consumers", readers, expected
        elif list(readers) != sorted(set(readers)):
            yield f"{place}.consumers", readers, "ascending numbers were expected"
        if not _are_blocks(crossing.saved_by, last):
            yield f"{place}.saved_by", crossing.saved_by, _blocks(last)
    for number, parameter in enumerate(profile.parameters):
        if not parameter.blocks or not _are_blocks(parameter.blocks, last):
            yield f"parameters[{number}].blocks", parameter.blocks, _blocks(last)
        if parameter.bytes and not parameter.count:
            yield f"parameters[{number}].count", parameter.count, f"there are {parameter.bytes} bytes of it"
        if parameter.ready > 1:
            yield f"parameters[{number}].ready", parameter.ready, "a share of 0 to 1 was expected"
    for number, item in enumerate(profile.inputs):
        if not _are_blocks(item.blocks, last):
            yield f"inputs[{number}].blocks", item.blocks, _blocks(last)


def _are_blocks(numbers: Iterable[int], last: int) -> bool:
    return all(0 <= number <= last for number in numbers)


def _blocks(last: int) -> str:
    return f"blocks count from 0 to {last}"
