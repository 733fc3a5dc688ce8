"""The GPT workload by shape: `gpt:layers=24,hidden=1024,heads=16,seq=1024,vocab=50257`.

A sample is a sequence of `seq` tokens, its targets are the tokens that follow each. Without a file of tokens there is
no natural epoch, so one is taken to be a thousand million tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainplan.errors import InputError
from trainplan.workload import options
from trainplan.workload.call import call
from trainplan.workload.options import Option
from trainplan.workload.training import Training
from trainplan.workload.workload import Batch, Workload

if TYPE_CHECKING:
    import torch
    from torch import nn

EPOCH_TOKENS = 10**9
# GPT-2 and the small GPT-3 models were trained with half a million tokens a step: 512 sequences of 1,024.
STEP_TOKENS, STEP_SEQUENCES = 2**19, 512

SHAPE = (
    Option("layers", 12, minimum=1),
    Option("hidden", 768, minimum=1),
    Option("heads", 12, minimum=1),
    Option("seq", 1024, minimum=1),
    Option("vocab", 50257, minimum=2),
)


def language_training(length: int) -> Training:
    """Defaults for a model of sequences of so many tokens.

    >>> language_training(1024).batch, language_training(8192).batch, language_training(32).batch
    (512, 64, 512)
    """
    return Training(
        batch=min(STEP_SEQUENCES, max(1, STEP_TOKENS // length)),
        samples_per_epoch=max(1, EPOCH_TOKENS // length),
    )


def load_gpt(given: Mapping[str, Any]) -> Workload:
    from trainplan.workload.losses import token_cross_entropy

    shape = options.read({key: given[key] for key in given if key in {o.name for o in SHAPE}}, SHAPE, "gpt")
    kernels = Option("attention", "fused", choices=("fused", "eager"))
    own = (*SHAPE, Option("mlp", 4 * shape["hidden"], minimum=1), Option("dropout", 0.0), kernels)
    table = (*own, *language_training(shape["seq"]).options(given))
    values = options.read(given, table, "gpt")
    if values["hidden"] % values["heads"]:
        divisors = [n for n in range(1, values["hidden"] + 1) if values["hidden"] % n == 0]
        close = min(divisors, key=lambda n: (abs(n - values["heads"]), n))
        raise InputError(
            f"gpt with hidden={values['hidden']} and heads={values['heads']}",
            f"{values['hidden']} does not divide into {values['heads']} heads",
            f"heads={close}",
        )
    training = Training.of(values)
    return Workload(
        name=options.spell("gpt", values, table, always=[option.name for option in SHAPE]),
        build=call(build, **{option.name: values[option.name] for option in own}),
        inputs=call(sequences, seq=values["seq"], vocab=values["vocab"]),
        loss=token_cross_entropy(),
        optimizer=training.factory(),
        batch=training.batch,
        samples_per_epoch=training.samples_per_epoch,
        epoch_assumed="samples_per_epoch" not in given,
        sample="sequence",
        tokens_per_sample=values["seq"],
        clip_norm=training.clip_norm,
        feed=call(feed, vocab=values["vocab"]),
    )


def build(**shape: Any) -> nn.Module:
    from trainplan.workload.zoo.gpt import GPT

    return GPT(**shape)


def sequences(samples: int, seed: int, seq: int, vocab: int) -> Batch:
    """Random tokens; each target is the token that follows."""
    import torch

    random = torch.Generator("cpu").manual_seed(seed)
    tokens = torch.randint(vocab, (samples, seq + 1), generator=random, device="cpu")
    return Batch(samples, args=(tokens[:, :-1].contiguous(),), targets=tokens[:, 1:].contiguous())


def feed(tokens: torch.Tensor, following: torch.Tensor, random: torch.Generator, vocab: int) -> Batch:
    """One sequence of a token file as a batch of one."""
    check_vocabulary(tokens, vocab)
    check_vocabulary(following, vocab)
    return Batch(1, args=(tokens[None],), targets=following[None])


def check_vocabulary(tokens: torch.Tensor, vocab: int) -> None:
    """An embedding asked for a token that it lacks ends a CUDA process without a word; so look first."""
    largest = int(tokens.max())
    if largest >= vocab:
        raise InputError(
            f"token {largest}",
            f"the model's vocabulary has {vocab} tokens",
            f"a model with vocab={largest + 1} or more",
        )
