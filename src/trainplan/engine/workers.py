"""The workers of a run that may change: which devices have one, and how many somebody wants there to be.

How many there are to be is said in a file, `workers`, in the folder of the run: `echo 4 > FOLDER/workers`. A file,
because whoever decides that (a person, a scheduler's hook, a script on a node that is about to go) need not know a
process, and a signal has no number in it; it can be read, too, and says how many there are now. What cannot be is said
and passed over: a slip of the pen should not end a training.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from trainplan import files
from trainplan.errors import InputError, RunError
from trainplan.units import some

FILE = "workers"


@dataclass(frozen=True)
class Bounds:
    """How many workers a run may have, as torchrun's MIN:MAX has it for nodes."""

    least: int
    most: int

    @staticmethod
    def parse(words: str) -> Bounds:
        """
        >>> Bounds.parse("2:4")
        Bounds(least=2, most=4)
        >>> Bounds.parse("4:2")
        Traceback (most recent call last):
        trainplan.errors.InputError: --elastic 4:2: the least number of workers is above the most. Try --elastic 2:4.
        """
        found = re.fullmatch(r"(\d+):(\d+)", words.strip())
        if found is None:
            number = words.strip() if words.strip().isdecimal() and int(words) else "2"
            why = "it is the least and the most workers that a run may have"
            raise InputError(f"--elastic {words}", why, f"--elastic 1:{number}")
        least, most = int(found[1]), int(found[2])
        if least > most:
            why = "the least number of workers is above the most"
            raise InputError(f"--elastic {words}", why, f"--elastic {most}:{least}")
        if not least:
            raise InputError(f"--elastic {words}", "nobody would be left to train", f"--elastic 1:{max(most, 1)}")
        return Bounds(least, most)

    def __str__(self) -> str:
        return f"{self.least}:{self.most}"


class Workers:
    """The devices that have a worker, and the file that says how many there are to be."""

    def __init__(self, bounds: Bounds, count: int, devices: int) -> None:
        """`count` of them at the beginning, of so many `devices`."""
        asked = f"--elastic {bounds}"
        if bounds.most > devices:
            why = f"there are {some(devices, 'device')} in the cluster"
            raise InputError(asked, why, f"--elastic {min(bounds.least, devices)}:{devices}, or a larger --cluster")
        if not bounds.least <= count <= bounds.most:
            why = f"the plan begins with {some(count, 'worker')}"
            raise InputError(asked, why, f"--elastic {min(count, bounds.least)}:{max(count, bounds.most)}")
        self.bounds, self.places = bounds, tuple(range(count))
        self._file, self._refused = Path(FILE), ""

    @property
    def count(self) -> int:
        return len(self.places)

    def begin(self, folder: Path) -> float:
        """Say how many there are; the time of the file, by the clock of its disk, is when this run began."""
        self._file = folder / FILE
        self._say()
        return self._file.stat().st_mtime

    def _say(self) -> None:
        files.write_text(self._file, f"{self.count}\n")

    def asked(self) -> int | None:
        """How many there are to be, where somebody wants another number of them than there are."""
        try:
            words = self._file.read_text().strip()
        except (OSError, UnicodeDecodeError):
            return None
        if not words or words in (self._refused, str(self.count)):  # who writes it may be at it
            return None
        if words.isdecimal() and self.bounds.least <= int(words) <= self.bounds.most:
            return int(words)
        self._refused = words
        why = f"it is a number from {self.bounds.least} to {self.bounds.most} (--elastic {self.bounds})"
        print(f"{InputError(f'{words[:40]!r} in {self._file}', why, f'{self.count}, as it is')}", flush=True)
        return None

    def with_count(self, count: int) -> tuple[int, ...]:
        """The devices of so many: the first of those that have a worker, and then the first that have none."""
        others = [place for place in range(self.bounds.most) if place not in self.places]
        return tuple(sorted((*self.places, *others)[:count]))

    def become(self, places: tuple[int, ...]) -> None:
        self.places = places
        self._say()

    def lose(self, ranks: Collection[int], why: str, instead: str) -> None:
        """Go on without some; refused where fewer would be left than must be."""
        left = tuple(place for rank, place in enumerate(self.places) if rank not in ranks)
        if len(left) < self.bounds.least:
            few = f"{why}; {some(len(left), 'worker')} left of {self.count}, and {self.bounds.least} is the least"
            raise RunError(f"--elastic {self.bounds}", few, instead)
        wanted = self.asked()
        self.places = left
        if wanted is None or wanted == self.count:  # else somebody has just said what they want
            self._say()
