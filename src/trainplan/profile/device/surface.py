"""Between measured points: a smooth surface near scattered ones.

What is interpolated is not seconds, which run over six orders of magnitude, but the logarithm of their ratio to a
simple expectation, which is of order one everywhere. Points need not form a grid, so that a measurement that was cut
short, or a point that did not fit into memory, leaves no hole.

The method is kriging: points say the more about a place the nearer they are, and the less the more of them say the
same; how near is near is a matter of coordinates, in which a distance of one is far (`coordinates`). It is done anew
for each place with the points around it, of which there are always few: solving for all at once would take seconds.
"""

from __future__ import annotations

from math import sqrt

import numpy as np

NEIGHBOURS = 32
# Many points are equally far, as they lie on grids; which are the nearest is not to hang on how a processor sorts.
TIE = 1e-9
ROUGH = 0.01  # share of the variance that no neighbour tells: libraries change their kernels from one shape to the next


class Surface:
    """What was measured at its points; between them what the nearest ones say; level beyond them.

    >>> line = Surface(np.array([[0.0], [0.5], [1.0]]), np.array([0.0, 1.0, 1.0]))
    >>> line.at(np.array([[-5.0], [0.25], [0.5], [9.0]])).round(2).tolist()
    [0.0, 0.52, 1.0, 1.0]
    """

    def __init__(self, places: np.ndarray, values: np.ndarray) -> None:
        order = np.lexsort(places.T)  # so it does not matter in which order they were measured
        self.places, self.values = places, values = places[order], values[order]
        self.low, self.high = places.min(axis=0), places.max(axis=0)
        self._squares = (places**2).sum(axis=1) + TIE * np.arange(len(places))
        self._count = min(len(places), NEIGHBOURS)

    def at(self, where: np.ndarray) -> np.ndarray:
        """The values at some places, a row each."""
        where = np.clip(where, self.low, self.high)
        away = self._squares - 2 * (where @ self.places.T)  # less the square of `where` itself
        near = np.argpartition(away, self._count - 1, axis=1)[:, : self._count]
        places, values = self.places[near], self.values[near]
        distance = _lengths(places - where[:, None])
        alike = _likeness(_lengths(places[:, :, None] - places[:, None])) + ROUGH * np.eye(self._count)
        solved = np.linalg.solve(alike, np.stack([np.ones_like(values), values], axis=2))
        middle = solved[:, :, 1].sum(axis=1) / solved[:, :, 0].sum(axis=1)
        weights = solved[:, :, 1] - middle[:, None] * solved[:, :, 0]
        found = middle + (_likeness(distance) * weights).sum(axis=1)
        found = np.clip(found, values.min(axis=1), values.max(axis=1))
        nearest = distance.argmin(axis=1)[:, None]
        exact = np.take_along_axis(distance, nearest, axis=1)[:, 0] < 1e-6
        return np.where(exact, np.take_along_axis(values, nearest, axis=1)[:, 0], found)


def _lengths(vectors: np.ndarray) -> np.ndarray:
    return np.sqrt((vectors**2).sum(axis=-1))


def _likeness(distance: np.ndarray) -> np.ndarray:
    """How much two values are alike that are so far apart: Matérn's function of order 3/2."""
    scaled = sqrt(3) * distance
    return (1 + scaled) * np.exp(-scaled)
