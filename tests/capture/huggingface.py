"""Hugging Face models from tiny configs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from trainplan.workload.workload import Batch, Loss

from .models import Case

try:
    import transformers

    transformers.logging.set_verbosity_error()
except ImportError:  # an optional dependency; test_chain.py says that these models were left out
    transformers = None

_HEADS = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 24}


def _gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=31, n_positions=16, n_embd=16, n_layer=2, n_head=2, use_cache=False, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def _llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=31, num_key_value_heads=1, max_position_embeddings=16, use_cache=False, **_HEADS
    )
    return transformers.LlamaForCausalLM(config)


def _bert() -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=31, max_position_embeddings=16, **_HEADS))


def _vit() -> nn.Module:
    config = transformers.ViTConfig(image_size=32, patch_size=8, num_labels=5, hidden_dropout_prob=0.1, **_HEADS)
    return transformers.ViTForImageClassification(config)


def _t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=31, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, use_cache=False, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


def _text(mask: bool) -> Callable[[int, int], Batch]:
    def batch(samples: int, seed: int) -> Batch:
        g = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, 31, (samples, 7), generator=g)
        labels = torch.randint(0, 31, (samples, 7), generator=g)
        labels[:, 0] = -100
        kwargs = {"input_ids": ids, "labels": labels}
        if mask:
            kwargs["attention_mask"] = (torch.arange(7) < torch.randint(3, 8, (samples, 1), generator=g)).long()
        return Batch(samples, (), kwargs)

    return batch


def _pictures(samples: int, seed: int) -> Batch:
    g = torch.Generator().manual_seed(seed)
    kwargs = {
        "pixel_values": torch.randn(samples, 3, 32, 32, generator=g),
        "labels": torch.randint(0, 5, (samples,), generator=g),
    }
    return Batch(samples, (), kwargs)


_LOSS = Loss(lambda output, targets: output.loss, lambda batch: batch.samples)


def _training(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: build().train()


_ALL = (
    Case("gpt2", _training(_gpt2), _text(False), _LOSS),
    Case("llama", _training(_llama), _text(True), _LOSS),
    Case("bert", _training(_bert), _text(True), _LOSS),
    Case("vit", _training(_vit), _pictures, _LOSS),
    Case("t5", _training(_t5), _text(True), _LOSS),
)
CASES = {case.name: case for case in _ALL if transformers is not None}
