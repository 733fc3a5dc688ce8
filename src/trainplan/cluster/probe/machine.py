"""What this machine is: processor, cores and memory that we may use, versions. Imports no torch."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import time
from pathlib import Path

import psutil

from trainplan.version import VERSION


def processor() -> str:
    """The processor's name.

    >>> bool(processor())
    True
    """
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    found = re.search(r"^(?:model name|Hardware)\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine() or "unknown processor"


def cores() -> int:
    """Cores that this process may use: its affinity, and the share that a container was given.

    >>> cores() >= 1
    True
    """
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cgroup("cpu.max", "cpu/cpu.cfs_quota_us").split()
    period = _cgroup("", "cpu/cpu.cfs_period_us") or "100000"
    if quota and quota[0].lstrip("-").isdigit() and int(quota[0]) > 0:
        share = int(quota[0]) / int(quota[1] if len(quota) > 1 else period)
        return max(1, min(affinity, round(share)))
    return affinity


def network() -> str:
    """Whose network this process is in: where others are in another one, what passes between them leaves it.

    >>> network() == network()
    True
    """
    space = Path("/proc/self/ns/net")
    return f"{platform.node()}/{os.readlink(space)}" if space.exists() else platform.node()


def memory_bytes() -> int:
    """Memory that this process may use: the machine's, or what its container was given.

    >>> memory_bytes() > 2**20
    True
    """
    total: int = psutil.virtual_memory().total
    limit = _cgroup("memory.max", "memory/memory.limit_in_bytes")
    return min(total, int(limit)) if limit.isdigit() else total


def accelerators() -> int:
    """CUDA devices that the installed torch could use, found without importing it."""
    if not torch_knows_cuda():
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([word for word in visible.split(",") if word.strip() not in ("", "-1")])
    return sum(line.startswith("GPU ") for line in _nvidia_smi("-L"))


def torch_knows_cuda() -> bool:
    """Whether the installed torch could use a GPU at all, found without importing it."""
    return "cpu" not in torch_version() and _torch_has_cuda()


def gpu_memory_in_use() -> dict[str, int]:
    """Bytes of each GPU that processes hold already, by the GPU's identifier; none where that cannot be asked."""
    rows = [line.split(",") for line in _nvidia_smi("--query-gpu=uuid,memory.used", "--format=csv,noheader,nounits")]
    # A GPU whose memory is not told (N/A) is left out.
    return {uuid.strip().removeprefix("GPU-"): int(used) * 2**20 for uuid, used in rows if used.strip().isdigit()}


def _nvidia_smi(*arguments: str) -> list[str]:
    """The lines that NVIDIA's tool answers; none where there is no such tool or GPU."""
    tool = shutil.which("nvidia-smi")
    if not tool:
        return []
    try:
        answer = subprocess.run([tool, *arguments], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return answer.stdout.splitlines() if answer.returncode == 0 else []


class Load:
    """How much of the machine others use, from its making on."""

    def __init__(self) -> None:
        self.started, self.busy, self.own = time.monotonic(), _busy_s(), _own_s()

    def of_others(self) -> float:
        """Share of all cores' time that neither we nor our children that have ended used."""
        passed = time.monotonic() - self.started
        others = (_busy_s() - self.busy) - (_own_s() - self.own)
        return min(1.0, max(0.0, others / (passed * (psutil.cpu_count() or 1)))) if passed > 0 else 0.0


def _busy_s() -> float:
    """Seconds that all cores of this machine have worked since it started."""
    times = psutil.cpu_times()
    # guest time is part of user time already; waiting for a disk is not work
    return float(sum(getattr(times, kind, 0.0) for kind in ("user", "nice", "system", "irq", "softirq", "steal")))


def _own_s() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def torch_version() -> str:
    """The version of the torch that workers would import."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return "none"


def versions() -> dict[str, str]:
    """What a measurement depends on, besides the machine."""
    return {"trainplan": VERSION, "torch": torch_version(), "python": platform.python_version()}


def identity() -> dict[str, str]:
    """What tells this machine from another one."""
    return {
        "host": platform.node(),
        "processor": processor(),
        "cores": str(cores()),
        "memory": str(memory_bytes()),
        "system": f"{platform.system()} {platform.release()}",
    }


def cache_folder() -> Path:
    """Where measurements of this user are kept: $XDG_CACHE_HOME/trainplan, or ~/.cache/trainplan."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "trainplan"


def _torch_has_cuda() -> bool:
    """Whether torch was built for CUDA, as its version file says."""
    spec = importlib.util.find_spec("torch")  # finds it, does not import it
    if spec is None or spec.origin is None:
        return False
    try:
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return False
    return re.search(r"^cuda\b[^=]*=\s*['\"]", text, re.MULTILINE) is not None


def _cgroup(version2: str, version1: str) -> str:
    """A control-group file's text; empty where there is none."""
    for name in (version2, version1):
        path = Path("/sys/fs/cgroup") / name
        if name and path.is_file():
            try:
                return path.read_text(encoding="utf-8").strip()
            except OSError:
                continue
    return ""
