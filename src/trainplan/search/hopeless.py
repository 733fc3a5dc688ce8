"""Whether a plan is too big by its bounds alone, however it is cut: then nobody has to simulate it to say that it is.

Most changes of a plan that is far too big are far too big as well. The bound is the one by which a search rules plans
out (`room.py`), of one plan that need not be in its space. What goes away to the hosts does not count.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from trainplan.cluster.cluster import Cluster
from trainplan.errors import PlanError
from trainplan.plan import rules
from trainplan.plan.plan import Plan, plan
from trainplan.predict.planned import planned
from trainplan.profile.profile import Profile
from trainplan.search.blocks import Blocks, Lasting
from trainplan.search.columns import as_given
from trainplan.search.room import columns, fitting

_SUMMED = plan().exchange  # by others, servers may have what else ranks would


class Hopeless:
    """Of plans for a model on a cluster. What they have in common is worked out once."""

    def __init__(self, profile: Profile, cluster: Cluster) -> None:
        self.profile, self.cluster = profile, cluster
        self._lasting: dict[int, Lasting] = {}
        self._blocks: dict[tuple[int, int], Blocks] = {}

    def __call__(self, sketch: Plan, batch: int) -> bool:
        """Whether a plan that is legal cannot fit with any cuts; of one that is not, nothing is said."""
        if sketch.exchange != _SUMMED or sketch.order or sketch.wanted > sketch.blocks:
            return False
        try:
            rules.check(replace(sketch, stages=tuple(range(1, sketch.wanted))), batch, self.cluster.world)
            own = planned(sketch, self.profile, self.cluster)
        except PlanError:
            return False
        samples, larger = divmod(-(-batch // sketch.dp), sketch.micro)
        parts = [self._of(own, samples), self._of(own, samples + (larger > 0))]
        # Twice: numpy calls a single row contiguous, for which everything would have to be compiled once more.
        space = as_given([sketch] * 2, own, self.cluster, batch, sketch.precision)
        room = columns(space, parts, np.zeros(2, np.int64), np.ones(2, np.int64), np.full(2, larger))
        if sketch.offload != "none":
            room = room._replace(left=np.zeros_like(room.left))
        return not fitting(room, self.cluster)[0]

    def _of(self, profile: Profile, samples: int) -> Blocks:
        """What blocks take for so many samples; their seconds are no matter here. (Profiles stay with what is theirs,
        so no other has the same name.)"""
        if id(profile) not in self._lasting:
            self._lasting[id(profile)] = Lasting(profile)
        if (id(profile), samples) not in self._blocks:
            self._blocks[id(profile), samples] = Blocks(self._lasting[id(profile)], profile, samples, 1.0)
        return self._blocks[id(profile), samples]
