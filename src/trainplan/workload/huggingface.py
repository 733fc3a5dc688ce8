"""Hugging Face models by configuration: `hf:gpt2`, `hf:llama,num_hidden_layers=4`, `hf:path/config.json`.

Nothing is ever downloaded: a model type stands for the default configuration of its class in transformers, a path for
a configuration on disk, and weights are random. Options are fields of the configuration, or `seq` (tokens of a
sequence), `task`, `mask_token`, and those of the training.

Inputs and loss follow from the task. The model computes its own loss from `labels`; we only have to know what its mean
is over:

| task | models | inputs | mean over |
|---|---|---|---|
| causal | GPT-2, Llama … | input_ids, labels = input_ids (the model shifts them) | labels that count, but the first |
| masked | BERT … | input_ids with 15 % masked, labels there | labels that count |
| seq2seq | T5 … | input_ids, labels | labels that count |
| image | ViT … | pixel_values, labels | samples |

In a part of a batch where no label counts, these models give nan (0/0); ours do not.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainplan.errors import InputError, ModelError, nearest
from trainplan.workload import options
from trainplan.workload.call import call
from trainplan.workload.language import check_vocabulary, language_training
from trainplan.workload.losses import IGNORE, count_samples
from trainplan.workload.options import Option
from trainplan.workload.training import TRAINING_KEYS, Training
from trainplan.workload.workload import Batch, Loss, Workload

if TYPE_CHECKING:
    import torch
    from torch import nn

MASKED = 0.15  # share of tokens that a masked language model has to guess (Devlin et al. 2018)
LONGEST = 1024  # tokens of a sequence, where nothing is said and the model could take more


@dataclass(frozen=True)
class Task:
    mapping: str  # of transformers: model type → class
    automatic: str  # the class that makes any of them


# In this order: an encoder-decoder may also be made as a causal or masked model, BERT also as a causal one.
TASKS = {
    "seq2seq": Task("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", "AutoModelForSeq2SeqLM"),
    "image": Task("MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES", "AutoModelForImageClassification"),
    "masked": Task("MODEL_FOR_MASKED_LM_MAPPING_NAMES", "AutoModelForMaskedLM"),
    "causal": Task("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "AutoModelForCausalLM"),
}
_OWN = ("task", "seq", "mask_token")


def load_huggingface(source: str, given: Mapping[str, Any]) -> Workload:
    """The workload of a model type or a configuration file."""
    _transformers(source)
    title = f"hf:{source}"
    raw = _raw_config(source)
    changes = {key: options.guess(given[key]) for key in sorted(given) if key not in (*_OWN, *TRAINING_KEYS)}
    config = _config(title, raw, changes)
    task = _task(title, config, given.get("task"))
    own: list[Option] = [Option("task", _task(title, config, None), choices=tuple(TASKS))]
    if task == "image":
        training = Training(batch=256, samples_per_epoch=1_281_000)
    else:
        limit = _positions(config)
        default = min(LONGEST, 2 ** (limit.bit_length() - 1)) if limit else LONGEST
        own.append(Option("seq", default, minimum=2))
        seq = options.value(given.get("seq", default), own[-1], title)
        if limit and seq > limit:
            instead = f"seq={limit} or max_position_embeddings={seq}"
            raise InputError(f"{title} with seq={seq}", f"the configuration has {limit} positions", instead)
        training = language_training(2 * seq if task == "seq2seq" else seq)
    if task == "masked":
        known = getattr(config, "mask_token_id", None)
        own.append(Option("mask_token", _vocabulary(config) - 1 if known is None else int(known)))
    table = (*own, *training.options(given))
    values = options.read({key: given[key] for key in given if key not in changes}, table, title)
    training = Training.of(values)
    shape = _shape(config, task, values)
    head = ",".join([title, *(f"{key}={options.show(value)}" for key, value in changes.items())])
    return Workload(
        name=options.spell(head, values, table),
        build=call(build, config={**raw, **changes}, task=task),
        inputs=call(inputs, task=task, **shape),
        loss=Loss(picked, count_samples if task == "image" else call(count_labels, shifted=task == "causal"),
                  mean_over="samples" if task == "image" else "tokens"),
        optimizer=training.factory(),
        batch=training.batch,
        samples_per_epoch=training.samples_per_epoch,
        epoch_assumed="samples_per_epoch" not in given,
        sample="image" if task == "image" else "sequence",
        tokens_per_sample={"image": 0, "seq2seq": 2}.get(task, 1) * values.get("seq", 0),
        clip_norm=training.clip_norm,
        feed=call(feed, task=task, **shape),
    )  # fmt: skip


# -- the configuration ---------------------------------------------------------------------------------------------


def _transformers(source: str) -> Any:
    try:
        import transformers
    except ImportError:
        raise InputError(
            f"workload hf:{source}", "transformers is not installed", 'pip install "trainplan[hf]"'
        ) from None
    return transformers


def _model_types() -> Mapping[str, Any]:
    from transformers.models.auto import configuration_auto, modeling_auto

    useful = {name for task in TASKS.values() for name in getattr(modeling_auto, task.mapping)}
    return {name: value for name, value in configuration_auto.CONFIG_MAPPING_NAMES.items() if name in useful}


def _raw_config(source: str) -> dict[str, Any]:
    """The fields that are given: of a file, or the model type alone."""
    path = Path(source)
    if path.is_dir() and (path / "config.json").is_file():
        path /= "config.json"
    if path.is_file():
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InputError(f"workload hf:{source}", f"it is no JSON ({error})", "a config.json") from None
        if not isinstance(content, dict) or content.get("model_type") not in _model_types():
            kind = content.get("model_type") if isinstance(content, dict) else None
            raise InputError(f"workload hf:{source}", f"its model_type is {kind!r}", nearest(str(kind), _model_types()))
        return content
    if source in _model_types():
        return {"model_type": source}
    why = "there is no such file" if source.endswith(".json") else "it is not a model type that we can train"
    if "/" in source and not source.endswith(".json"):
        why = "there is no such folder, and nothing is downloaded"
    family = nearest(source.rpartition("/")[2].lower(), _model_types())
    if family.startswith("one of"):
        family = "gpt2, llama, bert, vit, t5"
    raise InputError(f"workload hf:{source}", why, f"hf:path/config.json, or a model type: {family}")


def _config(title: str, raw: Mapping[str, Any], changes: Mapping[str, Any]) -> Any:
    """The configuration object, as the models are to be trained: no cache of keys and values."""
    from transformers import AutoConfig

    try:
        plain = AutoConfig.for_model(raw["model_type"])
    except Exception as error:  # some types have no default configuration, or need another library
        raise InputError(title, f"transformers refuses its default configuration: {error}", "hf:gpt2") from None
    known = [key for key in {**plain.to_dict(), **plain.attribute_map, "num_labels": 0} if not key.startswith("_")]
    for key in changes:
        if key not in known and key not in raw:
            instead = nearest(key, [*known, *_OWN, *TRAINING_KEYS])
            raise InputError(f"option {key}={changes[key]} of {title}", "its configuration has no such field", instead)
    try:
        config = type(plain).from_dict({**raw, **changes})
    except Exception as error:  # transformers checks fields in its own ways
        raise InputError(title, f"transformers refuses the configuration: {error}", "other values") from None
    if hasattr(config, "use_cache"):
        config.use_cache = False
    if getattr(config, "num_labels", 0) > 1 and not config.problem_type:
        config.problem_type = "single_label_classification"  # else the first forward pass writes it there
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = (
            getattr(config, "pad_token_id", None) or 0
        )  # T5's class leaves it to its configuration files
    return config


def _task(title: str, config: Any, wanted: Any) -> str:
    from transformers.models.auto import modeling_auto

    classes = {name: getattr(modeling_auto, task.mapping).get(config.model_type) for name, task in TASKS.items()}
    possible = [name for name, found in classes.items() if found]
    if wanted is not None:
        word = options.value(wanted, Option("task", "causal", choices=tuple(TASKS)), title)
        if word not in possible:
            raise InputError(f"{title} with task={word}", "transformers has no such model", ", ".join(possible))
        return word
    for name in possible:  # what the file says that it is
        found = classes[name]
        if set(config.architectures or ()) & set((found,) if isinstance(found, str) else found):
            return name
    if not config.is_encoder_decoder and len(possible) > 1:
        possible = [name for name in possible if name != "seq2seq"]
    if getattr(config, "is_decoder", False) and "causal" in possible:
        return "causal"
    return possible[0]


def _text(config: Any) -> Any:
    """The part of a configuration that is about text, where it has several parts."""
    try:
        return config.get_text_config()
    except ValueError as error:
        raise InputError(f"hf:{config.model_type}", f"it is not one language model: {error}", "hf:gpt2") from None


def _positions(config: Any) -> int:
    """Positions that the model has; 0 where there is no limit."""
    limit = getattr(_text(config), "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 1 else 0


def _vocabulary(config: Any) -> int:
    size = getattr(_text(config), "vocab_size", None)
    if not isinstance(size, int):
        raise InputError(f"hf:{config.model_type}", "its configuration has no vocab_size", f"vocab_size={32_000}")
    return size


def _shape(config: Any, task: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """What a batch has to look like, as plain numbers."""
    if task == "image":
        size = getattr(config, "image_size", 224)
        height, width = size if isinstance(size, list | tuple) else (size, size)
        return {"image": (getattr(config, "num_channels", 3), height, width), "classes": config.num_labels}
    shape = {"seq": values["seq"], "vocab": _vocabulary(config)}
    return shape if task != "masked" else {**shape, "mask_token": values["mask_token"]}


# -- model, inputs, loss -------------------------------------------------------------------------------------------


def build(config: Mapping[str, Any], task: str) -> nn.Module:
    """The model with random weights, in training mode, with torch's own attention where it has it."""
    import torch
    import transformers

    title = f"hf:{config['model_type']}"
    maker = getattr(transformers, TASKS[task].automatic)
    with _offline():
        made = _config(title, config, {})
        found = maker._model_mapping[type(made)]
        kind = found[0] if isinstance(found, tuple) else found
        made.architectures = made.architectures or [kind.__name__]  # where there are several, it must be said which
        supported = getattr(kind, "_supports_sdpa", False)
        try:
            # A configuration on disk may ask for bfloat16; the precision of a run is a choice of the plan.
            model: nn.Module = maker.from_config(
                made, attn_implementation="sdpa" if supported else "eager", dtype=torch.get_default_dtype()
            )
        except Exception as error:
            why = f"transformers could not build it: {type(error).__name__}: {error}"
            raise ModelError(title, why, f"a configuration that {maker.__name__}.from_config takes") from error
    return model.train()


@contextmanager
def _offline() -> Iterator[None]:
    """No request to the hub in here, whatever a configuration asks for (pretrained backbones, code)."""
    from huggingface_hub import constants

    before, variable = constants.HF_HUB_OFFLINE, os.environ.get("HF_HUB_OFFLINE")
    constants.HF_HUB_OFFLINE, os.environ["HF_HUB_OFFLINE"] = True, "1"
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before
        if variable is None:
            del os.environ["HF_HUB_OFFLINE"]
        else:
            os.environ["HF_HUB_OFFLINE"] = variable


def inputs(samples: int, seed: int, task: str, **shape: Any) -> Batch:
    """A random batch of the right shapes."""
    import torch

    random = torch.Generator("cpu").manual_seed(seed)
    if task == "image":
        pixels = torch.randn(samples, *shape["image"], generator=random, device="cpu")
        labels = torch.randint(shape["classes"], (samples,), generator=random, device="cpu")
        return Batch(samples, kwargs={"pixel_values": pixels, "labels": labels})
    length = shape["seq"] * (2 if task == "seq2seq" else 1)
    tokens = torch.randint(shape["vocab"], (samples, length), generator=random, device="cpu")
    return Batch(samples, kwargs=_arguments(tokens, random, task, **shape))


def feed(sample: torch.Tensor, target: torch.Tensor, random: torch.Generator, task: str, **shape: Any) -> Batch:
    """One sample of a data set as a batch of one."""
    if task == "image":
        return Batch(1, kwargs={"pixel_values": sample[None], "labels": target[None]})
    check_vocabulary(sample, shape["vocab"])
    return Batch(1, kwargs=_arguments(sample[None], random, task, **shape))


def _arguments(tokens: torch.Tensor, random: torch.Generator, task: str, **shape: Any) -> dict[str, torch.Tensor]:
    """The arguments of a language model from rows of tokens."""
    import torch

    if task == "causal":
        return {"input_ids": tokens, "labels": tokens.clone()}
    if task == "seq2seq":  # the first half is read, the second half is to be written
        return {"input_ids": tokens[:, : shape["seq"]].contiguous(), "labels": tokens[:, shape["seq"] :].contiguous()}
    masked = torch.rand(tokens.shape, generator=random, device="cpu") < MASKED
    masked[:, 0] |= ~masked.any(dim=1)  # a row without a label would have no mean
    ids = torch.where(masked, shape["mask_token"], tokens)
    return {"input_ids": ids, "labels": torch.where(masked, tokens, IGNORE)}


def picked(output: Any, targets: Any) -> torch.Tensor:
    """The loss that the model has computed."""
    loss: torch.Tensor = output["loss"] if isinstance(output, Mapping) else output[0]
    return loss


def count_labels(batch: Batch, shifted: bool) -> int:
    """Labels that count; a causal model compares each token with the one before it, so the first never does."""
    labels = batch.kwargs["labels"]
    return int((labels[:, 1:] if shifted else labels).ne(IGNORE).sum())
