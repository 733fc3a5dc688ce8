"""Between measured points: a smooth surface through scattered ones.

What is interpolated is not seconds, which run over six orders of magnitude, but the logarithm of their ratio to a
simple expectation, which is of order one everywhere. Points need not form a grid, so that a measurement that was cut
short, or a point that did not fit into memory, leaves no hole.
"""

from __future__ import annotations

import numpy as np

RIDGE = 0.05  # keeps the plane level where the neighbours do not say how it slopes


class Surface:
    """Exact at its points, a plane through the nearest ones between them, level beyond them.

    >>> line = Surface(np.array([[0.0], [2.0], [4.0]]), np.array([0.0, 1.0, 1.0]))
    >>> [round(line.at(np.array([x])), 3) for x in (-5.0, 1.0, 2.0, 9.0)]
    [0.0, 0.5, 1.0, 1.0]
    """

    def __init__(self, places: np.ndarray, values: np.ndarray) -> None:
        self.places, self.values = places, values
        self.low, self.high = places.min(axis=0), places.max(axis=0)
        if places.shape[1] == 1:
            order = np.argsort(places[:, 0])
            self.places, self.values = places[order], values[order]

    def at(self, where: np.ndarray) -> float:
        """The value there."""
        where = np.clip(where, self.low, self.high)
        if len(where) == 1:
            return float(np.interp(where[0], self.places[:, 0], self.values))
        away = ((self.places - where) ** 2).sum(axis=1)
        count = min(len(away), 2 * len(where) + 4)
        near = np.argpartition(away, count - 1)[:count]
        distance = away[near]
        values = self.values[near]
        if distance.min() < 1e-9:
            return float(values[distance.argmin()])
        weight = distance**-1.5
        weight /= weight.sum()
        middle = float(weight @ values)
        # A weighted plane, whose slope is held back; never beyond what the neighbours themselves show.
        offset = self.places[near] - where
        centre = weight @ offset
        centred = offset - centre
        normal = centred.T @ (centred * weight[:, None])
        normal += RIDGE * np.eye(len(where))
        slope = np.linalg.solve(normal, centred.T @ (weight * (values - middle)))
        return float(np.clip(middle - centre @ slope, values.min(), values.max()))
