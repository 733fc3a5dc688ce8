"""How gradients are summed over replicas: one module for each algorithm, a pure function to rounds of transfers.

An exchange is described here once, as data. The clock prices its rounds (`predict/exchanges.py`), the engine sends what
they say (`engine/exchanges.py`), and the account of bytes counts them (`program/traffic.py`). What a backend does
itself (`exchange=all-reduce`) is no such data: of gloo we know what each rank sends (`gloo.py`).

    word                rounds                  sent by a rank
    ring                2 (W − 1)               2 (W − 1)/W · B
    tree                2 ⌈log₂ W⌉              ≤ ⌈log₂ W⌉ · B; 2 (W − 1) · B by all together
    hierarchical        2 (m − 1) + 2 (n − 1)   2 (m − 1)/m · B inside, 2 (n − 1)/n · B/m between nodes
    all-to-all          1                       (W − 1) · B
    all-to-all-sliced   2                       2 (W − 1)/W · B
    halving-doubling    2 log₂ W                2 (W − 1)/W · B, where W is a power of two

No word of a plan, since it adds nothing up, is how ranks tell each other what is ready (`telling.py`): ⌈log₂ W⌉ rounds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from trainplan.program.exchanges.all_to_all import sliced, whole
from trainplan.program.exchanges.halving import halving
from trainplan.program.exchanges.hierarchical import hierarchical, nodes_of
from trainplan.program.exchanges.ring import ring
from trainplan.program.exchanges.rounds import Rounds
from trainplan.program.exchanges.telling import telling
from trainplan.program.exchanges.tree import tree

HIERARCHICAL = "hierarchical"
# By word of a plan: (members, elements) → rounds. The one that asks where the members are is apart.
_FLAT: dict[str, Callable[[int, int], Rounds]] = {
    "ring": ring,
    "tree": tree,
    "all-to-all": whole,
    "all-to-all-sliced": sliced,
    "halving-doubling": halving,
}
BY_ROUNDS = (*_FLAT, HIERARCHICAL)  # which sum
TELLING = "telling"


@lru_cache(maxsize=512)
def rounds_of(word: str, members: tuple[int, ...], elements: int, node: int = 0) -> Rounds:
    """The rounds in which these ranks sum so many elements; `node`: how many ranks each node has.

    >>> [len(rounds_of(word, (0, 1, 2, 3), 100, node=2)) for word in BY_ROUNDS]
    [6, 4, 1, 2, 4, 4]
    """
    if word == HIERARCHICAL:
        return hierarchical(nodes_of(members, node), elements)
    if word == TELLING:
        return telling(len(members), elements)
    return _FLAT[word](len(members), elements)
