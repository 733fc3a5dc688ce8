"""A file of tokens, mapped into memory: sample i is the i-th window of the workload's length.

`.npy` files say what they hold. Any other file is flat binary, little-endian: uint16 unless another type is named
(the form that nanoGPT and others write).
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainplan import files
from trainplan.errors import InputError, nearest
from trainplan.workload.batch import join
from trainplan.workload.loader import random_for
from trainplan.workload.workload import Batch, Workload

DTYPES = ("uint16", "uint32", "int32", "int64")


class TokenFile:
    """Windows of tokens, and for each token the one that follows."""

    decodes = True

    def __init__(self, path: str | Path, workload: Workload, samples: int = 0, dtype: str = "uint16") -> None:
        self.path, self.dtype, self.length, self.feed = Path(path), dtype, workload.tokens_per_sample, workload.feed
        if not self.length:
            raise InputError(f"tokens:{path} for {workload.name}", "it takes no tokens", "memory or folder:PATH")
        if dtype not in DTYPES:
            raise InputError(f"tokens:{path},dtype={dtype}", "tokens are not stored so", nearest(dtype, DTYPES))
        self.tokens = self._open()
        available = (len(self.tokens) - 1) // self.length  # the last token is only ever a target
        if available < max(samples, 1):
            raise InputError(
                f"{max(samples, 1)} samples of tokens:{path}",
                f"its {len(self.tokens):,} tokens hold {max(available, 0)} windows of {self.length}",
                "a longer file, fewer samples or a shorter length",
            )
        self.samples = samples or available

    def _open(self) -> Any:
        asked = f"tokens:{self.path}"
        try:
            if self.path.suffix == ".npy":
                tokens = np.load(self.path, mmap_mode="r")
            else:
                self._refuse_text(asked)
                tokens = np.memmap(self.path, dtype=np.dtype(self.dtype).newbyteorder("<"), mode="r")
        except OSError as error:
            instead = files.neighbour(self.path, f"a file of {self.dtype} tokens, or a .npy of one row")
            raise InputError(asked, f"it cannot be read ({error.strerror or error})", instead) from None
        except ValueError as error:  # empty, not a whole number of tokens, not a .npy
            raise InputError(asked, f"it is not a file of {self.dtype} tokens ({error})", "naming its dtype") from None
        if tokens.ndim != 1 or tokens.dtype.name not in DTYPES:
            raise InputError(asked, f"it holds {tokens.dtype} of shape {tokens.shape}", f"one row of {DTYPES[0]}")
        return tokens

    def _refuse_text(self, asked: str) -> None:
        with self.path.open("rb") as file:
            if _is_text(file.read(1024)):
                instead = f"its tokens, as numbers: numpy.array(ids, dtype='{self.dtype}').tofile(FILE)"
                raise InputError(asked, "it is text, not yet in tokens", instead)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "tokens": None}  # a worker process maps the file itself

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.tokens = self._open()

    def __len__(self) -> int:
        return self.samples

    def fetch(self, indices: Sequence[int], epoch: int, seed: int) -> Batch:
        return join([self._sample(index, random_for(seed, epoch, index)) for index in indices])

    def _sample(self, index: int, random: torch.Generator) -> Batch:
        start = index * self.length
        window = torch.from_numpy(self.tokens[start : start + self.length + 1].astype(np.int64))
        if self.feed is not None:
            return self.feed(window[:-1], window[1:], random)
        return Batch(1, args=(window[None, :-1],), targets=window[None, 1:])


def _is_text(begin: bytes) -> bool:
    """Whether a file that begins so is written in letters, which could be read as (senseless) tokens.

    >>> _is_text("Ein Anfang, der länger ist als dreißig Zeichen."[:-1].encode()), _is_text(bytes(range(64)))
    (True, False)
    """
    try:
        text = getincrementaldecoder("utf-8")().decode(begin)  # which does not mind a letter that is cut off
    except UnicodeDecodeError:
        return False
    return len(text) >= 32 and all(letter.isprintable() or letter.isspace() for letter in text)
