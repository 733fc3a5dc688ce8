"""Clusters in files: YAML that people write, and our own JSON."""

import dataclasses

import pytest
import yaml

from trainplan import files
from trainplan.cluster.cluster import Cluster, Curve, Link, Slowdown
from trainplan.cluster.describe import describe
from trainplan.cluster.parse import cluster
from trainplan.cluster.yaml_form import load_yaml, read_cluster
from trainplan.cluster.yaml_write import save_yaml, to_yaml
from trainplan.errors import InputError

UNEVEN = """
name: lab
nodes:
- count: 2
  type: DGX-A100
  network: 2x ib-hdr
  price_per_hour: {value: 20, source: our contract}
- name: old
  devices: [3x V100-32, {device: T4, memory: 14GiB}, {name: Card, memory: 11GB, memory_rate: 484GB/s,
            flops: {fp32: 11.3TFLOP/s}, count: 2}]
  inside: pcie3
  pairs:
  - {between: [0, 1], link: {name: NVLink, rate: {value: 48GB/s, source: measured}, latency: 10us}}
  - {between: [[1, 2], [0, 2]], link: nvlink2, lanes: 2}
  network: {link: eth40, latency: 80us, message: 5us, shared: true}
  host_memory: 192GB
  cores: 24
  disk: 2GB/s
slowdown: {collective: 1.3}
contention: [1.0, 1.1]
dispatch: 20us
collectives:
- {op: all_reduce, ranks: 2, bytes: [4, 1MiB], seconds: [300us, 3.5ms]}
"""


@pytest.fixture
def lab(tmp_path):
    path = tmp_path / "lab.yaml"
    path.write_text(UNEVEN)
    return path


def test_an_uneven_cluster(lab):
    found = cluster(str(lab))
    assert found == load_yaml(lab)
    assert (found.name, found.world, found.backend) == ("lab", 8 + 8 + 6, "nccl")
    assert not found.uniform
    assert found.nodes[0] == found.nodes[1]
    assert found.nodes[0].network.rate == 25e9 * 2 / 8
    old = found.nodes[2]
    assert [device.name for device in old.devices] == ["V100-32"] * 3 + ["T4"] + ["Card"] * 2
    t4, card = old.devices[3], old.devices[4]
    assert (t4.memory_bytes, t4.sources["memory"]) == (14 * 2**30, "given")
    assert t4.sources["memory_rate"] == "NVIDIA T4 data sheet"
    assert (card.memory_bytes, card.flops, card.price_per_hour) == (11 * 10**9, {"fp32": 11.3e12}, 0.0)
    assert found.link(16, 17).rate == 48e9
    assert found.link(17, 18).rate == 50e9
    assert found.link(18, 19).rate == 15.75e9
    assert found.link(0, 16) == found.link(16, 0) == old.network  # the slower of the two ways
    assert (old.network.rate, old.network.shared) == (5e9, True)
    assert (old.network.latency_s, old.network.message_s) == (pytest.approx(80e-6), pytest.approx(5e-6))
    assert found.price_per_hour(ranks=16) == 40
    assert found.price_per_hour() == 0  # the price of the old node is not known
    assert found.slowdown == Slowdown(collective=1.3)
    assert found.collectives == (Curve("all_reduce", 2, (4, 2**20), (pytest.approx(3e-4), pytest.approx(3.5e-3))),)
    assert found.dispatch_s == pytest.approx(20e-6)
    text = describe(found)
    assert "22 devices in 3 nodes" in text
    assert "3 × V100-32 + 1 × T4 + 2 × Card" in text


def test_file_to_cluster_to_file_and_back(lab, tmp_path):
    found = load_yaml(lab)
    again = tmp_path / "again.yaml"
    save_yaml(found, again)
    assert load_yaml(again) == found
    assert to_yaml(load_yaml(again)) == again.read_text()


@pytest.mark.parametrize("text", ["4xTitanRTX", "4xDGX-1", "2x8xH100-SXM", "3x5xcpu", "2x2xT4+4xib-edr", "1xcpu"])
def test_json_round_trip(text, tmp_path):
    found = cluster(text)
    path = tmp_path / "cluster.json"
    found.save(path)
    assert Cluster.load(path) == found == cluster(str(path))
    assert files.read(path, "cluster")["name"] == found.name


def test_numbers_without_a_short_spelling_survive_the_round_trip():
    found = cluster("4xTitanRTX")
    node = dataclasses.replace(
        found.nodes[0],
        inside=Link("odd", 1.23456789e-5, 3.0000000001e9, message_s=1e-7 / 3, source="measured"),
        network=Link("each", 1e-5, 1.25e9),
        disk_rate=1 / 3 * 1e9,
    )
    slow = {"slowdown": Slowdown(send=1 / 0.7, slowed_copy=1.1), "slowdown_of_two": Slowdown(slowed_message=1 / 0.9)}
    odd = dataclasses.replace(found, nodes=(node,), contention=(1.0, 4 / 3), hosts=(1.0, 5 / 3), spread=0.1 / 3, **slow)
    assert read_cluster(yaml.safe_load(to_yaml(odd)), "odd") == odd


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("inside: pcie3", "insdie: pcie3", "nodes[1]: there is no key 'insdie'. Try inside"),
        ("inside: pcie3", "inside: pcie9", "nodes[1].inside: pcie9: there is no such link in the catalogue. Try pcie"),
        ("latency: 10us", "latency: 10uss", "unknown unit 'uss'"),
        ("3x V100-32", "3x V100", "Try V100-16, V100-32"),
        ("[0, 1]", "[0, 0]", "two different devices were expected"),
        ("[0, 1]", "[0, 9]", "device 9 of 6"),
        ("cores: 24", "cores: 0", "a whole number of 1 or more was expected"),
        ("cores: 24", "cores: 24\n  cores: 25", "the key 'cores' is written twice"),
        ("count: 2\n", "count: two\n", "a whole number of 1 or more was expected"),
        ("count: 2\n", "count: 0\n", "a whole number of 1 or more was expected"),
        ("type: DGX-A100", "type: DGX-A1000", "Try DGX-A100"),
        ("collective: 1.3", "collective: 0.5", "0.5 would make it faster beside something else"),
        ("seconds: [300us, 3.5ms]", "seconds: [300us]", "2 sizes and 1 times"),
        ("nodes:", "noodles:", "there is no key 'noodles'. Try nodes"),
        (
            "  network: {link: eth40, latency: 80us, message: 5us, shared: true}\n",
            "",
            "it has no network, and there are 3 nodes",
        ),
        ("memory: 11GB, ", "", "these are missing: memory"),
        ("flops: {fp32: 11.3TFLOP/s}, ", "", "flops"),
        ("name: lab", "name: lab\nbackend: mpi", "backend mpi: there is no such backend. Try gloo, gloo-staged, nccl."),
        ("dispatch: 20us", "dispatch: [", "broken YAML at line"),
    ],
)
def test_mistakes_are_named_with_their_place(lab, before, after, message):
    assert before in UNEVEN
    lab.write_text(UNEVEN.replace(before, after))
    with pytest.raises(InputError) as raised:
        load_yaml(lab)
    assert "lab.yaml" in str(raised.value)
    assert message in str(raised.value)
    assert raised.value.instead


@pytest.mark.parametrize(
    "content", ["", "just words", "- 1\n- 2\n", "nodes: []\n", "nodes: [{}]\n", "nodes: [{devices: [2x T4]}]"]
)
def test_a_file_that_says_too_little(lab, content):
    lab.write_text(content)
    with pytest.raises(InputError, match=r"lab\.yaml"):
        load_yaml(lab)


def test_a_missing_or_foreign_file(tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        cluster(str(tmp_path / "none.yaml"))
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(InputError, match="not a text file"):
        cluster(str(tmp_path / "bytes.yaml"))
    files.write(tmp_path / "other.json", "profile", {})
    with pytest.raises(InputError, match="it is a trainplan profile, and a cluster was expected"):
        cluster(str(tmp_path / "other.json"))


def test_the_example_in_the_documentation_is_a_cluster():
    from trainplan.cluster import yaml_form

    lines = yaml_form.__doc__.splitlines()
    example = "\n".join(line[4:] for line in lines if line.startswith("    "))
    found = read_cluster(yaml.safe_load(example), "example")
    assert (found.world, found.price_per_hour(8)) == (21, 20)


@pytest.mark.parametrize("key", ["memory", "memory_rate", "flops"])
def test_a_device_that_has_or_does_nothing_is_refused(key):
    for least in (0, -1):
        value = {"fp32": least} if key == "flops" else least
        node = {"devices": [{"device": "T4", key: value}]}
        with pytest.raises(InputError, match="it must be more than zero"):
            read_cluster({"nodes": [node]}, "lab.yaml")


@pytest.mark.parametrize(("devices", "link"), [("2x cpu", "loopback"), ("4x T4", "pcie3"), ("8x H100-SXM", "pcie5")])
def test_a_link_between_devices_is_proposed_that_they_may_have(devices, link):
    with pytest.raises(InputError, match=f"needs 'inside', the link between them. Try inside: {link}.$"):
        read_cluster({"nodes": [{"devices": devices}]}, "mine")
    assert read_cluster({"nodes": [{"devices": devices, "inside": link}]}, "mine").nodes[0].inside.rate
