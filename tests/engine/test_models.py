"""Real models through the engine: GPT by shape and Hugging Face configs, cut and trained on two processes."""

import json
from functools import cache
from pathlib import Path

import pytest
import torch

from trainplan.bench.pool import pool
from trainplan.engine.exactness import in_double
from trainplan.engine.oracle import Trained, train_alone
from trainplan.engine.trainer import Trainer
from trainplan.plan.plan import Plan, plan
from trainplan.profile.capture.captured import capture
from trainplan.profile.capture.materialise import Skeleton
from trainplan.workload.load import load

TEXT = {"vocab_size": 40, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 24}
CONFIGS = {
    "gpt2": {"model_type": "gpt2", "vocab_size": 40, "n_embd": 16, "n_head": 2, "n_layer": 2, "n_positions": 12},
    "llama": {"model_type": "llama", **TEXT, "num_key_value_heads": 1, "max_position_embeddings": 12},
    "bert": {"model_type": "bert", **TEXT, "max_position_embeddings": 12},
    "vit": {
        "model_type": "vit", "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2,
        "intermediate_size": 24, "image_size": 8, "patch_size": 4, "num_labels": 3,
    },
    "t5": {
        "model_type": "t5", "vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2,
        "decoder_start_token_id": 0,
    },
}  # fmt: skip
MODELS = ["gpt:layers=2,hidden=16,heads=2,seq=12,vocab=40,dropout=0.1", *CONFIGS]
# Llama computes its norms in float32 whatever it is given, and GPT-2 its loss, so the order of additions shows: in the
# loss itself, but hardly in the weights.
TOLERANCE = {"llama": 1e-5}
LOSSES = TOLERANCE | {"gpt2": 1e-6}


@cache
def prepared(text: str):
    workload = in_double(load(text))
    skeleton = Skeleton(workload.build)
    skeleton.model.train()
    return workload, skeleton, capture(skeleton.model, workload.inputs(2, 0), workload.loss, device="cpu")


def train(rank: int, world: int, text: str, chosen: Plan, samples: int):
    workload, skeleton, captured = prepared(text)
    trainer = Trainer(chosen, workload, captured, lambda names: skeleton.materialise(names, 5), seed=7)
    losses = [trainer.step(workload.inputs(samples, step)).loss for step in range(2)]
    found = Trained(losses=losses, weights={name: p.detach().clone() for name, p in trainer.parameters.items()})
    held = sum(p.numel() for p in trainer.parameters.values())
    trainer.close()
    return found, held


@pytest.mark.parametrize("name", MODELS)
def test_a_real_model_on_two_processes(name: str, tmp_path: Path) -> None:
    text = name
    if name in CONFIGS:
        pytest.importorskip("transformers")
        path = tmp_path / "config.json"
        path.write_text(json.dumps(CONFIGS[name]))
        text = f"hf:{path},seq=10" if name != "vit" else f"hf:{path}"
    workload, skeleton, captured = prepared(text)
    blocks, samples = len(captured.blocks), 3
    chosen = plan(pp=2, micro=2, schedule="1f1b", stages=(max(1, blocks // 2),), blocks=blocks, recompute="full")
    batches = [workload.inputs(samples, step) for step in range(2)]
    want = train_alone(chosen, workload, captured, skeleton.materialise(None, 5), batches, 7)
    ranks = pool(2).run(train, text, chosen, samples)
    losses = {"rtol": LOSSES.get(name, 1e-9), "atol": LOSSES.get(name, 1e-9) * 1e-2}
    torch.testing.assert_close(ranks[1][0].losses, want.losses, **losses)
    close = {"rtol": TOLERANCE.get(name, 1e-9), "atol": TOLERANCE.get(name, 1e-9) * 1e-2}
    for found, _ in ranks:
        for parameter, weight in found.weights.items():
            torch.testing.assert_close(weight, want.weights[parameter], **close)
    # Each rank holds its own stage only; together they hold the model, tied weights once a holder.
    assert {n for found, _ in ranks for n in found.weights} == set(want.weights)
    assert max(held for _, held in ranks) < sum(w.numel() for w in want.weights.values())
