"""A user's own training loop, as docs/guide.md has it; run by torchrun in a test."""

import sys

import torch
from torch import nn

import trainplan


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
    example = (torch.randn(2, 8), torch.randn(2, 8))
    plan, folder = sys.argv[1:]
    trainer = trainplan.build(
        plan, model, nn.functional.mse_loss, lambda p: torch.optim.SGD(p, lr=0.1), inputs=example, batch=8
    )
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        batch = (torch.randn(8, 8, generator=generator), torch.randn(8, 8, generator=generator))
        result = trainer.step(batch)
        if result.loss is not None and trainer.replica == 0:
            print(f"loss {result.loss:.6f}", flush=True)
    trainer.save(folder)
    value = trainer.evaluate(batch)
    if value is not None:
        print(f"evaluated {value:.6f}", flush=True)
    trainer.close()


if __name__ == "__main__":
    main()
