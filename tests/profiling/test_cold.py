"""Very large models from a cold start: seconds of the processor and memory, each in a process of its own."""

import pytest
from benchmarks import cold

HUGGING_FACE = [name for name in cold.MODELS if name.startswith("hf:")]


@pytest.mark.slow
@pytest.mark.parametrize("name", cold.MODELS)
def test_a_model_that_fits_no_machine_here_is_predicted_quickly_and_in_little_memory(name):
    if name in HUGGING_FACE:
        pytest.importorskip("transformers")
    found = cold.cold(name)
    assert found.step_s > 0
    assert found.within, str(found)


def test_what_is_too_much_is_said():
    gib = 2**30
    assert cold.Cold("hf: Llama-2-70B", 1.0, 19.0, 60.0, gib).within
    for seconds, size in ((21.0, gib), (1.0, 3 * gib)):
        assert str(cold.Cold("hf: Llama-2-70B", 1.0, seconds, 60.0, size)).endswith("TOO MUCH")
    assert not cold.Cold("gpt, 96 layers, 175 B", 1.0, 3.5, 3.5, gib).within
