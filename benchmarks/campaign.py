"""All measurements of one machine with a GPU and many cores, in order of worth, in as many calls as it takes.

    python benchmarks/campaign.py --out campaign.zip --minutes 9
    python benchmarks/campaign.py --out campaign.zip --minutes 9                 goes on where that stopped
    python benchmarks/campaign.py --out new.zip --start campaign.zip --parts d,f  only these parts, from there on
    python -m zipfile -e campaign.zip benchmarks/data

A part is a command of its own with a time limit; what it writes is a file by which it goes on when it is called again.
All files are in one archive, which is written anew every few seconds, so that whoever stops us has everything but the
last moment. `campaign.json` in it says of each part whether it is done, and the end of what it printed. Parts that need
what is not here (a GPU, root for a slow link) are said so and left out; a part that failed is tried again only when
`--parts` names it.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

import torch

from trainplan.bench.limit import UNFINISHED
from trainplan.bench.slow_link import missing

HERE = Path(__file__).parent
GRACE = 45.0  # seconds that a part may take beyond its limit: one measurement, and leaving
PACKED = 5.0  # seconds between two looks whether anything has changed
LEAST = 40.0  # seconds with which it is worth to begin a part
TAIL = 4000  # characters of a part's output that are kept
CPU_WORKLOADS = ["gpt:layers=6,hidden=256,heads=4,seq=128,vocab=1024", "resnet18:cifar10"]


@dataclass(frozen=True)
class Part:
    """One measurement."""

    key: str
    what: str
    words: tuple[str, ...]  # of the command; {out} is the folder of results
    seconds: float  # that it may take in one call
    needs: str = ""  # gpu, or link
    limited: bool = True  # whether it takes --for


def parts(quick: bool) -> list[Part]:
    """What there is to measure, the most worth first; `quick` to try it out, in seconds each and with small numbers."""
    accuracy, engine, exchanges = ("accuracy.py", "engine.py", "exchanges.py")
    few = ("--workloads", "mobilenetv2:cifar10", "--steps", "1", "--rounds", "1", "--seconds", "0.5")
    orders = few if quick else ("--steps", "4", "--rounds", "2", "--seconds", "6")
    summed = few if quick else ("--steps", "6", "--rounds", "1", "--seconds", "5")
    pairs = ("--pairs", "2", "--systems", "ddp", "zero-1") if quick else ("--pairs", "60")
    four, many = ("2", ("2",)) if quick else ("4", ("4", "8", "2"))
    on_cores = orders if quick else (*orders, "--workloads", *CPU_WORKLOADS)
    probed = ("--ranks", "2", "--rounds", "2", "--quick") if quick else ("--ranks", "4", "2", "8", "16", "3")
    tests = ("-m", "pytest", "-q", "-m", "gpu", "tests", "--junitxml={out}/test-gpu.xml")
    slices = ("--slices", four)
    rounds = ("--rounds", "1", "--steps", "1") if quick else ()
    overlapping = ("--plans", "dp=2", "dp=2 zero=1", "dp=2 zero=2", "dp=2 zero=3")

    def command(script: str, name: str, *words: str) -> tuple[str, ...]:
        kept = ("--keep", f"{{out}}/{name}") if script == accuracy else ()  # to be predicted again without the machine
        return script, *words, *kept, "--out", f"{{out}}/{name}.json"

    found = [
        Part("a", "tests on a GPU", tests, 480, "gpu", limited=False),
        Part("b", "orders on slices", command(accuracy, "orders-gpu", "--orders", four, *slices, *orders), 500, "gpu"),
        Part("c", "orders on cores", command(accuracy, "orders-cores", "--orders", four, *on_cores), 400),
        Part("d", "engine against torch", command(engine, "engine-16-cores", "--ranks", four, *pairs), 300),
        Part("e", "the same on slices", command(engine, "engine-gpu", "--ranks", four, *slices, *pairs), 200, "gpu"),
        Part("f", "exchanges on cores", command(accuracy, "exchanges-cores", "--exchanges", *many, *summed), 500),
        Part("g", "on slices", command(accuracy, "exchanges-gpu", "--exchanges", four, *slices, *summed), 500, "gpu"),
        Part("h", "exchanges by themselves", command(exchanges, "exchanges-alone", *probed), 300),
        Part("i", "overlap on a slow link", command("overlap.py", "overlap", *overlapping), 200, "link", limited=False),
    ]
    if (HERE / "preload.py").exists():
        found.append(Part("j", "loading ahead", command("preload.py", "preload", *rounds), 200))
    return [*found, *suites(quick)]


def suites(quick: bool) -> list[Part]:
    """The device's own file, and the benchmark suite: as it is, and under conditions in which no system is always best.

    The largest shapes are for slices of a GPU, with as much memory as the thesis's devices had.
    """
    effort = ("--steps", "1", "--rounds", "1", "--seconds", "0.5") if quick else ("--steps", "4", "--rounds", "2")
    networks = "mobilenetv2" if quick else "resnet18,vgg11,mobilenetv2,resnet50"
    systems = "ddp,recommended" if quick else "single,ddp,zero1,gpipe,dapple,chimera,interleaved,recommended"
    count, minutes = ("2", "0.5") if quick else ("4", "8")

    def suite(name: str, datasets: str, *words: str) -> tuple[str, ...]:
        chosen = ("--networks", networks, "--datasets", datasets, "--systems", systems, "--minutes", minutes)
        return ("-m", "trainplan", "bench", "run", "--out", f"{{out}}/suite-{name}", *chosen, *effort, *words)

    hard = ("-m", "trainplan", "bench", "run", "--out", "{out}/suite-hard", "--hard", "--workers", count)
    hard = (*hard, "--systems", systems, "--minutes", minutes, *effort)
    few, cores, uneven = ("--workers", count), "2" if quick else "2,4,8", ("--uneven", "2")
    measured = ("-m", "trainplan", "device", "measure", "--minutes", "4.5", "-o", "{out}/device.json")
    return [
        Part("k", "a device's file", (*measured, *(("--quick",) if quick else ())), 330, limited=False),
        Part("l", "suite on cores", suite("cores", "mnist,cifar10", "--workers", cores), 540, limited=False),
        Part("m", "uneven workers", suite("uneven", "cifar10", *few, *uneven), 540, limited=False),
        Part("n", "a slow link", suite("link", "cifar10", *few, "--link", "1Gbit/s"), 540, "link", limited=False),
        Part(
            "o", "suite on slices",
            suite("slices", "imagenet,highres", *few, "--slices", count, "--memory", "24GB"), 540, "gpu", limited=False,
        ),
        Part("p", "hard cases, little memory among them", hard, 540, limited=False),
    ]  # fmt: skip


class Archive:
    """A folder of results that is kept in one file."""

    def __init__(self, path: Path, start: Path | None) -> None:
        self.path = path
        self.folder = Path(tempfile.mkdtemp(prefix="campaign-"))
        begun = next((one for one in (path, start) if one is not None and one.exists()), None)
        if begun is not None:
            with zipfile.ZipFile(begun) as packed:
                packed.extractall(self.folder)
        self._state: tuple[tuple[str, int, int], ...] = ()
        self._ends = threading.Event()
        self._lock = threading.Lock()
        threading.Thread(target=self._keep, daemon=True).start()

    def log(self) -> dict[str, dict[str, object]]:
        path = self.folder / "campaign.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def note(self, key: str, entry: dict[str, object]) -> None:
        (self.folder / "campaign.json").write_text(json.dumps({**self.log(), key: entry}, indent=1) + "\n")
        self.pack()

    def pack(self) -> None:
        """Write the file anew if anything has changed, whole or not at all."""
        with self._lock:
            files = sorted(path for path in self.folder.rglob("*") if path.is_file() and not path.name.startswith("."))
            state = tuple((str(path), path.stat().st_mtime_ns, path.stat().st_size) for path in files)
            if state == self._state:
                return
            partial = self.path.with_suffix(".partial")
            with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as packed:
                for path in files:
                    packed.write(path, path.relative_to(self.folder))
            os.replace(partial, self.path)
            self._state = state

    def _keep(self) -> None:
        while not self._ends.wait(PACKED):
            self.pack()

    def close(self) -> None:
        self._ends.set()
        self.pack()
        shutil.rmtree(self.folder, ignore_errors=True)


def lacking(part: Part) -> str:
    """Why a part cannot be measured here; empty: it can."""
    if part.needs == "gpu" and not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no GPU here"
    return missing() if part.needs == "link" else ""


def run(part: Part, archive: Archive, seconds: float) -> None:
    """Run a part for so long at most, and note how it went."""
    words = [word.format(out=archive.folder) for word in part.words]
    script = [str(HERE / words[0]), *words[1:]] if words[0].endswith(".py") else words
    command = [sys.executable, *script] + (["--for", f"{seconds:.0f}"] if part.limited else [])
    source = str(HERE.parent / "src")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH", "")]))
    print(f"== {part.key}  {part.what}, for {seconds:.0f} s", flush=True)
    started, said = time.monotonic(), archive.folder / f".{part.key}.log"
    with said.open("w") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=HERE.parent, start_new_session=True
        )
        try:
            code = process.wait(seconds + (GRACE if part.limited else 0))
        except subprocess.TimeoutExpired:
            code = UNFINISHED
        finally:
            end(process)
    took, tail = time.monotonic() - started, said.read_text(errors="replace")[-TAIL:]
    how = {0: "done", UNFINISHED: "unfinished"}.get(code, "failed")
    print(tail[-1200:] + f"== {part.key}  {how} after {took:.0f} s", flush=True)
    archive.note(part.key, {"what": part.what, "state": how, "code": code, "seconds": round(took), "said": tail})


def end(process: subprocess.Popen[bytes]) -> None:
    """End a part and all that it has started; politely first, since it may have started a service."""
    for how, patience in ((signal.SIGINT, 10), (signal.SIGKILL, 10)):
        try:
            os.killpg(process.pid, how)
            process.wait(patience)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="an archive; if it is there, it is gone on with")
    parser.add_argument("--start", type=Path, help="the archive to go on with, if --out is not there yet")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--parts", default="", help="such as a,c; default: all that are not done")
    parser.add_argument("--quick", action="store_true", help="to try it out: small numbers")
    options = parser.parse_args()
    deadline = time.monotonic() + 60 * options.minutes
    known = parts(options.quick)
    asked = options.parts.split(",") if options.parts else [part.key for part in known]
    unknown = set(asked) - {part.key for part in known}
    if unknown:
        parser.error(f"there is no part {', '.join(sorted(unknown))}: {', '.join(p.key for p in known)}")
    archive = Archive(options.out, options.start)
    try:
        for part in known:
            state = archive.log().get(part.key, {}).get("state")
            if part.key not in asked or state == "done" or (state == "failed" and not options.parts):
                continue
            why = lacking(part)
            if why:
                print(f"== {part.key}  {part.what}: left out, {why}", flush=True)
                continue
            left = deadline - time.monotonic() - (GRACE if part.limited else 0)
            if left < min(LEAST, part.seconds):
                print(f"== {part.key}  {part.what}: no time left", flush=True)
                continue
            run(part, archive, min(part.seconds, left))
    finally:
        archive.close()


if __name__ == "__main__":
    main()
