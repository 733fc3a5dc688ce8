"""The thesis's own results, on its own machine: Jansen 2020, table 8.1 (which system was fastest, and by how much), its
out-of-memory facts, its speed-up on 16 GPUs, and table 6.1. Its nodes are those of the catalogue, and profiles are
estimated from the data sheet of the device: nothing is fitted to the thesis. Its links were never printed, so every
answer is asked for at three rates of PCIe.

It ran Horovod with a batch for each worker and torchgpipe with larger ones, in micro-batches, each at a batch of its
own (table 3.3; of ImageNet the 288 that section 6.4 says were used), and compared samples a second.
"""

from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from statistics import mean, median

import pytest

from trainplan import recommend
from trainplan.cluster.catalogue import device
from trainplan.cluster.cluster import Cluster
from trainplan.cluster.parse import cluster
from trainplan.plan.text import parse
from trainplan.predict.predict import Prediction, predict
from trainplan.profile.estimate import estimate
from trainplan.profile.profile import Profile
from trainplan.solve.resolve import resolve
from trainplan.workload.load import load

NETWORKS = ("resnet18", "resnet50", "resnet152", "vgg11", "vgg16", "mobilenetv2")
# Table 3.3: samples of a worker, and of a micro-batch of torchgpipe, and how many of these.
BATCHES = {"mnist": (128, 128, 24), "cifar10": (64, 64, 32), "imagenet": (32, 24, 12), "highres": (32, 4, 12)}
CELLS = list(product(NETWORKS, BATCHES))
# Tables 8.1 and 8.2: seconds of torchgpipe over those of Horovod, where the thesis's recommender was wrong.
RATIOS = {
    ("resnet18", "mnist"): 1.971, ("resnet18", "cifar10"): 2.030, ("resnet50", "cifar10"): 1.560,
    ("resnet152", "cifar10"): 1.461, ("vgg11", "mnist"): 1.915, ("vgg11", "cifar10"): 1.767,
    ("vgg16", "mnist"): 1.634, ("vgg16", "cifar10"): 1.627,
}  # fmt: skip
OUT_OF_MEMORY = ("resnet152", "highres")
PCIE = (8e9, 11e9, 13e9)
DAILY = ("vgg11", "mnist")  # the quickest to estimate
SEARCHED = ("imagenet", "highres")  # for which alone its code had cuDNN try its algorithms
HOROVOD = ("", " exchange=horovod")  # sums in buckets as backward goes, by DDP's rules and by Horovod's own


def in_one_process(profile: Profile, devices: int, slower: float = 1.0) -> Profile:
    """The profile of a rank among so many that are threads of one process, as torchgpipe's are: they hold one
    interpreter, so forward passes (also those that are done again) are issued for all devices in turn. Autograd's own
    threads, which go back, need no interpreter. `slower`: how much slower the host is than the profile's.

    Small VGGs hang on it: see `test_vggs_hang_on_the_one_process`.
    """
    blocks = tuple(
        replace(
            block,
            forward_issue_s=tuple(devices * slower * seconds for seconds in block.forward_issue_s),
            backward_issue_s=tuple(slower * seconds for seconds in block.backward_issue_s),
        )
        for block in profile.blocks
    )
    return replace(profile, blocks=blocks)


@cache
def titans(nodes: int = 1, pcie: float = 11e9) -> Cluster:
    found = cluster(f"{nodes}xtitan4")
    return replace(
        found, nodes=tuple(replace(node, inside=replace(node.inside, rate=pcie)) for node in found.nodes)
    )  # fmt: skip


@cache
def profiled(network: str, data: str, *more: int) -> Profile:
    batch, micro, _ = BATCHES[data]
    titan = replace(device("TitanRTX"), efficiency={"searched": float(data in SEARCHED)})
    plain = ",bn=0" if network.startswith("vgg") and data in ("mnist", "cifar10") else ""  # as its suite had them
    return estimate(load(f"{network}:{data}{plain}"), titan, samples=[batch, micro, *more])


def asked(line: str, profile: Profile, there: Cluster, batch: int) -> Prediction:
    return predict(resolve(parse(line), profile, there, batch), profile, there, batch)


def alone(network: str, data: str) -> Prediction:
    return asked("dp=1", profiled(network, data), titans(), BATCHES[data][0])


@cache
def horovod(network: str, data: str, pcie: float, how: str = "", nodes: int = 1) -> Prediction:
    batch, workers = BATCHES[data][0], 4 * nodes
    return asked(f"dp={workers}{how}", profiled(network, data), titans(nodes, pcie), workers * batch)


@cache
def torchgpipe(network: str, data: str, pcie: float, recompute: str = "except-last") -> Prediction:
    _, samples, micro = BATCHES[data]
    line = f"pp=4 schedule=lockstep recompute={recompute} micro={micro}"
    return asked(line, in_one_process(profiled(network, data), 4), titans(1, pcie), samples * micro)


def ratio(network: str, data: str, pcie: float, how: str = "") -> float:
    return horovod(network, data, pcie, how).samples_per_s / torchgpipe(network, data, pcie).samples_per_s


# -- table 8.1 ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("network", "data", "pcie"),
    [
        pytest.param(*cell, pcie, marks=[] if cell == DAILY else [pytest.mark.slow])
        for cell, pcie in product(CELLS, PCIE)
    ],
)
def test_recommender_knows_who_was_fastest(network: str, data: str, pcie: float) -> None:
    """Horovod wherever it fits, which is everywhere but in one cell; where the thesis printed by how much, by 5 % at
    least."""
    one, pipeline = alone(network, data), torchgpipe(network, data, pcie)
    assert pipeline.fits
    for how in HOROVOD:
        replicas = horovod(network, data, pcie, how)
        assert replicas.fits == one.fits == ((network, data) != OUT_OF_MEMORY)
        if replicas.fits:
            assert ratio(network, data, pcie, how) > (1.05 if (network, data) in RATIOS else 1.0)


@pytest.mark.slow
@pytest.mark.parametrize(("network", "data"), [("vgg11", "mnist"), ("resnet50", "highres"), ("resnet152", "highres")])
def test_recommender_is_no_slower_than_either(network: str, data: str) -> None:
    """With everything that there is to choose from, at Horovod's batch, and it fits."""
    found = recommend(profiled(network, data), titans(), batch=4 * BATCHES[data][0]).recommendation
    best = found.best
    assert best.fits
    assert best.peak_bytes <= best.limit_bytes < 24 * 2**30
    if horovod(network, data, 11e9).fits:
        assert best.samples_per_s >= 0.999 * horovod(network, data, 11e9).samples_per_s
    else:
        assert best.samples_per_s >= torchgpipe(network, data, 11e9).samples_per_s


def errors(pcie: float) -> dict[tuple[str, str], float]:
    return {cell: ratio(*cell, pcie) / published - 1 for cell, published in RATIOS.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "pcie",
    [
        pytest.param(8e9, marks=pytest.mark.xfail(strict=True, reason="worst 35 %: ResNet-50 on CIFAR-10")),
        11e9,
        13e9,
    ],
)  # fmt: skip
def test_by_how_much(pcie: float) -> None:
    """Median within 15 %, worst within 30 %. ResNet-50 on CIFAR-10, whose activations take torchgpipe as long as its
    compute, hangs most on the rate of PCIe, which the thesis does not say: 35, 27 and 24 % too high with the three."""
    off = [abs(error) for error in errors(pcie).values()]
    assert median(off) < 0.15
    assert max(off) < 0.30


@pytest.mark.slow
def test_what_docs_bench_says_of_both_tables() -> None:
    off = [[100 * abs(error) for error in errors(pcie).values()] for pcie in PCIE]
    half, worst = ([round(of(each)) for each in off] for of in (median, max))
    threads = epochs(in_one_process(processes(), 4))
    said = [
        f"half within {half[0]}, {half[1]} and {half[2]} %; worst **{worst[0]}**, {worst[1]} and {worst[2]} %",
        (
            f"**missed**: {threads['B'] / threads['A']:.3f}, {threads['C'] / threads['A']:.3f} "
            f"and {threads['E'] / threads['B']:.2f}"
        ),
    ]
    page = (Path(__file__).parents[2] / "docs" / "bench.md").read_text(encoding="utf-8")
    for words in said:
        assert words in page


@pytest.mark.slow
def test_vggs_hang_on_the_one_process() -> None:
    """With a process for each rank torchgpipe would have been faster than it was with VGG-11 on CIFAR-10."""
    _, samples, micro = BATCHES["cifar10"]
    line = f"pp=4 schedule=lockstep recompute=except-last micro={micro}"
    found = asked(line, profiled("vgg11", "cifar10"), titans(), samples * micro)
    by_processes = horovod("vgg11", "cifar10", 11e9).samples_per_s / found.samples_per_s
    published = RATIOS["vgg11", "cifar10"]
    assert by_processes < 0.8 * published < 0.9 * ratio("vgg11", "cifar10", 11e9)


@pytest.mark.slow
def test_orders_of_figure_3_1() -> None:
    """What the text says of the bars, which are lost. Not so here: Horovod with more than 4 times the speed of one GPU
    (ResNet-152 on MNIST), which no model of replicas explains, and that ResNet-50 by itself does better than VGG-16
    under torchgpipe (2 % less, over all data sets)."""
    dp, pipeline = (
        {
            cell: of(*cell, 11e9).samples_per_s / alone(*cell).samples_per_s
            for cell in CELLS
            if (cell != OUT_OF_MEMORY or of is torchgpipe)
        }
        for of in (horovod, torchgpipe)
    )

    def average(of: dict, networks: tuple[str, ...], data: tuple[str, ...] = tuple(BATCHES)) -> float:
        return mean(speedup for (network, on), speedup in of.items() if network in networks and on in data)

    deep, vgg = ("resnet50", "resnet152"), ("vgg11", "vgg16")
    assert average(dp, ("resnet18", *deep)) > average(dp, vgg)
    assert average(dp, vgg, ("mnist", "cifar10")) < average(dp, vgg, ("imagenet", "highres"))
    assert average(pipeline, deep) > average(pipeline, ("resnet18", *vgg))


# -- memory and 16 GPUs -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_pipeline_that_trained_what_replicas_could_not() -> None:
    """ResNet-152 on Highres: 12 micro-batches of 4, with and without recomputation."""
    found = {recompute: torchgpipe(*OUT_OF_MEMORY, 11e9, recompute) for recompute in ("except-last", "none")}
    assert all(one.fits for one in found.values())
    assert found["none"].peak_bytes == pytest.approx(17.5e9, rel=0.1)  # by its saved activations
    assert found["except-last"].peak_bytes < 0.4 * found["none"].peak_bytes
    assert not horovod(*OUT_OF_MEMORY, 11e9).fits
    assert horovod(*OUT_OF_MEMORY, 11e9).peak_bytes == pytest.approx(30.4e9, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("pcie", PCIE)
@pytest.mark.parametrize("how", HOROVOD)
def test_speed_up_on_16_gpus(pcie: float, how: str) -> None:
    """Figure 3.2: ResNet-50 14.5 times (equation 5.1 says 13.1), and it, MobileNet and VGG-16 in this order (which 5.1
    turns round)."""
    found = {
        network: horovod(network, "imagenet", pcie, how, 4).samples_per_s / alone(network, "imagenet").samples_per_s
        for network in ("resnet50", "mobilenetv2", "vgg16")
    }
    assert found["resnet50"] == pytest.approx(14.5, rel=0.1)
    assert found["resnet50"] > found["mobilenetv2"] > found["vgg16"]


# -- table 6.1 ----------------------------------------------------------------------------------------------------

# ResNet-18 on ImageNet under torchgpipe: samples of a micro-batch, how many; seconds an epoch of A, B and C. Of E the
# text says that it was much slower than B.
CONFIGURATIONS = {"A": (24, 12), "B": (32, 12), "C": (32, 20), "E": (16, 30)}
SECONDS = {"A": 1206.34, "B": 1030.49, "C": 936.27}
IMAGES = 1_281_000


def processes() -> Profile:
    """Of ranks that are processes."""
    return profiled("resnet18", "imagenet", 16)


def epochs(profile: Profile) -> dict[str, float]:
    found = {}
    for name, (samples, micro) in CONFIGURATIONS.items():
        line = f"pp=4 schedule=lockstep recompute=except-last micro={micro}"
        found[name] = IMAGES / asked(line, profile, titans(), samples * micro).samples_per_s
    return found


@pytest.mark.slow
def test_the_order_of_table_6_1() -> None:
    for found in (processes(), in_one_process(processes(), 4)):
        seconds = epochs(found)
        assert seconds["C"] < seconds["B"] < seconds["A"]


@pytest.mark.slow
@pytest.mark.xfail(
    strict=True,
    reason="B and C take 0.946 and 0.899 of A's seconds, where 0.854 and 0.776 are published (10.7 and 16 % off); "
    "and E 1.15 of B's, not 1.2",
)  # fmt: skip
def test_table_6_1() -> None:
    """Of torchgpipe's one process, whose threads issue the forward passes of all four devices in turn."""
    threads = epochs(in_one_process(processes(), 4))
    assert threads["B"] / threads["A"] == pytest.approx(SECONDS["B"] / SECONDS["A"], rel=0.10)
    assert threads["C"] / threads["A"] == pytest.approx(SECONDS["C"] / SECONDS["A"], rel=0.10)
    assert threads["E"] > 1.2 * threads["B"]


@pytest.mark.slow
def test_small_micro_batches_cost_more_in_one_process() -> None:
    """Ranks that are processes would be as fast with E as with B; threads of one process are not, as the thesis found,
    and its table hangs on it."""
    ranks, threads = epochs(processes()), epochs(in_one_process(processes(), 4))
    assert ranks["E"] < ranks["B"]
    assert threads["E"] > 1.1 * threads["B"]
    assert threads["B"] / threads["A"] < 0.97 * ranks["B"] / ranks["A"]


@pytest.mark.slow
def test_what_table_6_1_would_take() -> None:
    """A host that is twice as slow as the one that our constants are from: then the seconds come out, too (but B's, see
    below), their ratios within 6 %, and the row that is lost is as a law through A, B and C has it. It cannot be the
    whole truth: see the last test."""
    found = epochs(in_one_process(processes(), 4, slower=2.0))
    for name in ("A", "C"):
        assert found[name] == pytest.approx(SECONDS[name], rel=0.05)
    for name in ("B", "C"):
        assert found[name] / found["A"] == pytest.approx(SECONDS[name] / SECONDS["A"], rel=0.06)
    assert found["E"] == pytest.approx(1382, rel=0.05)
    assert found["E"] > 1.2 * found["B"]


@pytest.mark.slow
@pytest.mark.xfail(strict=True, reason="B takes 5.8 % less than published")
def test_what_table_6_1_would_take_of_b() -> None:
    found = epochs(in_one_process(processes(), 4, slower=2.0))
    assert found["B"] == pytest.approx(SECONDS["B"], rel=0.05)


@pytest.mark.slow
def test_tables_6_1_and_8_1_do_not_go_together() -> None:
    """With such a host ResNet-18 on CIFAR-10, which has as many layers, would be half as slow again under torchgpipe,
    beside Horovod, as it was: what a tick took in table 6.1 however small it was, a host does not explain."""
    profile = profiled("resnet18", "cifar10")
    _, samples, micro = BATCHES["cifar10"]
    line = f"pp=4 schedule=lockstep recompute=except-last micro={micro}"
    found = asked(line, in_one_process(profile, 4, slower=2.0), titans(), samples * micro)
    beside = asked("dp=4", in_one_process(profile, 1, slower=2.0), titans(), 4 * samples)
    assert beside.samples_per_s / found.samples_per_s > 1.4 * RATIOS["resnet18", "cifar10"]
