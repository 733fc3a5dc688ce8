"""The probe: real processes on this machine."""

import os
import subprocess
import sys
import time

import psutil
import pytest

from trainplan.cluster.cluster import Cluster
from trainplan.cluster.describe import describe
from trainplan.cluster.parse import cluster
from trainplan.cluster.probe import machine
from trainplan.cluster.probe.launch import run_workers
from trainplan.cluster.probe.probe import probe
from trainplan.cluster.yaml_write import to_yaml
from trainplan.errors import InputError, RunError


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(folder)
    yield folder
    if before is None:
        del os.environ["XDG_CACHE_HOME"]
    else:
        os.environ["XDG_CACHE_HOME"] = before


@pytest.fixture(scope="module")
def measured(cache):
    """One quick probe of two workers that all tests share, and what its progress told."""
    told = []
    started = time.monotonic()
    found = probe(2, quick=True, progress=lambda words, share: told.append((words, share)))
    return found, told, time.monotonic() - started


def _children():
    """The processes that were started since this file's tests began, and live: those of tests before are kept."""
    children = psutil.Process().children(recursive=True)
    return [child for child in children if child not in _before and child.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture(scope="module", autouse=True)
def before():
    _before.update(psutil.Process().children(recursive=True))


_before: set[psutil.Process] = set()


def test_two_workers(measured):
    found, told, seconds = measured
    assert (found.name, found.world, found.backend) == ("2xlocal", 2, "gloo")
    assert found.uniform
    device = found.device(0)
    assert device.name == "cpu"
    assert 2 * device.memory_bytes == pytest.approx(machine.memory_bytes(), abs=2)
    assert 0 < device.context_bytes < device.memory_bytes
    assert 1e9 < device.flops["fp32"] < 1e13
    assert 1e8 < device.memory_rate < 1e13
    link = found.link(0, 1)
    assert 1e-6 < link.latency_s < 0.1
    assert 1e7 < link.rate < 1e12
    assert 1e-7 < link.message_s < 0.05
    assert found.contention[0] == 1.0
    assert len(found.contention) == 2
    for factor in (found.slowdown.send, found.slowdown.receive, found.slowdown.collective):
        assert 1.0 <= factor <= 20.0
    assert found.slowdown.copy == found.slowdown.slowed_copy == 1.0
    assert all(1.0 <= factor <= 20.0 for factor in (found.slowdown.slowed_message, found.slowdown.slowed_collective))
    assert 0.0 <= found.spread < 1.0
    assert [share for _, share in told] == sorted(share for _, share in told)
    assert told[0][0] == "starting 2 workers"
    assert told[-1][1] == 1.0
    assert seconds < 45  # 6 to 8 s on two quiet cores
    assert not _children()


A_RANK = """
import psutil, torch, trainplan, trainplan.engine.worker
from torch import nn
model, batch = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), (torch.zeros(2, 4), torch.zeros(2, 2))
trainer = trainplan.build("single", model, nn.functional.mse_loss, torch.optim.SGD, inputs=batch, batch=2)
trainer.step(batch)
print(psutil.Process().memory_info().rss)
"""


def test_what_libraries_take_is_what_they_take_of_a_rank(measured):
    """A rank with a model of thirty numbers: nearly all that is resident are libraries."""
    found, _, _ = measured
    done = subprocess.run([sys.executable, "-c", A_RANK], capture_output=True, text=True, check=True)
    assert found.device(0).context_bytes == pytest.approx(int(done.stdout), rel=0.2)


def test_curves_cover_every_collective_and_size(measured):
    found, _, _ = measured
    parts = {"round", "add", "hub"}  # of what we sum ourselves
    kinds = {(curve.op, curve.ranks, curve.groups) for curve in found.collectives}
    assert kinds == {(op, 2, 1) for op in ("p2p", "all_reduce", "all_gather", "reduce_scatter", "broadcast", *parts)}
    for curve in found.collectives:
        assert curve.bytes[0] <= (4096 if curve.op in parts else 8)
        assert curve.bytes[-1] == 32 * 2**20
        assert list(curve.bytes) == sorted(curve.bytes)
        assert all(0 < seconds < 10 for seconds in curve.seconds)
        # 32 MiB through one machine's memory takes longer than nothing, whatever else runs here.
        assert curve.seconds[-1] > 2 * min(curve.seconds[:3])


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "groups"), [(5, {2: 2, 4: 1}), (8, {2: 4, 4: 2})])
def test_groups_that_are_at_it_at_once(workers: int, groups: dict[int, int], cache):
    """Of as many ranks as fit into the team; whoever is left over waits."""
    found = probe(workers, quick=True, cache=False)
    for op in ("all_reduce", "all_gather", "reduce_scatter"):
        most = {curve.ranks: curve.groups for curve in found.collectives if curve.op == op}
        assert most == {**groups, workers: 1}
    assert not _children()


def test_it_says_on_what_and_when(measured):
    found, _, _ = measured
    assert machine.processor() in found.source
    assert f"torch {machine.torch_version().split('+')[0]}" in found.source
    assert "2 workers of 1 thread" in found.source
    assert "probed 2" in describe(found)


def test_it_survives_its_files(measured, tmp_path):
    found, _, _ = measured
    found.save(tmp_path / "here.json")
    assert Cluster.load(tmp_path / "here.json") == found
    (tmp_path / "here.yaml").write_text(to_yaml(found))
    assert cluster(str(tmp_path / "here.yaml")) == found


def test_it_is_remembered(measured, cache):
    found, _, _ = measured
    files = list((cache / "trainplan").iterdir())
    assert len(files) == 1
    started = time.monotonic()
    assert probe(2, quick=True) == found
    assert time.monotonic() - started < 2


def test_one_worker_needs_no_messages(cache):
    found = probe(1, quick=True, cache=False)
    assert (found.world, found.collectives, found.contention) == (1, (), (1.0,))
    assert "not measured" in found.nodes[0].inside.source
    assert found.device(0).flops["fp32"] > 1e9


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"workers": 0}, "0 workers: from 1 to 256 can be started on one machine"),
        ({"workers": 1000}, "1000 workers: from 1 to 256"),
        ({"workers": 2, "device": "tpu"}, "device tpu: a machine is probed as cpu or cuda. Try cpu."),
        ({"workers": 2, "backend": "mpi"}, "backend mpi: a probe communicates by gloo or nccl. Try gloo."),
        ({"workers": 2, "backend": "nccl"}, "nccl needs a GPU for each worker"),
        ({"workers": 2, "threads": 0}, "0 threads: a worker computes with at least one"),
    ],
)
def test_what_cannot_be_probed(arguments, message):
    with pytest.raises(InputError) as raised:
        probe(**arguments)
    assert message in str(raised.value)


@pytest.mark.skipif(machine.accelerators() > 0, reason="this machine has a GPU")
def test_no_gpu_is_said_without_a_traceback():
    with pytest.raises(RunError) as raised:
        probe(1, device="cuda", cache=False)
    assert "sees no CUDA device here. Try device cpu." in str(raised.value)
    assert "Traceback" not in str(raised.value)
    assert not _children()


# -- workers that go wrong -----------------------------------------------------------------------------------------

SETTINGS = {"device": "cpu", "backend": "gloo", "threads": 1, "quick": True, "seconds": 60, "least_rounds": 3}
SETTINGS["timeout_s"] = 30
SCRIPTS = {
    "raises": "if rank == 1: work = lambda *a: 1 / 0\nelse: work = lambda *a: time.sleep(60)",
    "killed": "if rank == 1: os.kill(os.getpid(), 9)\nwork = lambda *a: time.sleep(60)",
    "hangs": "print('I am stuck', flush=True)\nwork = lambda *a: time.sleep(60)",
    "exits": "print('no more', flush=True)\nos._exit(7)",
    "dies": (
        "import threading\nfrom trainplan.cluster.probe.worker import work\n"
        "if rank == 1: threading.Timer(1.0, lambda: os.kill(os.getpid(), 9)).start()"
    ),
    "well": "work = lambda *a: {'rank': rank, 'threads': os.environ['OMP_NUM_THREADS']}",
}


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A worker module made of the probe's own entry, with another `work`."""

    def make(kind):
        head = "import os, sys, time\nfrom pathlib import Path\nrank = int(sys.argv[2])\n"
        tail = (
            "\nfrom trainplan.cluster.probe import worker\nworker.work = work\n"
            "worker.main(Path(sys.argv[1]), rank, int(sys.argv[3]))\n"
        )
        (tmp_path / f"worker_{kind}.py").write_text(head + SCRIPTS[kind] + tail)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        return f"worker_{kind}"

    return make


def test_workers_that_do_well_return_what_they_left(module):
    assert run_workers(module("well"), 2, {}, timeout_s=30, threads=3) == [
        {"rank": 0, "threads": "3"},
        {"rank": 1, "threads": "3"},
    ]


@pytest.mark.parametrize(
    ("kind", "limit", "message"),
    [
        ("raises", 30, "worker 1 of 2 failed:"),
        ("killed", 30, "worker 1 of 2 was killed by SIGKILL"),
        ("exits", 30, "ended with code 7; its last words:\nno more"),
        ("hangs", 1, "worker 0 of 2 was not done after 1 s"),
        ("dies", 60, "worker 1 of 2 was killed by SIGKILL"),  # in the midst of measuring with the other one
    ],
)
def test_a_worker_that_fails_ends_all(module, kind, limit, message):
    started = time.monotonic()
    with pytest.raises(RunError) as raised:
        run_workers(module(kind), 2, SETTINGS, timeout_s=limit)
    assert message in str(raised.value)
    assert time.monotonic() - started < 20
    if kind == "raises":
        assert "ZeroDivisionError: division by zero" in str(raised.value)
    assert not _children()


def test_workers_end_with_their_launcher(module, tmp_path):
    """A launcher that is killed cannot clean up; its workers notice and end."""
    name = module("hangs")
    code = f"from trainplan.cluster.probe.launch import run_workers; run_workers({name!r}, 1, {{}}, timeout_s=60)"
    launcher = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 20
    workers = []
    while not workers and time.monotonic() < deadline:
        workers = psutil.Process(launcher.pid).children()
        time.sleep(0.05)
    launcher.kill()
    launcher.wait()
    gone, alive = psutil.wait_procs(workers, timeout=15)
    for worker in alive:
        worker.kill()
    assert workers
    assert gone == workers
    assert not alive


def test_this_machine_is_told_without_torch():
    assert machine.cores() >= 1
    assert machine.memory_bytes() > 2**20
    assert machine.versions()["torch"] == machine.torch_version()
    assert machine.identity() == machine.identity()


def test_the_cache_follows_the_platforms_convention(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert machine.cache_folder() == tmp_path / "trainplan"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert machine.cache_folder().parts[-2:] == (".cache", "trainplan")


def test_load_of_others_is_a_share():
    load = machine.Load()
    sum(range(10**6))
    assert 0.0 <= load.of_others() <= 1.0
