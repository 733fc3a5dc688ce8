"""What passes between stages.

A tensor goes straight from the stage that makes it to every stage that reads it, so a skip connection over several
stages is one message and not a relay. All tensors for one target travel together.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainplan.profile.profile import Amount, Profile


@dataclass(frozen=True)
class Edge:
    """The tensors that one stage sends to another, and the gradients that come back."""

    source: int
    target: int
    crossings: tuple[int, ...]  # indices into profile.crossings, ascending
    gradients: tuple[int, ...]  # those of them for which a gradient flows back


def edges(profile: Profile, bounds: tuple[tuple[int, int], ...]) -> list[Edge]:
    """The edges between stages with these blocks, by source and then target."""
    stage_of = [stage for stage, (first, last) in enumerate(bounds) for _ in range(first, last)]
    found: dict[tuple[int, int], list[int]] = {}
    for number, crossing in enumerate(profile.crossings):
        source = stage_of[crossing.producer]
        for target in sorted({stage_of[consumer] for consumer in crossing.consumers} - {source}):
            found.setdefault((source, target), []).append(number)
    return [
        Edge(source, target, tuple(numbers), tuple(n for n in numbers if profile.crossings[n].needs_grad))
        for (source, target), numbers in sorted(found.items())
    ]


def known_edges(profile: Profile, bounds: tuple[tuple[int, int], ...]) -> list[Edge]:
    """The same, worked out once: many plans share their cuts."""
    known, key = profile.known_stages, ("edges", bounds)
    if key not in known:
        known[key] = edges(profile, bounds)
    found: list[Edge] = known[key]
    return found


def message_bytes(profile: Profile, numbers: tuple[int, ...], samples: Amount) -> int:
    """Bytes of some crossings together."""
    known, key = profile.known_stages, (numbers, samples)
    if key not in known:
        known[key] = sum(profile.crossings[n].bytes(samples) for n in numbers)
    found: int = known[key]
    return found
