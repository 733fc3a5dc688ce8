"""Options that would change nothing are refused, with what does; those that are left as they are pass."""

import re
from pathlib import Path

import pytest

import trainplan
from search.models import model
from tests.test_cli import call
from tests.test_saved import refused
from trainplan.errors import InputError

GPT = "gpt:layers=2,hidden=16,heads=2,seq=8,vocab=32,batch=4"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    model().save("model.json")
    there = {"cluster": "2xTitanRTX", "batch": 16}
    trainplan.timeline("model.json", "pp=2 micro=4", **there).timelines[0].save("saved.json")
    return tmp_path


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("recommend model.json --cluster 2xT4 --method thesis --run --top 1", "thesis --run --top 1: it shows all"),
        ("recommend model.json --cluster 2xT4 --method hardware --top 3", "hardware --top 3: .* Try --method model"),
        (f"run {GPT} --cluster 1xcpu --plan single --samples 8", "--samples 8: .* Try --data memory --samples 8"),
        ("study staleness --models vgg11:mnist", "staleness --models vgg11:mnist: .* Try study data-movement"),
        ("study staleness --device cpu --batch 4", "staleness --device cpu --batch 4: it trains"),
        ("study staleness --steps 3 --set link=1GB/s", "staleness --set link=1GB/s --steps 3: it trains"),
        ("study data-movement --tasks digits --seeds 2", "--tasks digits --seeds 2: .* Try study staleness"),
        ("study methods --epochs 3 --rules ssp", "methods --rules ssp --epochs 3.0: .* trains nothing"),
        ("device show H200 --minutes 1", "device show H200 --minutes 1.0: .* nothing is measured. Try device measure"),
        ("device show H200 --quick --device cpu", "device show H200 --device cpu --quick: a file is shown"),
        ("timeline saved.json --cluster 4xH200", "--cluster 4xH200: .* drawn as it is. Try --plan ddp"),
        ("timeline saved.json --batch 8 --set link=1GB/s --set memory=8GiB", "8 --set link=1GB/s --set memory=8GiB:"),
        ("timeline saved.json --profile model.json --compile", "--profile model.json --compile: .* drawn as it is"),
    ],
)
def test_what_would_be_ignored_is_refused(line: str, said: str, folder, monkeypatch, capsys) -> None:
    """With code 2 and one line that names it; nothing is run or written."""
    assert re.search(said, refused(line.split(), monkeypatch, capsys))


def test_what_is_as_usual_passes(folder) -> None:
    assert "rank 1" in call("timeline", "saved.json", "--width", 60, "--steps", 1)
    assert call("recommend", "model.json", "--cluster", "2xTitanRTX", "--method", "thesis", "--candidates", "single")
    assert "H200" in call("device", "show", "H200", "-o", "copy.json")
    assert Path("copy.json").exists()


def test_from_python_too(folder) -> None:
    with pytest.raises(InputError, match="--set link=1GB/s: "):
        trainplan.timeline("saved.json", set={"link": "1GB/s"})
    with pytest.raises(InputError, match="--loss cross_entropy: "):
        trainplan.timeline("saved.json", loss="cross_entropy")
