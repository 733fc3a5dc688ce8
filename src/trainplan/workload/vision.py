"""Workloads of the image networks: `resnet50:cifar10`, `vgg11:mnist,bn=0,batch=256`."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainplan.errors import InputError, nearest
from trainplan.workload import options
from trainplan.workload.call import call
from trainplan.workload.datasets import DATASETS, dataset, plain
from trainplan.workload.training import Training
from trainplan.workload.workload import Batch, Workload
from trainplan.workload.zoo import NETWORKS, network_options

if TYPE_CHECKING:
    from torch import nn


def load_vision(network: str, data: str, given: Mapping[str, Any]) -> Workload:
    """The workload of a network of the zoo on a data set of the table; `given` are options of either."""
    from trainplan.workload.losses import cross_entropy

    key = plain(network)
    if not data:
        raise InputError(f"workload {network!r}", "it does not say on which data set", f"{key}:cifar10")
    entry = DATASETS.get(plain(data))
    if entry is None:
        close = nearest(data, DATASETS).split(", ")
        instead = ", ".join(f"{key}:{name}" for name in close)
        raise InputError(f"workload {network}:{data}", f"the data set {data!r} is not in the table", instead)
    own = network_options(NETWORKS[key], entry)
    defaults = Training(
        entry.batch, entry.training, "sgd", lr=entry.lr, momentum=entry.momentum, weight_decay=entry.weight_decay
    )
    table = (*own, *defaults.options(given))
    head = f"{key}:{entry.key}"
    values = options.read(given, table, head)
    training = Training.of(values)
    return Workload(
        name=options.spell(head, values, table),
        build=call(build, network=key, data=entry.key, **{option.name: values[option.name] for option in own}),
        inputs=call(images, data=entry.key),
        loss=cross_entropy(),
        optimizer=training.factory(),
        batch=training.batch,
        samples_per_epoch=training.samples_per_epoch,
        sample="image",
        dataset=entry.key,
        clip_norm=training.clip_norm,
    )


def build(network: str, data: str, **chosen: Any) -> nn.Module:
    """The network itself, on whatever device is the default when this is called."""
    entry = NETWORKS[network]
    family = importlib.import_module(f"trainplan.workload.zoo.{entry.family}")
    model: nn.Module = family.build(dataset(data), **entry.size, **chosen)
    return model


def images(samples: int, seed: int, data: str) -> Batch:
    """Uniform noise, normalised as the loader does it, with random labels."""
    import torch

    entry = dataset(data)
    # The device is spelled out: a batch is real even where the default device is "meta".
    random = torch.Generator("cpu").manual_seed(seed)
    pixels = torch.rand(samples, *entry.shape, generator=random, device="cpu")
    mean = torch.tensor(entry.mean, device="cpu").view(-1, 1, 1)
    deviation = torch.tensor(entry.deviation, device="cpu").view(-1, 1, 1)
    labels = torch.randint(entry.classes, (samples,), generator=random, device="cpu")
    return Batch(samples, args=((pixels - mean) / deviation,), targets=labels)
