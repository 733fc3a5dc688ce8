"""How a profile came about: on what, when and with which versions, and what it can be held against. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class WholeStep:
    """The model run in one piece, to hold the sum of the blocks against."""

    samples: int
    forward_s: float
    backward_s: float
    update_s: float
    peak_bytes: int = 0  # 0: not measured


@dataclass(frozen=True)
class Provenance:
    """On what, when and with which versions a profile was made."""

    machine: str
    made: str  # ISO date and time, UTC
    versions: dict[str, str] = field(default_factory=dict)
    threads: int = 1
    repeats: int = 0
    spread: float = 0.0  # median relative spread (interquartile) of the timings
    reference_s: float = 0.0  # seconds of the reference kernel while this was measured; 0 where estimated
    verified: bool = False  # captured model held against eager on one batch: loss, gradients, buffers
    source: str = ""  # the file of the user's model, where that is one
    digest: str = ""  # of what that file said, and those beside it that it imports; "": nobody wrote it down
