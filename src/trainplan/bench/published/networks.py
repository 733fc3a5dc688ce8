"""Networks by the names that published tables have for them.

Those of the zoo are torchvision's. Others are built by torchvision or timm where these are installed; a row whose
network cannot be built is left out, by name.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from trainplan.profile.estimate import traced
from trainplan.profile.traced import Traced
from trainplan.workload.load import load
from trainplan.workload.workload import Workload
from trainplan.workload.zoo import NETWORKS

ZOO = {"mobilenetv2_100": "mobilenetv2", "mobilenet_v2": "mobilenetv2"}
# Names in pipedream's profiles: ResNeXts of 32 groups of 4.
OTHER = {"resnext50": "resnext50_32x4d", "resnext101": "resnext101_32x4d"}
OPTIONS: dict[str, dict[str, Any]] = {"inception_v3": {"aux_logits": False, "init_weights": False}}
SIDES = {"inception_v3": 299}
SIZES = (4, 8)  # that are traced, where a model does other things for other batches


@cache
def network(name: str, side: int = 0, autocast: str = "") -> Traced | None:
    """What a network does on a GPU, on images of this side (0: its own); None: it cannot be built here."""
    side = side or SIDES.get(name, 224)
    workload = _workload(name, side)
    return None if workload is None else traced(workload, SIZES, gpu=True, autocast=autocast)


def _workload(name: str, side: int) -> Workload | None:
    zoo = ZOO.get(name, name)
    if zoo in NETWORKS and side == 224:
        return load(f"{zoo}:imagenet")
    make = _maker(OTHER.get(name, name))
    if make is None:
        return None
    return load(make(), inputs=lambda samples, seed: _images(samples, side), loss="cross_entropy", batch=SIZES[0])


def _images(samples: int, side: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(samples, 3, side, side), torch.zeros(samples, dtype=torch.long)


def _maker(name: str) -> Callable[[], nn.Module] | None:
    vision = _installed("torchvision.models")
    if vision is not None and callable(getattr(vision, name, None)):
        return lambda: getattr(vision, name)(**OPTIONS.get(name, {}))
    timm = _installed("timm")
    if timm is None or not timm.is_model(name):
        return None
    _installed("timm.layers").set_fused_attn(False)  # as when the tables were made: attention one by one
    return lambda: timm.create_model(name)


def _installed(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except (ImportError, RuntimeError):  # torchvision of another torch
        return None
