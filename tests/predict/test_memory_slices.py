"""Memory of slices of sequences against the allocator: carried keys and values, and their gradients."""

import pytest

from tests.predict import test_memory as whole


@pytest.mark.system("terapipe", "P")
@pytest.mark.parametrize("recompute", ["none", "full", "except-last"])
def test_terapipe_memory_of_real_steps(monkeypatch, recompute: str) -> None:
    choices = {"pp": 2, "micro": 2, "schedule": "terapipe", "slices": (32, 16, 16), "recompute": recompute}
    monkeypatch.setitem(whole.PLANS, "terapipe", choices)
    name = next(name for name in whole.MODELS if name.startswith("gpt"))
    whole.test_memory_of_real_steps(name, "terapipe")
