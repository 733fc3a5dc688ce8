"""Made-up models for searches: uneven blocks, real-looking sizes."""

import random
from dataclasses import replace

from synthetic import chain
from trainplan.profile.profile import Profile
from trainplan.units import MIB

SIZES = (1, 2, 4, 8, 16, 32, 64)


def model(seed: int = 0, blocks: int = 8, device: str = "TitanRTX", in_parts: bool = False, **fields) -> Profile:
    """Blocks of different cost; a fixed cost per call, so that small micro-batches compute less efficiently.

    `in_parts`: backward was measured in two parts, too, which take a fifth longer than the whole.
    """
    rng = random.Random(seed)
    even = chain(
        **{
            "blocks": blocks, "saved": 8 * MIB, "boundary": 10**5, "weights": 16 * MIB, "samples": SIZES,
            "flat": False, "device": device, "samples_per_epoch": 6400, **fields,
        }
    )  # fmt: skip
    rows = []
    for block in even.blocks:
        weight, fixed = rng.uniform(0.5, 2.0) * 1e-3, rng.uniform(0.1, 0.4) * 1e-3
        forward = tuple(fixed + weight * n for n in SIZES)
        saved = tuple(float(block.saved_bytes[0]) * n * rng.uniform(0.5, 1.5) for n in SIZES)
        half = tuple(1.2 * t for t in forward) if in_parts else ()
        rows.append(
            replace(
                block, forward_s=forward, backward_s=tuple(2 * t for t in forward), saved_bytes=saved,
                backward_input_s=half, backward_weight_s=half,
            )
        )  # fmt: skip
    return replace(even, blocks=tuple(rows))
