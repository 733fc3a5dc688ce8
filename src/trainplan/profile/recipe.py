"""What a block does, operator by operator, and how several ranks could share it: the value. No torch here.

Tensor parallelism (Shoeybi et al. 2019) cuts products in two ways. The columns of one weight and the rows of the next
are cut, so that all that lies between them is done on a slice, and only what the second one writes has to be summed
over the ranks:

    x ──► column ──► between ──► row ──► sum          x, and what is summed, are whole on every rank
          W₁ = [A B]             W₂ = [C; D]

Going back, the gradient of x is a sum instead. An embedding and the output layer are cut along the vocabulary. What is
not cut, every rank does whole; with `sequence=on` the ranks share it out by tokens, and a sum becomes a scattering of
the sum and a gathering (Korthikanti et al. 2022).

Numbers that grow with the micro-batch are straight lines in the samples, given by two points (`Recipe.samples`).
"""

from __future__ import annotations

from dataclasses import dataclass

from trainplan.profile.op import Op

Line = tuple[float, float]  # at the two sizes


@dataclass(frozen=True)
class Work:
    """One operator of a block."""

    small: Op  # for the smaller micro-batch, and for the larger
    large: Op
    # What of it a rank does of `tp`: "" all of it; "all" a slice of everything; of a product (rows × inner) ·
    # (inner × columns) a slice of its "rows", "inner" or "columns".
    cut: str = ""
    core: bool = False  # of attention, between the product of queries and keys and that with the values
    narrow: float = 1.0  # share of its bytes that are of numbers with a fraction, whose precision may be chosen


@dataclass(frozen=True)
class Kept:
    """Bytes that a block saves for backward."""

    bytes: Line
    cut: bool = False  # a rank keeps its slice
    core: bool = False  # made in the core of attention
    number: bool = True  # with a fraction


@dataclass(frozen=True)
class Recipe:
    """A kind of block; equal blocks share one."""

    samples: tuple[int, int]
    forward: tuple[Work, ...]
    backward: tuple[Work, ...]
    kept: tuple[Kept, ...]
    rows: tuple[Line, ...] = ()  # bytes of what each row product (or embedding) writes, and ranks sum
    columns: tuple[Line, ...] = ()  # bytes of what column products read, once for all that read the same
    tokens: Line = (0.0, 0.0)  # of an output layer that is cut along the vocabulary: those whose losses are summed
    divides: tuple[tuple[str, int], ...] = ()  # what must divide by the ranks: ("heads", 16), ("width", 4096) …
    whole: str = ""  # why nothing of it can be cut; "": something is
    tail: int = 0  # the last operators of forward, whose results backward does not need

    def at(self, line: Line, samples: float) -> float:
        """A line at a number of samples.

        >>> Recipe((2, 4), (), (), ()).at((10.0, 16.0), samples=1)
        7.0
        """
        (a, b), (left, right) = self.samples, line
        return left + (right - left) * (samples - a) / (b - a)


@dataclass(frozen=True)
class Share:
    """How ranks could share a traced block, for one micro-batch size; `Recipe` joins two of these."""

    forward: tuple[str, ...] = ()  # of each operator, how it is cut
    backward: tuple[str, ...] = ()
    core: tuple[int, ...] = ()  # operators of forward
    # Of each operator, forward and back, its bytes of numbers with a fraction, and all its bytes.
    fractions: tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]] = ((), ())
    kept: tuple[tuple[int, bool, bool, bool], ...] = ()  # bytes, and the words of `Kept`
    rows: tuple[int, ...] = ()  # bytes
    columns: tuple[int, ...] = ()
    tokens: int = 0
    divides: tuple[tuple[str, int], ...] = ()
    whole: str = "nothing is known of its operators"
