"""One GPU as several: slices by NVIDIA's Multi-Process Service, a process each."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from trainplan.bench.pool import stop_pools


@contextmanager
def sliced(slices: int) -> Iterator[None]:
    """Give this process, and those that it starts, a share of the GPU's multiprocessors. Starting the service needs
    root; it is stopped afterwards, also when somebody interrupts us."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background are started without it
    with tempfile.TemporaryDirectory() as folder:
        os.environ["CUDA_MPS_PIPE_DIRECTORY"] = os.environ["CUDA_MPS_LOG_DIRECTORY"] = folder
        os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(100 // slices)
        subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True)
        try:
            yield
        finally:
            stop_pools()
            subprocess.run(["nvidia-cuda-mps-control"], input="quit -t 1\n", text=True, check=False)
