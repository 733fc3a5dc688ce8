"""Hugging Face models by configuration: never a download, the right inputs, the right count of what a mean is over."""

import json
import socket

import pytest
import torch

from trainplan.errors import InputError
from trainplan.workload.batch import split
from trainplan.workload.describe import describe
from trainplan.workload.load import load
from trainplan.workload.workload import Batch

pytest.importorskip("transformers")

SMALL = {
    "gpt2": "n_layer=2,n_embd=32,n_head=4,vocab_size=64,seq=16",
    "llama": "num_hidden_layers=2,hidden_size=32,intermediate_size=64,num_attention_heads=4,num_key_value_heads=2,"
    "vocab_size=64,seq=16",
    "bert": "num_hidden_layers=2,hidden_size=32,intermediate_size=64,num_attention_heads=4,vocab_size=64,seq=16",
    "t5": "num_layers=2,d_model=32,d_kv=8,d_ff=64,num_heads=4,vocab_size=64,seq=16",
    "vit": "num_hidden_layers=2,hidden_size=32,intermediate_size=64,num_attention_heads=4,image_size=32,patch_size=8",
}
NAMES = [f"hf:{kind},{shape}" for kind, shape in SMALL.items()]


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def forward(workload, model, batch):
    return workload.loss.function(model(*batch.args, **batch.kwargs), batch.targets)


@pytest.mark.parametrize(
    ("name", "count", "mean_over", "batch"),
    [
        ("hf:gpt2", 124_439_808, "tokens", 512),
        ("hf:bert", 109_514_298, "tokens", 512),
        ("hf:llama", 6_738_415_616, "tokens", 512),
        ("hf:t5", 60_506_624, "tokens", 256),
        ("hf:vit", 85_800_194, "samples", 256),
    ],
)
def test_default_configurations(name, count, mean_over, batch):
    workload = load(name)
    assert (workload.name, workload.loss.mean_over, workload.batch) == (name, mean_over, batch)
    assert describe(workload).parameters == count


@pytest.mark.parametrize("name", NAMES)
def test_models_train_and_export(name):
    workload = load(name)
    assert load(workload.name) == workload
    torch.manual_seed(0)
    model = workload.build()
    assert model.training
    assert not getattr(model.config, "use_cache", False)
    assert model.config._attn_implementation == "sdpa"
    batch = workload.inputs(4, 0)
    forward(workload, model, batch).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    program = torch.export.export(model, batch.args, batch.kwargs, strict=False)
    assert workload.loss.function(program.module()(**batch.kwargs), None).isfinite()


@pytest.mark.parametrize("name", NAMES)
def test_parts_weighted_by_their_count_give_the_whole(name):
    workload = load(name)
    model = workload.build().double().eval()
    batch = workload.inputs(5, 1)
    labels = batch.kwargs["labels"]
    if labels.dim() == 2:  # padding at different places, so that no two parts count alike
        for row in range(5):
            labels[row, 16 - 3 * row :] = -100
        if name.startswith("hf:bert"):
            labels[:, 1] = 3
    if "pixel_values" in batch.kwargs:
        batch.kwargs["pixel_values"] = batch.kwargs["pixel_values"].double()
    whole = forward(workload, model, batch)
    parts = split(batch, [1, 3, 1])
    counts = [workload.loss.count(part) for part in parts]
    assert sum(counts) == workload.loss.count(batch)
    mean = sum(forward(workload, model, part) * count for part, count in zip(parts, counts, strict=True)) / sum(counts)
    # Losses of text are computed in float32, whatever the model's numbers are.
    close = 1e-9 if whole.dtype is torch.float64 else 1e-6
    torch.testing.assert_close(mean, whole, rtol=close, atol=close)


def test_a_causal_model_does_not_count_the_first_label():
    workload = load(NAMES[0])
    batch = workload.inputs(3, 0)
    assert torch.equal(batch.kwargs["input_ids"], batch.kwargs["labels"])
    assert workload.loss.count(batch) == 3 * 15


def test_a_configuration_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 1, "n_embd": 16, "n_head": 2,
              "vocab_size": 32, "n_positions": 24, "torch_dtype": "bfloat16"}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    workload = load("hf:config.json", batch=4)
    assert workload.name == "hf:config.json,batch=4"
    assert workload.tokens_per_sample == 16  # a power of two within the 24 positions
    assert next(workload.build().parameters()).dtype == torch.float32
    assert load("hf:.,n_layer=3").build().config.n_layer == 3
    (tmp_path / "bert.json").write_text(json.dumps({"model_type": "bert", "architectures": ["BertLMHeadModel"]}))
    assert load("hf:bert.json").loss.count(Batch(1, kwargs={"labels": torch.zeros(1, 4)})) == 3
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(InputError, match="it is no JSON"):
        load("hf:broken.json")
    (tmp_path / "other.json").write_text('{"model_type": "gptt2"}')
    with pytest.raises(InputError, match=r"model_type is 'gptt2'. Try .*gpt2"):
        load("hf:other.json")


def test_a_masked_model_always_has_something_to_guess():
    workload = load("hf:bert,seq=2,num_hidden_layers=1", mask_token=103)
    batch = workload.inputs(50, 0)
    masked = batch.kwargs["labels"] != -100
    assert masked.any(dim=1).all()
    assert (batch.kwargs["input_ids"][masked] == 103).all()
    assert workload.name == "hf:bert,num_hidden_layers=1,seq=2,mask_token=103"


def test_a_task_may_be_chosen():
    assert load("hf:bert,task=causal").name == "hf:bert,task=causal"
    assert "ForConditionalGeneration" in type(load("hf:bart,d_model=32,encoder_layers=1,decoder_layers=1,"
        "encoder_attention_heads=2,decoder_attention_heads=2,encoder_ffn_dim=8,decoder_ffn_dim=8,vocab_size=50,"
        "max_position_embeddings=32").build()).__name__  # fmt: skip
    with pytest.raises(InputError, match=r"transformers has no such model. Try causal"):
        load("hf:gpt2,task=masked")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hf:meta-llama/Llama-2-7b-hf", r"nothing is downloaded. Try hf:path/config.json, or a model type: .*llama"),
        ("hf:gpt2-medium", r"not a model type that we can train. Try .*gpt2"),
        ("hf:path/config.json", "there is no such file"),
        ("hf:gpt2,n_layr=3", "no such field. Try n_layer"),
        ("hf:gpt2,seq=4096", r"has 1024 positions. Try seq=1024 or max_position_embeddings=4096"),
        ("hf:", "not a model type"),
    ],
)
def test_what_cannot_be_had(text, message):
    with pytest.raises(InputError, match=message):
        load(text)


def test_the_hub_stays_as_the_user_has_it():
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    load(NAMES[0]).build()
    assert before == constants.HF_HUB_OFFLINE


def test_without_transformers(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(InputError, match=r'not installed. Try pip install "trainplan\[hf\]"'):
        load("hf:gpt2")
