"""The profile of a device that has slowed down: processors drift, and what was measured of one is of a moment."""

from __future__ import annotations

from dataclasses import replace

from trainplan.profile.profile import Block, Floats, Profile

_SECONDS = ("accumulate_s", "update_s", "update_issue_s")
_CURVES = (
    "forward_s", "backward_s", "forward_issue_s", "backward_issue_s",
    "backward_input_s", "backward_weight_s", "backward_input_issue_s", "backward_weight_issue_s", "again_s",
    "recompute_s", "recompute_issue_s",
)  # fmt: skip
_SLICES = ("slice_forward", "slice_backward")  # whose first number is seconds, and whose others are shares


def slower(profile: Profile, factor: float) -> Profile:
    """What the profile would be if its device and its host took `factor` as long for everything."""
    return replace(profile, blocks=tuple(_slower(block, factor) for block in profile.blocks))


def _slower(block: Block, factor: float) -> Block:
    changed: dict[str, float | Floats] = {name: getattr(block, name) * factor for name in _SECONDS}
    changed |= {name: tuple(value * factor for value in getattr(block, name)) for name in _CURVES}
    for name in _SLICES:
        shares = getattr(block, name)
        changed[name] = (shares[0] * factor, *shares[1:]) if shares else ()
    return replace(block, **changed)  # type: ignore[arg-type]
