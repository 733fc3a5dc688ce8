"""How long a step would take if communication were free and hosts issued everything at once: the devices' own time.

A device that computes faster than its host issues waits for it: inside a pass, which then takes as long as it is being
issued, and between passes. To the clock both are the pass, so what a step owes to its hosts is found by playing it once
more without them, as what it owes to communication is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from trainplan.predict.clock import Played, compute_seconds, play
from trainplan.predict.cost import Setting, priced
from trainplan.program.ops import COMPUTES
from trainplan.program.program import Program, are

_TALK = ~are(COMPUTES)


@dataclass(frozen=True)
class Prompt:
    """A step whose hosts take no time, and whose communication takes none."""

    step_s: float
    busiest_s: float  # of compute, on the rank that has most
    mean_s: float


class Hosts:
    """Such a step, played when it is first asked for. Until then what it is played from stays, and no longer."""

    def __init__(self, play: Callable[[], Prompt]) -> None:
        self._play: Callable[[], Prompt] | None = play
        self._found: Prompt | None = None

    @property
    def prompt(self) -> Prompt:
        if self._found is None:
            assert self._play is not None
            self._found, self._play = self._play(), None
        return self._found


def prompt(program: Program, setting: Setting, seconds: Callable[[Played], float], most_s: float) -> Prompt:
    """The prompt step of a program, by what reads the `seconds` of a step off; it takes `most_s` at most."""
    run, _, spoken = priced(program, replace(setting, prompt=True))
    run = np.where(_TALK[program.kind], 0.0, run - spoken)
    played = play(program, run)
    busy = compute_seconds(played) / program.steps
    step_s = seconds(played)
    if program.bound is None:
        step_s = max(step_s, float(busy.max()))
    return Prompt(min(step_s, most_s), min(float(busy.max()), most_s), float(busy.mean()))
