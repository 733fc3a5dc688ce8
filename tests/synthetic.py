"""Profiles made of numbers, for tests that need no model."""

from trainplan.profile.profile import Block, Crossing, Parameter, Profile
from trainplan.profile.provenance import Provenance


def chain(
    blocks: int = 4,
    forward: float = 1.0,
    backward: float = 2.0,
    saved: int = 100,
    boundary: int = 10,
    weights: int = 1000,
    skips: tuple[tuple[int, int], ...] = (),
    tied: tuple[tuple[int, ...], ...] = (),
    samples: tuple[int, ...] = (1,),
    flat: bool = True,
    **fields,
) -> Profile:
    """A chain of equal blocks. `flat`: the times do not grow with the micro-batch."""

    def curve(value: float) -> tuple[float, ...]:
        return tuple(value if flat else value * n for n in samples)

    if flat and len(samples) == 1:
        samples = (1, 1_000_000)
    zero = curve(0.0)
    rows = tuple(
        Block(
            f"b{i}", 1e6, curve(forward), curve(backward), 0.0, 0.0, zero, zero, 0.0,
            tuple(float(saved) for _ in samples), zero, zero,
        )
        for i in range(blocks)
    )  # fmt: skip
    crossings = [Crossing(f"h{i}", i, (i + 1,), 0.0, boundary) for i in range(blocks - 1)]
    crossings += [Crossing(f"skip{a}-{b}", a, (b,), 0.0, boundary) for a, b in skips]
    parameters = [Parameter(f"w{i}", (i,), weights // 4, weights) for i in reversed(range(blocks))]
    parameters += [Parameter(f"tied{i}", group, weights // 4, weights) for i, group in enumerate(tied)]
    values = {
        "workload": "synthetic", "sample": "sample", "tokens_per_sample": 0, "batch": 8, "samples_per_epoch": 80,
        "device": "cpu", "kind": "measured", "compiled": False, "precision": "fp32", "optimizer": "sgd",
        "state_bytes_per_parameter": 0.0, "samples": samples, "blocks": rows, "crossings": tuple(crossings),
        "parameters": tuple(parameters), "input_bytes_per_sample": 0.0, "provenance": Provenance("test", "2026-01-01"),
        "products_in": "fp32", "convolutions_in": "fp32",
    }  # fmt: skip
    return Profile(**{**values, **fields})
