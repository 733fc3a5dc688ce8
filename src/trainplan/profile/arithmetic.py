"""In which precision a device really does the products and convolutions of a model.

Numbers of 32 bits are not always multiplied as such: with tensor cores torch runs convolutions in tf32 unless told
not to, and matrix products if told to. Peaks differ by a factor of eight, so whoever divides by one must know.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from trainplan.profile.profile import MIXED

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
UNKNOWN = ""


def stored_in(dtypes: Iterable[torch.dtype]) -> str:
    """The precision that a model's weights are kept in; where they differ all of them, which is no precision of a rule.

    >>> stored_in([torch.bfloat16, torch.bfloat16]), stored_in([torch.float16, torch.float32]), stored_in([])
    ('bf16', 'mixed fp32 and fp16', 'fp32')
    """
    found = {dtype for dtype in dtypes if dtype.is_floating_point} or {torch.float32}
    names = [_name(dtype) for dtype in sorted(found, key=lambda dtype: (-dtype.itemsize, str(dtype)))]
    return names[0] if len(names) == 1 else f"{MIXED} {' and '.join(names)}"


def _name(dtype: torch.dtype) -> str:
    return NAMES.get(dtype, str(dtype).removeprefix("torch."))


def runs_in(device: torch.device, stored: str) -> tuple[str, str]:
    """The precision of (matrix products, convolutions) of weights that are stored in one, as torch is set now; of
    weights in several it is not known.

    >>> runs_in(torch.device("cpu"), "fp32"), runs_in(torch.device("cpu"), "bf16")
    (('fp32', 'fp32'), ('bf16', 'bf16'))
    """
    if stored not in NAMES.values():
        return UNKNOWN, UNKNOWN
    if stored != "fp32":
        return stored, stored
    backends: Any = torch.backends
    if device.type == "cuda":
        cores = torch.cuda.get_device_capability(device) >= (8, 0)
        return of_setting(backends.cuda.matmul.fp32_precision, cores), of_setting(
            backends.cudnn.conv.fp32_precision, cores
        )
    return of_setting(backends.mkldnn.matmul.fp32_precision, None), of_setting(
        backends.mkldnn.conv.fp32_precision, None
    )


def of_setting(setting: str, tensor_cores: bool | None) -> str:
    """What torch's `fp32_precision` comes to on a device with or without tensor cores for it; None: nobody knows.

    >>> [of_setting("tf32", cores) for cores in (True, False, None)], of_setting("none", True)
    (['tf32', 'fp32', ''], 'fp32')
    """
    if setting in ("none", "ieee") or tensor_cores is False:
        return "fp32"
    return setting if tensor_cores else UNKNOWN
