"""The catalogue: complete, sourced, and right where a number is well known."""

from collections import Counter

import pytest

from trainplan.cluster import catalogue
from trainplan.errors import InputError

DEVICES = [
    "P40", "GTX1080Ti", "V100-16", "V100-32", "TitanRTX", "RTX3090", "RTX4090", "T4", "L4",
    "A100-40", "A100-80", "H100-SXM", "H100-PCIe", "H200", "B200", "cpu",
]  # fmt: skip


def test_every_promised_name_is_there():
    assert list(catalogue.names("device")) == DEVICES
    nodes = {"DGX-1", "DGX-2", "DGX-A100", "DGX-H100", "DGX-H200", "DGX-B200", "pcie-box", "cpu-box", "titan4"}
    assert nodes == set(catalogue.names("node"))
    links = {"nvlink1", "nvlink5", "nvswitch-h100", "pcie3", "pcie4", "pcie5", "ib-hdr", "ib-ndr", "loopback"}
    assert links | {f"eth{rate}" for rate in (1, 10, 25, 40, 100)} <= set(catalogue.names("link"))


@pytest.mark.parametrize("name", DEVICES)
def test_every_number_of_a_device_has_a_source(name):
    device = catalogue.device(name)
    sourced = {f"flops.{precision}" for precision in device.flops} | {"memory", "memory_rate", "context", "processors"}
    sourced |= {"host_link"} if device.host_rate else set()
    sourced |= {"price"} if device.price_per_hour else set()
    sourced |= {"capability"} if name != "cpu" else set()
    assert sourced == {key for key, source in device.sources.items() if source}
    assert device.memory_bytes > device.context_bytes > 0
    # Peaks are dense and ordered: a narrower format is never slower than fp32 where it has units of its own.
    assert all(speed >= device.flops["fp32"] for speed in device.flops.values())


@pytest.mark.parametrize("name", catalogue.names("link"))
def test_every_link_says_where_rate_and_latency_are_from(name):
    link = catalogue.link(name)
    assert "rate: " in link.source
    assert "latency: " in link.source
    assert link.rate > 0
    assert link.latency_s > 0


@pytest.mark.parametrize("name", [name for name in catalogue.names("node") if name != "pcie-box"])
def test_every_node_has_a_source_and_whole_links(name):
    node = catalogue.node_type(name)
    assert node.sources["node"]
    assert node.inside.rate > 0
    assert all(0 <= pair.a < pair.b < len(node.devices) for pair in node.pairs)


def test_a_reference_node_exists_for_every_device_and_holds_it():
    for name in DEVICES:
        node, room = catalogue.reference_node(name)
        built = catalogue.node_type(node, name, 1)
        assert built.devices == (catalogue.device(name),)
        assert room is None or len(catalogue.node_type(node, name).devices) == room


def test_the_cube_mesh_of_a_dgx_1_uses_six_links_of_every_device():
    node = catalogue.node_type("DGX-1")
    links = Counter()
    for pair in node.pairs:
        links[pair.a] += round(pair.link.rate / 25e9)
        links[pair.b] += round(pair.link.rate / 25e9)
    assert links == dict.fromkeys(range(8), 6)


def test_titan4_is_the_node_of_the_thesis():
    node = catalogue.node_type("titan4")
    device = node.devices[0]
    assert (len(node.devices), device.memory_bytes) == (4, 24 * 2**30)
    assert (device.flops["fp32"], device.memory_rate) == (16.3e12, 672e9)
    assert {(pair.a, pair.b): pair.link.rate for pair in node.pairs} == {(0, 1): 48e9, (2, 3): 48e9}
    assert (node.inside.rate, node.inside.latency_s) == (11e9, pytest.approx(10e-6))
    assert (node.network.rate, node.network.shared, node.network.latency_s) == (5e9, True, pytest.approx(50e-6))
    assert (node.cores, node.host_memory_bytes) == (24, 192 * 10**9)
    assert "assumed" in node.inside.source
    assert all("assumed" in pair.link.source for pair in node.pairs)


def test_a_pcie_box_takes_the_generation_of_its_devices():
    assert catalogue.node_type("pcie-box", "T4").inside.name == "PCIe 3.0 x16"
    assert catalogue.node_type("pcie-box", "L4").inside.name == "PCIe 4.0 x16"
    assert catalogue.node_type("pcie-box", "H100-PCIe").inside.name == "PCIe 5.0 x16"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: catalogue.device("A100"), "A100: there is no such device in the catalogue. Try A100-40, A100-80."),
        (lambda: catalogue.device("H1O0-SXM"), "Try H100-SXM"),
        (lambda: catalogue.link("eth1000"), "there is no such link in the catalogue. Try eth100"),
        (lambda: catalogue.node_type("DGX-H300"), "there is no such node type in the catalogue. Try DGX-H"),
        (lambda: catalogue.node_type("pcie-box"), "it takes any device, and none was named"),
        (lambda: catalogue.node_type("DGX-H100", count=9), "it has room for 8"),
        (lambda: catalogue.device(""), "'': there is no such device"),
    ],
)
def test_unknown_names_offer_the_nearest(call, message):
    with pytest.raises(InputError) as raised:
        call()
    assert message in str(raised.value)


def test_cards_are_shared_or_dealt_out():
    one = catalogue.read_network("eth100", 8, "here")
    assert (one.rate, one.shared) == (12.5e9, True)
    each = catalogue.read_network("8x ib-ndr", 8, "here")
    assert (each.rate, each.shared) == (50e9, False)
    fewer = catalogue.read_network("2xib-hdr", 8, "here")
    assert (fewer.rate, fewer.shared) == (6.25e9, False)
    more = catalogue.read_network("16xeth10", 8, "here")
    assert (more.rate, more.shared) == (1.25e9, False)
