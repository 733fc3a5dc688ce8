"""From a cold start to a predicted plan: seconds of the processor and memory that very large models take.

    python benchmarks/cold.py
    python benchmarks/cold.py --only hf

Each is predicted in a process of its own, which has imported nothing before: a GPT by its shape (no torch), models of
Hugging Face by configurations of their papers (nothing is downloaded, and no weights are made), and a model that a user
has written. (BLOOM is not among them: its GELU is an autograd function of its own, which capture refuses.) Seconds are
those of the processor (`user`), since others may be at work; memory is the largest that the process had. `GOALS` are
what they must not exceed.
"""

import argparse
import multiprocessing
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

from trainplan.units import gib, seconds

PLAN = "pp=8 dp=8 schedule=1f1b micro=8"  # on 64 devices
CLUSTER = "8x8xH100-SXM"
GPT = "gpt:layers={},hidden={},heads={},seq=2048,vocab=50304"
OPT = "num_hidden_layers=96,hidden_size=12288,ffn_dim=49152,num_attention_heads=96,word_embed_proj_dim=12288"
MODELS = {
    "gpt, 96 layers, 175 B": GPT.format(96, 12288, 96),
    "hf: OPT-175B": f"hf:opt,{OPT}",
    "hf: Llama-2-70B": "hf:llama,num_hidden_layers=80,hidden_size=8192,intermediate_size=28672,"
    "num_attention_heads=64,num_key_value_heads=8",
    "user: Llama of 70 B": "benchmarks/networks.py:llama,layers=86,hidden=8192,heads=64,seq=2048",
}
GOALS = {"gpt": (3.0, 2 * 2**30), "hf": (20.0, 2 * 2**30), "user": (20.0, 2 * 2**30)}  # seconds, bytes
CALL = """
import trainplan
found = trainplan.predict({model!r}, {plan!r}, {cluster!r}, batch=64).prediction
print(found.step_s)
"""


@dataclass(frozen=True)
class Cold:
    """What one prediction took."""

    name: str
    step_s: float
    user_s: float
    elapsed_s: float
    peak_bytes: int

    @property
    def within(self) -> bool:
        """Whether it is as quick and as small as it must be."""
        most_s, most_bytes = GOALS[self.name.split(":")[0].split(",")[0]]
        return self.user_s < most_s and self.peak_bytes < most_bytes

    def __str__(self) -> str:
        return (
            f"{self.name:<24} step {seconds(self.step_s):>8}  user {seconds(self.user_s):>8}  elapsed "
            f"{seconds(self.elapsed_s):>8}  peak {gib(self.peak_bytes):>9}{'' if self.within else '  TOO MUCH'}"
        )


def cold(name: str) -> Cold:
    """Predict one of the models in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:  # whose only child it is: its usage is that child's
        return pool.apply(_alone, (name,))


def _alone(name: str) -> Cold:
    begin = time.perf_counter()
    call = CALL.format(model=MODELS[name], plan=PLAN, cluster=CLUSTER)
    done = subprocess.run([sys.executable, "-c", call], check=True, stdout=subprocess.PIPE, text=True)
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    elapsed = time.perf_counter() - begin
    return Cold(name, float(done.stdout.split()[-1]), usage.ru_utime, elapsed, 1024 * usage.ru_maxrss)


def every(only: str = "") -> Iterator[Cold]:
    """All models whose name has these letters in it."""
    for name in MODELS:
        if only in name:
            yield cold(name)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="letters of a model's name")
    for found in every(parser.parse_args().only):
        print(found, flush=True)


if __name__ == "__main__":
    main()
