"""The host's lane: what issuing operators takes, read in rounds."""

import pytest
import torch

from trainplan.profile.device import issue
from trainplan.profile.device.families import VARIANTS


def test_the_lane_of_the_host():
    """The same code as on a GPU; here the host is the device, so the seconds are those of the whole work."""
    lane = issue.HostLane(issue.Lane(torch.device("cpu"), lambda: None, lambda seconds: None))
    while lane.rounds < 20 and (lane.rounds < 3 or set(lane.issue) != set(issue.FAMILIES) or not lane.spread):
        lane.read()
    assert lane.missing == {}
    found = lane.issue
    assert set(found) == set(issue.FAMILIES) <= set(VARIANTS)
    assert all(0 < one.forward_s < 0.1 and 0 < one.backward_s < 0.1 for one in found.values())
    assert lane.updates.tensor_s > 0
    assert lane.spread > 0


def test_a_host_that_is_slow_for_a_while_is_not_a_slow_host(monkeypatch):
    """Of nine rounds three were twice as slow, in all chains: the median knows of it, and the spread tells it."""
    lane = issue.HostLane(issue.Lane(torch.device("cpu"), lambda: None, lambda seconds: None))
    for slow in (1.0, 1.0, 2.0, 2.0, 2.0, 1.0, 1.0, 1.0, 1.0):
        monkeypatch.setattr(issue._Pair, "seconds", lambda pair, s=slow: (1e-5 * s * len(pair.forward), 2e-5 * s))
        monkeypatch.setattr(issue._Step, "seconds", lambda step, s=slow: 1e-6 * s)
        lane.read()
    assert lane.issue["product"].forward_s == pytest.approx(1e-5)
    assert lane.spread == pytest.approx(1.0)
    assert "host" not in lane.missing


def test_a_chain_that_cannot_be_made_is_missing_and_the_rest_is_read(monkeypatch):
    def broken():
        raise RuntimeError("no such kernel\nand more")

    monkeypatch.setitem(issue._CHAINS, "pooling", (broken, (2, 8, 8, 8)))
    lane = issue.HostLane(issue.Lane(torch.device("cpu"), lambda: None, lambda seconds: None))
    assert lane.missing == {"host.pooling": "RuntimeError: no such kernel"}
    rest = set(issue.FAMILIES) - {"pooling"}
    while lane.rounds < 20 and set(lane.issue) != rest:  # a round that somebody came in between of is not counted
        lane.read()
    assert set(lane.issue) == rest


def test_a_chain_that_no_round_could_read_is_missing(monkeypatch):
    """A host that is interrupted in every round: nothing is made up for it."""
    monkeypatch.setattr(issue._Pair, "seconds", lambda pair: (-1e-6, 1e-6))
    lane = issue.HostLane(issue.Lane(torch.device("cpu"), lambda: None, lambda seconds: None))
    lane.read()
    assert lane.issue == {}
    assert set(lane.missing) == {f"host.{name}" for name in (*issue.FAMILIES, "mixed")}
    assert "in each of 1 rounds" in lane.missing["host.elementwise"]
