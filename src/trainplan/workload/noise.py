"""The benchmark suite's synthetic data: images of uniform noise as JPEG, one folder a class, on local disk.

A data set is written to a folder beside its place and renamed when it is whole, so a reader never sees half of one;
where it is there already, nothing is done. Several processes may write at once: the first to finish wins.
"""

from __future__ import annotations

import io
import os
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image

from trainplan import files
from trainplan.errors import InputError
from trainplan.units import gib
from trainplan.workload.datasets import Dataset, dataset

MARKER = "dataset.json"
CHUNK = 256  # images between two calls of `progress`


def write_noise(
    root: str | Path,
    name: str,
    samples: int = 0,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """The folder of a data set of the table with so many training images (0: all), written if it is not there.

    `progress(done, samples)` is called now and then. Image i is of class i modulo the number of classes, and a
    function of (seed, i).
    """
    entry = dataset(name)
    samples = samples or entry.training
    if samples < 1:
        raise InputError(f"{samples} images of {entry.title}", "at least one is needed", f"{entry.classes} or more")
    place = Path(root) / f"{entry.key}-{samples}-seed{seed}"
    content = {"dataset": entry.key, "samples": samples, "seed": seed, "shape": list(entry.shape)}
    if _whole(place, content):
        return place
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(place.parent).free
        half_done = Path(tempfile.mkdtemp(dir=place.parent, prefix=f".{place.name}."))
    except OSError as error:
        raise InputError(f"data in {place}", f"it cannot be written ({error.strerror})", "another folder") from None
    try:
        each = len(_noise(entry, seed, 0)) + 4096  # a file takes whole blocks of the disk
        if each * samples > free:
            raise InputError(
                f"{samples} images of {entry.title} in {place.parent}",
                f"they need about {gib(each * samples)}, and {gib(free)} are free",
                f"{free * 9 // 10 // each} images or another folder",
            )
        half_done.chmod(0o755)  # as any new folder; a temporary one is its owner's alone
        _write(half_done / "train", entry, samples, seed, progress)
        files.write(half_done / MARKER, "dataset", content)
        os.replace(half_done, place)
    except OSError as error:
        if _whole(place, content):  # another process was quicker
            return place
        raise InputError(f"data in {place}", f"it cannot be written ({error.strerror})", "another folder") from None
    finally:
        shutil.rmtree(half_done, ignore_errors=True)
    return place


def _whole(place: Path, content: object) -> bool:
    if not place.exists():
        return False
    if (place / MARKER).is_file() and files.read(place / MARKER, "dataset") == content:
        return True
    raise InputError(f"data in {place}", "the folder is there, but is not this data set", "removing it")


def _write(folder: Path, entry: Dataset, samples: int, seed: int, progress: Callable[[int, int], None] | None) -> None:
    digits = len(str(entry.classes - 1))
    classes = [folder / f"{label:0{digits}}" for label in range(entry.classes)]
    for path in classes:
        path.mkdir(parents=True)

    def write(index: int) -> None:
        path = classes[index % entry.classes] / f"{index:0{len(str(samples - 1))}}.jpg"
        path.write_bytes(_noise(entry, seed, index))

    # Threads suffice: drawing and encoding both run outside Python's lock.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for start in range(0, samples, CHUNK):
            end = min(start + CHUNK, samples)
            list(pool.map(write, range(start, end)))
            if progress is not None:
                progress(end, samples)


def _noise(entry: Dataset, seed: int, index: int) -> bytes:
    channels, height, width = entry.shape
    pixels = np.random.default_rng((seed, index)).integers(0, 256, (height, width, channels), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels[:, :, 0] if channels == 1 else pixels).save(stream, "JPEG")
    return stream.getvalue()
