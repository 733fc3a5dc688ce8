"""What is refused says what would be accepted; here that is done, and must be."""

import re
from dataclasses import replace

import pytest

from tests.synthetic import chain
from trainplan.cluster.parse import cluster
from trainplan.errors import PlanError
from trainplan.plan.plan import Plan
from trainplan.plan.text import parse, text
from trainplan.solve.resolve import resolve
from trainplan.units import MIB

DEVICES, BATCH = 4, 8


def solved(line: str, devices: int = DEVICES) -> Plan:
    return resolve(parse(line), chain(4), cluster(f"{devices}xcpu"), BATCH)


def applied(line: str, instead: str) -> str:
    """A line with the first thing that an error suggests: other words, one word less, or a plan by its name."""
    first = re.split(r",? or |[,;] ", instead)[0]
    if left_out := re.fullmatch(r"leaving (\w+) out", first):
        return " ".join(word for word in line.split() if not word.startswith(f"{left_out[1]}="))
    if "=" not in first.split()[0]:
        return first
    if without := re.fullmatch(r"(.+) without (\w+)", first):
        return applied(applied(line, f"leaving {without[2]} out"), without[1])
    others = dict(word.split("=") for word in first.split())
    kept = [word for word in line.split() if word.partition("=")[0] not in others]
    return " ".join([*kept, *first.split()])


@pytest.mark.parametrize(
    ("line", "why", "then"),
    [
        ("ps-bsp dp=2 servers=100", "2 workers and 100 servers are 102 devices, and there are 4", {"servers": 2}),
        ("ps-bsp dp=9 servers=9", "9 workers and 9 servers are 18 devices", {"dp": 1, "servers": 3}),
        ("ps-bsp dp=1 pp=4 schedule=1f1b", "4 workers and 1 server are 5 devices", {"pp": 3, "servers": 1}),
        ("ps-bsp dp=2 servers=0", "servers counts from 1, and is 0", {"servers": 1}),
        ("dp=3 servers=1", "servers=1, and exchange=all-reduce has none", {"exchange": "ps-bsp", "dp": 3}),
        ("dp=2 split=4", "there is none", {"exchange": "all-reduce"}),
        ("ssp dp=2 bound=-1", "a bound of -1", {"bound": (0,)}),
        ("dssp dp=2 bound=-1,3", "a bound of -1", {"bound": (0, 3)}),
        ("dssp dp=2 bound=1,-1", "a bound of -1", {"bound": (0, 1)}),
        ("ssp dp=2 bound=99999999999999999999", "10,000 steps are the most", {"bound": (10_000,)}),
        ("dssp dp=2 bound=-4,10001", "a bound of -4", {"bound": (0, 10_000)}),
        ("ps-asp dp=2 bound=-1", "ps-asp has no bound, not -1", {"bound": ()}),
        ("ssp dp=2 bound=1.5", "in whole numbers", {"bound": (1,)}),
        ("ssp dp=2 bound=-1.5", "in whole numbers", {"bound": (0,)}),
        ("dssp dp=2 bound=0.5,1e1", "in whole numbers", {"bound": (0, 10)}),
        ("ssp dp=2 bound=few", "in whole numbers", {"bound": (3,)}),
        ("ssp dp=2 bound=inf", "in whole numbers", {"bound": (3,)}),
        ("dp=4 exchange=hierarchical node=0", "must know how many ranks a node has, and node=0", {"node": 2}),
        ("dp=4 exchange=hierarchical node=-2", "must know how many ranks a node has, and node=-2", {"node": 2}),
        ("dp=4 exchange=hierarchical node=1", "a node of its own", {"node": 2}),
        ("dp=3 exchange=hierarchical node=0", "must know how many ranks", {"exchange": "ring", "node": 0}),
        ("dp=4 node=0", "does not ask which ranks share a node", {"node": 0}),
        ("dp=2 preload=maybe", "preload is one of given, off, on", {"preload": "given"}),
        ("dp=2 overlap=of", "overlap is one of on, off", {"overlap": "off"}),
        ("zero=-1", "0 (nothing is shared out), 1, 2 or 3, not -1", {"zero": 0}),
        ("zero=7", "0 (nothing is shared out), 1, 2 or 3, not 7", {"zero": 3}),
        ("dp=2 shard=2", "nothing says what", {"zero": 3}),
        ("zero3 dp=4 shard=3", "4 replicas cannot be put into groups of 3", {"shard": 2}),
        ("zero3 dp=2 exchange=ring", "ring sums whole gradients", {"exchange": "all-reduce", "zero": 3}),
        ("dp=4 zero=3 exchange=horovod", "horovod sums whole gradients", {"exchange": "all-reduce", "zero": 3}),
        ("hsdp dp=2", "2 are not two groups of two", {"dp": 2, "zero": 3, "shard": 0}),
        ("hsdp dp=3", "3 are not two groups of two", {"dp": 3, "zero": 3, "shard": 0}),
        ("hsdp dp=1", "1 is not two groups of two", {"dp": 4, "shard": 2}),
        ("hsdp dp=4 shard=4", "4 in groups of 4 are one group", {"dp": 4, "shard": 2}),
        ("hsdp dp=3 shard=3", "3 in groups of 3 are one group", {"dp": 3, "zero": 3, "shard": 0}),
        ("hsdp dp=8", "8 × 1 = 8 devices, and there are 4", {"dp": 4, "shard": 2}),
        ("dp=2 pp=4 zero=1", "2 × 4 = 8 devices, and there are 4", {"dp": 2, "pp": 2, "zero": 1}),
        ("dp=3 pp=2 exchange=ring", "3 × 2 = 6 devices", {"dp": 2, "pp": 2}),
        ("pp=8 schedule=1f1b", "8 stages", {"pp": 4}),
        ("zero-r memory=-1MiB", "it must be zero or more, and finite", {"away": ()}),
        ("zero-r dp=2 memory=0", "0 B hold nothing", {"away": ()}),
        ("zero-r dp=2 memory=2KiB", "with all activations away that can be", {"offload": "activations"}),
        ("dp=2 bucket=1GiB", "larger than all gradients of the model together", {"dp": 2}),
        ("horovod dp=2 bucket=1GiB", "has no buckets", {"exchange": "horovod"}),
        ("horovod dp=2 threshold=100GiB", "a threshold of 100 GiB is larger than all", {"threshold": MIB}),
        ("p3 dp=2 slice=100GiB", "a slice of 100 GiB is larger than all gradients", {"slice": MIB}),
        ("p3 dp=2 threshold=100GiB", "a threshold of 100 GiB is larger than all", {"threshold": MIB}),
        ("pace dp=2 slice=100GiB", "a slice of 100 GiB is larger than all gradients", {"slice": MIB}),
        ("bytescheduler dp=2 credit=32MiB", "a credit of 32.0 MiB is larger than all gradients", {"credit": MIB}),
        ("bytescheduler dp=2 slice=8B credit=1B", "1 bytes is less than one of 8", {"slice": 8, "credit": 8}),
        ("bytescheduler dp=2 slice=1MiB credit=1B", "less than one of 1000", {"slice": MIB, "credit": 1000}),
        ("bytescheduler dp=2 credit=0", "credit of 1 or more, and it is 0", {"exchange": "bytescheduler"}),
        ("dp=2 bucket=0", "holds no gradient", {"dp": 2}),
        ("dp=2 bucket=-4MiB", "it must be zero or more", {"dp": 2}),
        ("dp=-2", "dp counts from 1, and is -2", {"dp": 1}),
    ],
)
def test_a_suggestion_is_accepted(line: str, why: str, then: dict) -> None:
    with pytest.raises(PlanError) as refused:
        solved(line)
    assert why in refused.value.why
    found = solved(applied(line, refused.value.instead))
    assert {field: getattr(found, field) for field in then} == then


@pytest.mark.parametrize(
    "line",
    [
        "dp=2 bucket=-5", "dp=2 bucket=5parsec", "horovod dp=2 threshold=-1", "p3 dp=2 threshold=-1KiB",
        "p3 dp=2 slice=-1", "bytescheduler dp=2 credit=-1", "bytescheduler dp=2 credit=0",
        "bytescheduler dp=2 slice=1MiB credit=0",
    ],
)  # fmt: skip
def test_whatever_is_suggested_for_a_size_is_accepted_by_a_small_model(line: str) -> None:
    """All that is suggested, and not the first alone; the gradients of this model are smaller than all usual sizes."""
    with pytest.raises(PlanError) as refused:
        solved(line)
    for way in refused.value.instead.split(", or "):
        found = solved(applied(line, way.removeprefix("one such as ")))
        assert replace(solved(text(found)), key=found.key) == found


@pytest.mark.parametrize(
    "line",
    [
        "horovod", "p3", "p3 slice=1MiB", "bytescheduler", "bytescheduler credit=5B", "bytescheduler credit=1KiB",
        "bytescheduler slice=3B", "bytescheduler slice=1MiB", "pace", "pace slice=1MiB",
    ],
)  # fmt: skip
def test_what_was_chosen_is_accepted_when_it_is_asked_for(line: str) -> None:
    """Also where the model is smaller than all numbers that were published."""
    found = solved(f"{line} dp=2")
    assert replace(solved(text(found)), key=found.key) == found


@pytest.mark.parametrize("line", ["zero3", "hsdp", "zero-r", "p3", "dataparallel", "exchange=ring", "dp=2 zero=1"])
def test_one_device_has_no_replicas(line: str) -> None:
    with pytest.raises(PlanError, match=r"is among replicas, and 1 device with a batch of 8 can have one") as refused:
        solved(line, devices=1)
    assert solved(applied(line, refused.value.instead), devices=1).world == 1
