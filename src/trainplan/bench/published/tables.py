"""Which published tables there are, and what predictions make of them.

A folder has any of them, as files of their names; each is scored by the function that knows it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trainplan.bench.published import collectives, grids, layers, one_device, sharded
from trainplan.errors import InputError, nearest

Say = Callable[[str], None]
TABLES: dict[str, Callable[[Path, Say], dict[str, Any]]] = {
    grids.VTRAIN: grids.single_node,
    sharded.MPT: sharded.sharded,
    "timm_train_rtx3090_subset.csv": one_device.timm,
    "pipedream_profile_totals.csv": one_device.pipedream,
    "pipedream_profile_layers_vgg16_alexnet.csv": layers.pipedream_layers,
    "pytorch_gpu_benchmark_ryujaehun_subset.csv": one_device.ryujaehun,
    "lambda_labs_pytorch_subset.csv": one_device.lambda_labs,
    "matmul_mamf.csv": layers.products,
    collectives.VTRAIN: collectives.vtrain_sums,
    collectives.NCCL: collectives.nccl_tests,
}


def wanted(folder: Path, only: Sequence[str] = ()) -> list[str]:
    """The tables of a folder that are known; of these, those whose names begin with one of `only`."""
    if not folder.is_dir():
        raise InputError(f"--data {folder}", "there is no such folder", "the folder that has the tables")
    for word in only:
        if not any(name.startswith(word) for name in TABLES):
            begins = [name.partition("_")[0] for name in TABLES]
            raise InputError(f"--only {word}", f"the tables begin with: {', '.join(begins)}", nearest(word, begins))
    there = [name for name in TABLES if (folder / name).is_file() and (not only or name.startswith(tuple(only)))]
    if not there:
        asked = [name for name in TABLES if not only or name.startswith(tuple(only))]
        raise InputError(f"--data {folder}", "no table in it is known", ", ".join(asked))
    return there
