"""The cases of the benchmark suite: which workload, on how many workers, under which conditions; and its candidates.

The networks and data sets are those of Jansen (2020), whose suite this is, with a family of GPTs added. The candidates
are the systems of `plan/systems.yaml` that can be run: a system that is built joins the suite by its row there.

>>> [case.name for case in cases(["vgg11"], ["mnist"], workers=[2, 4])]
['vgg11:mnist x2', 'vgg11:mnist x4']
>>> list(candidates(2))[:3]
['single', 'dataparallel dp=2', 'ddp dp=2']
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from trainplan.errors import InputError, PlanError, nearest
from trainplan.plan.plan import Request
from trainplan.plan.served import ASYNCHRONOUS, AT_SERVERS
from trainplan.plan.sliced import check_runs
from trainplan.plan.systems import SYSTEMS
from trainplan.plan.text import parse
from trainplan.units import gib, significant
from trainplan.workload.datasets import DATASETS

NETWORKS = ("resnet18", "resnet50", "resnet152", "vgg11", "vgg16", "mobilenetv2")
TEXT = "text"  # what the GPTs read
RECOMMENDED = "recommended"  # our own pick, beside the systems
GPTS = {
    "gpt-tiny": "gpt:layers=6,hidden=256,heads=4,seq=128,vocab=1024,batch=16",
    "gpt-small": "gpt:layers=6,hidden=512,heads=8,seq=256,vocab=8192,batch=32",
    "gpt-medium": "gpt:layers=12,hidden=1024,heads=16,seq=512,vocab=8192,batch=32",
}


@dataclass(frozen=True)
class Conditions:
    """What is done to the workers of a case, so that no single system is best everywhere."""

    memory: int = 0  # bytes that a worker may use; 0: what there is
    link: float = 0.0  # bytes/s between two halves of the workers; 0: as it is
    delay_s: float = 0.0  # of that link
    uneven: int = 1  # how many times slower the last half of the workers computes
    slices: int = 0  # of one GPU, a worker each; 0: cores
    # Of the bytes that tensors of `dp=WORKERS` take on a worker, the share that there is room for; 0: all there is.
    tight: float = 0.0

    def __str__(self) -> str:
        words = [f"{gib(self.memory)} a worker"] if self.memory else []
        words += [f"room for {self.tight:.0%} of a replica"] if self.tight else []
        if self.link:
            late = f", {significant(1e3 * self.delay_s)} ms late" if self.delay_s else ""
            words.append(f"a link of {significant(8 * self.link / 1e9)} Gbit/s{late}")
        words += [f"half of them {self.uneven} times slower"] if self.uneven > 1 else []
        words += [f"{self.slices} slices of a GPU"] if self.slices else []
        return ", ".join(words)


@dataclass(frozen=True)
class Case:
    """One question to a recommender: the fastest way to train this on so many workers."""

    network: str
    dataset: str
    workload: str
    workers: int
    conditions: Conditions = field(default_factory=Conditions)

    @property
    def name(self) -> str:
        told = f"{self.workload} x{self.workers}"
        return f"{told}, {self.conditions}" if str(self.conditions) else told

    @property
    def file(self) -> str:
        """The name of the file that its results are in.

        >>> Case("gpt", TEXT, "gpt:layers=2,hidden=8", 2, Conditions(memory=2**30)).file
        'gpt-layers-2-hidden-8-x2-1.00-GiB-a-worker.json'
        """
        return re.sub(r"[^A-Za-z0-9.]+", "-", self.name) + ".json"


# Where no one system is best: sums are slow, half of the workers are, or replicas do not fit (nor do those that share
# out their states; pipelines do).
HARD = (Conditions(link=125e6, delay_s=1e-3), Conditions(uneven=2), Conditions(tight=0.6))
HARD_NETWORKS = ("vgg11:cifar10", "mobilenetv2:cifar10", GPTS["gpt-tiny"])


def hard(workers: Sequence[int], batch: int = 0) -> list[Case]:
    """The cases of the suite in which it matters what is chosen.

    >>> [case.name for case in hard([4])][:3]  # doctest: +NORMALIZE_WHITESPACE
    ['vgg11:cifar10 x4, a link of 1.00 Gbit/s, 1.00 ms late', 'vgg11:cifar10 x4, half of them 2 times slower',
     'vgg11:cifar10 x4, room for 60% of a replica']
    """
    found = []
    for name in HARD_NETWORKS:
        network, _, data = name.partition(":")
        known = ("gpt-tiny", TEXT) if network == "gpt" else (network, data)
        found += [Case(*known, _sized(name, batch), count, one) for count in workers for one in HARD]
    return found


def cases(
    networks: Sequence[str] = (), datasets: Sequence[str] = (), workloads: Sequence[str] = (),
    workers: Sequence[int] = (2,), conditions: Conditions | None = None, batch: int = 0,
) -> list[Case]:  # fmt: skip
    """All of the suite, or those that are named; `workloads` are others than the suite's, instead of them."""
    known = (*NETWORKS, *GPTS)
    for option, words, all_of in (("networks", networks, known), ("datasets", datasets, (*DATASETS, TEXT))):
        for word in words:
            if word not in all_of:
                raise InputError(f"--{option} {word}", f"the suite has {', '.join(all_of)}", nearest(word, all_of))
    found = [(name.partition(":")[0], name.partition(":")[2].partition(",")[0], name) for name in workloads]
    if not workloads:
        chosen, on = networks or known, datasets or (*DATASETS, TEXT)
        found = [(network, data, f"{network}:{data}") for data in DATASETS for network in NETWORKS]
        found += [(network, TEXT, name) for network, name in GPTS.items()]
        found = [one for one in found if one[0] in chosen and one[1] in on]
        if not found:
            why = "no network that was named goes with a data set that was named: GPTs read text, the others images"
            raise InputError(f"--networks {','.join(networks)} --datasets {','.join(datasets)}", why, "--datasets text")
    sized = [(network, data, _sized(name, batch)) for network, data, name in found]
    return [Case(*one, count, conditions or Conditions()) for one in sized for count in workers]


def _sized(name: str, batch: int) -> str:
    """A workload's name with another batch."""
    if not batch:
        return name
    plain = re.sub(r",batch=\d+", "", name)
    return f"{plain},batch={batch}"


def systems(words: Collection[str] = ()) -> list[str]:
    """The keys of all systems that can be run, or of those that were asked for."""
    known = [key for key, row in SYSTEMS.items() if row.choices is not None and _runs(row.choices)]
    for word in words:
        if word not in known:
            raise InputError(f"--systems {word}", "it is no system that can be run", nearest(word, known))
    return [key for key in known if not words or key in words]


def _runs(choices: str) -> bool:
    try:
        check_runs(parse(choices))
    except PlanError:
        return False
    return True


def candidates(workers: int, words: Collection[str] = (), uneven: bool = False) -> dict[str, str]:
    """By request, the key of the system that it asks for: each on so many workers, or on one. Where workers are uneven
    they are the systems as they are known: all replicas have as many samples. Of servers there is one, or two."""
    rows = [(key, parse(SYSTEMS[key].choices or "")) for key in systems(words)]
    found = {
        asked(choices, key, workers, servers): key
        for key, choices in rows
        for servers in ((1, 2) if choices.exchange in AT_SERVERS else (1,))
    }
    return {_alike(line) if uneven else line: key for line, key in found.items() if line}


def _alike(line: str) -> str:
    """A request whose replicas have as many samples each, whatever they run on.

    >>> _alike("ddp dp=3"), _alike("gpipe pp=4 dp=1"), _alike("ps-asp dp=3 servers=1")
    ('ddp dp=3 ratio=1,1,1', 'gpipe pp=4 dp=1', 'ps-asp dp=3 servers=1')
    """
    request = parse(line)
    replicas = request.dp or 1
    shared = replicas > 1 and request.exchange not in ASYNCHRONOUS
    return f"{line} ratio={','.join(['1'] * replicas)}" if shared else line


def asked(choices: Request, key: str, workers: int, servers: int = 1) -> str:
    """The line that asks for a system on so many workers; none where it wants more of them. A server is one, too.

    >>> asked(parse("schedule=gpipe"), "gpipe", 4), asked(parse("exchange=ps-bsp pp=1"), "ps-bsp", 4)
    ('gpipe pp=4 dp=1', 'ps-bsp dp=3 servers=1')
    >>> [asked(parse("exchange=ps-bsp pp=1"), "ps-bsp", workers, servers=2) for workers in (3, 4)]
    ['', 'ps-bsp dp=2 servers=2']
    """
    if choices.dp == 1 or choices.partition is not None:  # of those that cut, some choose on how many workers, too
        return key if choices.dp == 1 or workers > 1 else ""
    if choices.pp != 1:
        return f"{key} pp={workers} dp=1" if workers > 1 else ""
    if choices.exchange in AT_SERVERS:
        return f"{key} dp={workers - servers} servers={servers}" if workers > servers + 1 else ""
    return f"{key} dp={workers}" if workers > 1 else ""


def whole_numbers(option: str, words: Iterable[str]) -> list[int]:
    """The numbers of an option.

    >>> whole_numbers("workers", ["2", "4"])
    [2, 4]
    """
    found = list(words)
    try:
        numbers = [int(word) for word in found]
    except ValueError:
        raise InputError(f"--{option} {','.join(found)}", "they are whole numbers with commas", "2,4") from None
    if not numbers or min(numbers) < 1:
        raise InputError(f"--{option} {','.join(found)}", "there is at least one", "2,4")
    return numbers
