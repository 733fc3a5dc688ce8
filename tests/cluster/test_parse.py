"""Short forms of clusters."""

import contextlib
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainplan.cluster import catalogue
from trainplan.cluster.cluster import Cluster
from trainplan.cluster.describe import describe
from trainplan.cluster.parse import cluster
from trainplan.cluster.yaml_form import read_cluster
from trainplan.cluster.yaml_write import to_yaml
from trainplan.errors import InputError


def test_four_titans_are_the_node_of_the_thesis():
    found = cluster("4xTitanRTX")
    assert found.world == 4
    assert found.nodes == cluster("titan4").nodes
    assert (found.link(0, 1).rate, found.link(1, 2).rate, found.link(2, 3).rate) == (48e9, 11e9, 48e9)
    assert found.backend == "nccl"
    assert found.price_per_hour() == 0  # nobody lists one


def test_nodes_of_a_type_are_joined_by_its_network():
    found = cluster("4xtitan4")
    assert (found.world, len(found.nodes)) == (16, 4)
    link = found.link(0, 15)
    assert (link.rate, link.shared) == (5e9, True)


def test_two_nodes_of_eight():
    found = cluster("2x8xH100-SXM")
    assert [found.node_of(rank) for rank in (0, 7, 8, 15)] == [0, 0, 1, 1]
    assert found.uniform
    assert found.notes[0] == (
        "8 × H100-SXM as in a DGX-H100: NVSwitch 450 GB/s each way; "
        "network 8 × InfiniBand NDR 400 Gb/s, 50.0 GB/s a device"
    )
    assert found.price_per_hour() == pytest.approx(16 * 3.99)
    assert found.price_per_hour(ranks=3) == pytest.approx(8 * 3.99)  # a node is rented whole


def test_an_explicit_network_wins_over_the_reference_fabric():
    found = cluster("2x8xA100-80+eth100")
    assert (found.link(0, 8).rate, found.link(0, 8).shared, found.link(0, 1).rate) == (12.5e9, True, 300e9)
    assert "network as given: Ethernet 100 Gb/s, 12.5 GB/s shared by the node" in found.notes
    assert cluster("2x8xA100-80+8xib-ndr").link(0, 8).rate == 50e9
    assert cluster("2x8xA100-80+25GB/s").link(0, 8).rate == 25e9


def test_nodes_without_a_reference_network_get_a_stated_one():
    found = cluster("2x4xcpu")
    assert (found.backend, found.link(0, 4).rate) == ("gloo", 1.25e9)
    assert any(note.startswith("network assumed, as cpu-box has no reference one: Ethernet 10") for note in found.notes)


def test_more_devices_than_a_node_holds_fill_whole_nodes():
    assert [len(node.devices) for node in cluster("32xA100-80").nodes] == [8, 8, 8, 8]
    assert len(cluster("64xcpu").nodes) == 1  # a machine may have any number of cores


def test_one_device_needs_no_network():
    found = cluster("1xT4")
    assert (found.world, found.nodes[0].network) == (1, None)
    assert cluster("T4").nodes == found.nodes


def test_capitals_spaces_and_the_real_times_sign_do_not_matter():
    assert cluster(" 2×8xh100-sxm ").nodes == cluster("2x8xH100-SXM").nodes
    assert cluster("4XTITANRTX".replace("X", "x", 1).lower()).name == "4xTitanRTX"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0xT4", "a cluster of 0 nodes or devices has nothing to run on. Try 1xT4."),
        ("2x0xT4", "a cluster of 0 nodes or devices"),
        ("-1xT4", "a cluster of -1 nodes or devices"),
        ("4xA100", "there is no device or node type 'A100' in the catalogue. Try A100-40, A100-80."),
        ("4xTitanRXT", "Try TitanRTX"),
        ("12xT4", "a pcie-box has room for 8 T4, and 12 do not fill nodes of 8. Try 2x6xT4."),
        ("2x16xH100-SXM", "a DGX-H100 has room for 8 H100-SXM, not 16. Try 4x8xH100-SXM."),
        ("2x4xtitan4", "titan4 is a node, which has a fixed number of devices. Try 2xtitan4."),
        ("4xT4+eth1000", "there is no such link in the catalogue. Try eth100"),
        ("4xT4+", "no network follows the +. Try 4xT4+eth10."),
        ("4xT4+0xeth10", "a node needs at least one network card"),
        ("4xT4+0GB/s", "a link that carries nothing"),
        ("", "no device is named"),
        ("8x", "no device is named"),
        ("99999999xcpu", "99,999,999 devices are more than 1,048,576"),
        ("lab.txt", "a file's name ends in .yaml or .json"),
        ("local:tpu", "this machine is probed as cpu or cuda"),
        ("0xlocal", "a cluster needs at least one worker"),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(text, message):
    with pytest.raises(InputError) as raised:
        cluster(text)
    assert message in str(raised.value)


@settings(max_examples=80, deadline=None)
@given(
    name=st.sampled_from(catalogue.names("device")),
    nodes=st.integers(1, 9),
    count=st.integers(1, 8),
    network=st.sampled_from([None, *(name for name in catalogue.names("link") if name.startswith(("eth", "ib")))]),
)
def test_any_size_holds_together(name, nodes, count, network):
    """Every short form gives so many devices, a link for every two of them, and survives its YAML form."""
    _, room = catalogue.reference_node(name)
    text = f"{nodes}x{count}x{name}" + (f"+{network}" if network else "")
    if room and count > room:
        with pytest.raises(InputError):
            cluster(text)
        return
    found = cluster(text)
    assert found.name == text
    assert found.world == nodes * count
    assert len(found.ranks) == found.world
    for rank in range(found.world):
        assert found.device(rank) == catalogue.device(name)
        assert found.node_of(rank) == rank // count
    if found.world > 1:
        first, last = found.link(0, found.world - 1), found.link(found.world - 1, 0)
        assert first == last
        assert first.rate > 0
    if nodes > 1 and network:
        assert found.link(0, count).rate == catalogue.link(network).rate
    assert read_cluster(_yaml(to_yaml(found)), "round trip") == found
    assert f"{found.world} device" in describe(found)


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=12))
def test_any_text_is_a_cluster_or_an_input_error(text):
    if "local" in text.lower():
        return
    with contextlib.suppress(InputError):
        assert isinstance(cluster(text), Cluster)


def test_short_forms_do_not_load_torch():
    code = (
        "import sys; from trainplan.cluster.parse import cluster; from trainplan.cluster.describe import describe; "
        "from trainplan.cluster.overrides import with_overrides; import trainplan.cluster.probe.probe; "
        "print(describe(with_overrides(cluster('2xtitan4'), {'link': '8GB/s'}))); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30, stdout=subprocess.DEVNULL)


def _yaml(text):
    import yaml

    return yaml.safe_load(text)
