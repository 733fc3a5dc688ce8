"""One operation of a template."""

from __future__ import annotations

from typing import NamedTuple

from trainplan.program.ops import Kind


class Row(NamedTuple):
    """One operation of a template: what every micro-batch has."""

    kind: Kind
    stage: int
    line: int
    unit: int = 0
    peer: int = -1  # other stage of a message
    size: int = 0  # bytes of several parts that travel together
