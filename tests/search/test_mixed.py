"""Unlike devices and unlike links: what is recommended beats every plan that treats them alike."""

from itertools import accumulate
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from trainplan.bench.cases import candidates
from trainplan.plan.rules import split
from trainplan.plan.text import parse
from trainplan.predict.predict import predict
from trainplan.predict.speeds import speeds
from trainplan.profile.device.known import model_of
from trainplan.profile.estimate import estimate
from trainplan.search.recommend import recommend
from trainplan.situation import cluster_for
from trainplan.solve.resolve import resolve
from trainplan.workload.load import load

EXAMPLES = Path(__file__).parents[2] / "examples"
BATCH = 64
SYSTEMS = ("single", "ddp", "zero3", "naive", "gpipe", "dapple", "chimera")


class Skips(nn.Module):
    """Somebody's own model: every layer's output is added to its input, and the first one's to the last one's."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 128, 3, padding=1)
        self.body = nn.ModuleList(
            nn.Sequential(nn.Conv2d(128, 128, 3, padding=1), nn.BatchNorm2d(128), nn.ReLU()) for _ in range(6)
        )
        self.head = nn.Linear(128, 10)

    def forward(self, images: Tensor) -> Tensor:
        first = features = self.stem(images)
        for layer in self.body:
            features = features + layer(features)
        return self.head((features + first).mean((2, 3)))


def made(device):
    inputs = lambda samples: (torch.randn(samples, 3, 64, 64), torch.randint(10, (samples,)))  # noqa: E731
    return estimate(load(Skips(), inputs=inputs, loss="cross_entropy", batch=BATCH), device, model=model_of(device))


@pytest.fixture(scope="module")
def cluster():
    return cluster_for(str(EXAMPLES / "mixed.yaml"))


@pytest.fixture(scope="module")
def profile(cluster):
    return made(cluster.device(0))


def test_a_device_is_as_much_slower_as_its_own_estimate(cluster, profile):
    other = made(cluster.device(2))
    totals = [
        sum(one.total(q, 0, len(one.blocks), BATCH) for q in ("forward_s", "backward_s")) for one in (profile, other)
    ]
    fast, _, slow, _ = speeds(profile, cluster)
    assert fast == 1.0
    assert slow == pytest.approx(totals[0] / totals[1], rel=0.02)
    assert slow < 0.8


def uniform(cluster, profile):
    """Systems with as many samples for each replica, and as many blocks for each stage; and the fast devices alone."""
    blocks = split(len(profile.blocks), cluster.world)
    stages = ",".join(map(str, list(accumulate(blocks))[:-1]))
    for line in (*candidates(cluster.world, SYSTEMS, uneven=True), "ddp dp=2"):
        even = f" stages={stages}" if " pp=" in line else ""
        yield predict(resolve(parse(line + even), profile, cluster, BATCH), profile, cluster, BATCH)


def test_the_pick_beats_the_best_uniform_plan(cluster, profile):
    best = recommend(profile, cluster, BATCH).best
    others = list(uniform(cluster, profile))
    assert {1, 4} == {found.plan.pp for found in others}
    fastest = min((found for found in others if found.fits), key=lambda found: found.step_s)
    assert best.step_s < 0.95 * fastest.step_s
    assert best.plan.world == 4
