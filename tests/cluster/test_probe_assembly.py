"""What the probe makes of samples, with workers that only pretend: a GPU that is not here, and the cache."""

import pytest
import yaml

from trainplan.cluster.parse import cluster
from trainplan.cluster.probe import machine
from trainplan.cluster.probe import probe as probing
from trainplan.cluster.yaml_form import read_cluster
from trainplan.cluster.yaml_write import to_yaml


def _results(device="", sharers=1):
    """Samples of two workers on a machine of round numbers: 100 µs, 1 GB/s, half of communication felt."""
    sizes = (1, 4096, 10**6)
    first = {"product.fp32": [1e11, 3e11, 2e11], "copy": [2e10], "busy.1": [1.0], "busy.2": [1.2], "rounds": [3, 3, 3]}
    first["memory"] = [{"taken": 3 * 2**30, "tensors": 2**30, "total": 80 * 2**30, "gpu": "a1"}]
    first |= {f"p2p.0.1.{size}": [1e-4 + size / 1e9] for size in sizes}
    if device:
        first |= {"host.pinned": [5e10, 6e10], "host.pageable": [2e9]}
    felt = {"alone": 1.0, "communication": 0.5, "issue": 0.0, "together": 1.375, "over": 0.75}
    second = {"busy.2": [1.4]}
    moments = {f"all_reduce.2.{size}": [(0.0, 2e-4 + size / 5e8)] for size in sizes}
    workers = [first | moments | {"overlap.2.send": [felt]}, second | moments | {"overlap.2.receive": [felt]}]
    for worker in workers:
        worker |= {"overlap.2.collective": [felt], "message": [2e-5, 4e-5, 3e-5]}
    rest = {
        "device": device,
        "sharers": sharers,
        "torch": "2.13.0",
        "processors": 132 if device else 0,
        "network": "one",
    }
    return [{"samples": worker} | rest for worker in workers]


@pytest.fixture
def pretend(monkeypatch, tmp_path):
    """Workers that return `_results` at once; counts how often they were asked."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked = []

    def arrange(**kind):
        def run(module, count, settings, **rest):
            asked.append(settings)
            return _results(**kind)

        monkeypatch.setattr(probing, "run_workers", run)
        return asked

    return arrange


def test_cores(pretend):
    pretend()
    found = probing.probe(2)
    device, link = found.device(1), found.link(0, 1)
    assert (device.name, device.flops, device.memory_rate) == ("cpu", {"fp32": 2e11}, 2e10)
    assert device.memory_bytes == machine.memory_bytes() // 2
    assert device.context_bytes == 3 * 2**30
    assert (link.latency_s, link.rate) == (pytest.approx(1e-4, rel=1e-3), pytest.approx(1e9, rel=0.01))
    assert link.message_s == 3e-5
    assert (found.slowdown.send, found.slowdown.receive, found.slowdown.collective) == (2.0, 2.0, 2.0)
    assert (found.slowdown.slowed_message, found.slowdown.slowed_collective) == (1.5, 1.5)
    assert found.contention == (1.0, 1.2)
    assert found.slowdown_of_two is None  # two are all
    assert found.spread == pytest.approx(0.2 / 1.3 / 2**0.5, abs=1e-4)
    assert [(curve.op, curve.ranks) for curve in found.collectives] == [("p2p", 2), ("all_reduce", 2)]


def test_two_workers_of_many_leave_cores_to_communication(pretend, monkeypatch):
    pretend()
    few = _results()
    crowded = {"alone": 1.0, "communication": 0.5, "issue": 0.0, "together": 1.5, "over": 1.0}
    many = [*few, {**few[1], "samples": few[1]["samples"] | {"busy.3": [1.4]}}]
    for worker in many:
        worker["samples"] = worker["samples"] | {"overlap.3.collective": [crowded]}
    monkeypatch.setattr(probing, "run_workers", lambda *_, **__: many)
    found = probing.probe(3, refresh=True)
    assert found.slowdown_of_two.slowed_collective == 1.5
    assert found.slowdown_of(3).slowed_collective == found.slowdown.slowed_collective == 2.0
    assert probing.probe(3, refresh=True, quick=True).slowdown_of_two is None  # there was no time for it


def test_workers_in_two_networks_are_two_nodes_of_one_machine(pretend, monkeypatch):
    """Of four, each two are near each other: whatever passes between the pairs shares one link, and all share cores."""
    pretend()
    first, second = _results()
    near, far, sizes = 1e9, 1e8, (1, 4096, 10**6)
    pairs = {(0, 1): near, (2, 3): near, (0, 2): far, (0, 3): far, (1, 2): far, (1, 3): far}
    samples = first["samples"] | {
        f"p2p.{a}.{b}.{size}": [1e-4 + size / rate] for (a, b), rate in pairs.items() for size in sizes
    }
    samples |= {f"all_reduce.4.{size}": [(0.0, 1.0)] for size in sizes} | {"busy.4": [3.0]}
    workers = [first | {"samples": samples}, second, second, second]
    for result in workers[1:]:
        result["samples"] = result["samples"] | {name: samples[name] for name in samples if name.startswith("all_")}
    workers = [result | {"network": name} for result, name in zip(workers, ("a", "a", "b", "b"), strict=True)]
    monkeypatch.setattr(probing, "run_workers", lambda *_, **__: workers)
    found = probing.probe(4, refresh=True)
    assert [len(node.devices) for node in found.nodes] == [2, 2]
    assert [round(found.link(0, other).rate / 1e7) for other in (1, 2, 3)] == [100, 10, 10]
    assert found.link(0, 2).shared
    assert not found.nodes[0].pairs
    # What was measured of all four is no node's own.
    assert {(curve.op, curve.ranks) for curve in found.collectives} == {("p2p", 2), ("all_reduce", 2)}
    assert found.one_machine
    assert [found.machine_of(rank) for rank in range(4)] == [0, 0, 0, 0]
    assert [found.node_of(rank) for rank in range(4)] == [0, 0, 1, 1]
    assert any("2 networks" in note for note in found.notes)
    assert read_cluster(yaml.safe_load(to_yaml(found)), "probed") == found
    # With a worker in each, the links between workers are all that there is.
    alone = [result | {"network": name} for result, name in zip(_results(), "ab", strict=True)]
    monkeypatch.setattr(probing, "run_workers", lambda *_, **__: alone)
    both = probing.probe(2, refresh=True)
    assert len(both.nodes) == 1
    assert not both.one_machine


def test_workers_that_share_a_gpu(pretend):
    pretend(device="NVIDIA A100-SXM4-80GB", sharers=2)
    found = probing.probe(2, device="cuda", backend="gloo")
    device = found.device(0)
    assert (found.backend, device.name) == ("gloo-staged", "A100-80")
    assert device.memory_bytes == 40 * 2**30
    assert device.context_bytes == 2**29  # 3 GiB taken, 1 GiB of it by each worker's tensors
    assert device.host_rate == 5.5e10
    assert "pageable: 2.0 GB/s" in device.sources["host_link"]
    assert any("2 workers share one GPU" in note for note in found.notes)


def test_what_other_processes_hold_of_a_gpu_is_no_context_of_ours(pretend, monkeypatch, tmp_path):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho GPU-b2, 7\necho GPU-a1, 512\necho GPU-c3, [N/A]\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert machine.gpu_memory_in_use() == {"b2": 7 * 2**20, "a1": 2**29}
    pretend(device="NVIDIA A100-SXM4-80GB", sharers=2)
    found = probing.probe(2, device="cuda", backend="gloo")
    assert found.device(0).context_bytes == 2**28  # half a GiB of the 3 was taken before


def test_measured_once_and_again_when_asked(pretend, tmp_path):
    asked = pretend()
    first = probing.probe(2)
    assert probing.probe(2) == first
    assert probing.probe(2, quick=True) == first  # a full probe answers a quick question
    assert len(asked) == 1
    probing.probe(2, refresh=True)
    assert len(asked) == 2
    probing.probe(2, threads=2)  # another question
    assert len(asked) == 3
    assert len(list((tmp_path / "trainplan").iterdir())) == 2
    probing.probe(4, cache=False)
    probing.probe(4, cache=False)
    assert len(asked) == 5
    assert len(list((tmp_path / "trainplan").iterdir())) == 2


def test_a_broken_memory_is_replaced(pretend, tmp_path):
    asked = pretend()
    first = probing.probe(2)
    (file,) = (tmp_path / "trainplan").iterdir()
    file.write_text("{half a fi")
    probing.probe(2)
    assert len(asked) == 2
    assert probing.probe(2).nodes[0].devices == first.nodes[0].devices
    assert len(asked) == 2


def test_a_busy_machine_is_said(pretend, monkeypatch):
    pretend()
    monkeypatch.setattr(machine.Load, "of_others", lambda self: 0.4)
    found = probing.probe(2)
    assert any(note.startswith("other processes used 40.0 %") for note in found.notes)
    monkeypatch.setattr(machine.Load, "of_others", lambda self: 0.01)
    assert not any("other processes" in note for note in probing.probe(2, refresh=True).notes)


def test_too_many_workers_for_the_cores_is_said(pretend, monkeypatch):
    pretend()
    monkeypatch.setattr(machine, "cores", lambda: 1)
    assert "2 workers of 1 thread share 1 core" in probing.probe(2).notes


def test_by_default_one_worker_a_core_under_the_name_local(pretend, monkeypatch):
    pretend()
    monkeypatch.setattr(machine, "cores", lambda: 2)
    assert (probing.probe().name, probing.probe(2).name) == ("local", "2xlocal")


def test_the_short_form_local_is_the_probe(pretend):
    asked = pretend()
    assert cluster("2xlocal:cpu") == probing.probe(2)
    assert len(asked) == 1
    cluster("2xlocal:cpu", refresh=True)
    assert len(asked) == 2
