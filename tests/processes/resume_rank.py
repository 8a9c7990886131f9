"""Run by `test_resumed_splits.py`: trains a model with dropout on a mesh, saves every step, resumes.

    resume_rank.py FOLDER STEPS MESH

MESH: such as tp=2,dp=2. Prints, from rank 0, one line per step: its number, the losses and the norm, to the bit, and a
digest of all parameters.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import shardwise as sw

Tensor = torch.Tensor
TOKENS, WIDTH, HEAD = 8, 16, 4
TENSOR = {
    "plan": {
        "*.mix": {"style": "column", "parts": 3, "heads": WIDTH // HEAD},
        "*.out": {"style": "row", "heads": WIDTH // HEAD},
        "*.up": "column",
        "*.down": "row",
    }
}


class Block(nn.Module):
    """Drops weights of its attention and features in its MLP, which `tp` splits, and its outputs, which it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.inner, self.outer = nn.Dropout(0.3), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.mix(x).unflatten(-1, (3, -1, HEAD)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, dropout_p=0.2, is_causal=True)
        x = x + self.outer(self.out(attended.transpose(1, 2).flatten(2)))
        return x + self.outer(self.down(self.inner(functional.gelu(self.up(x)))))


def digest(engine: sw.Engine) -> str:
    """Of all parameters. Collective."""
    found = hashlib.sha256()
    for value in engine.state_dict().values():
        found.update(value.contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def train_one(engine: sw.Engine) -> float:
    """A step on what only its number determines: all random numbers are those of dropout."""
    share, num_shares = engine.data_ranks
    x = torch.randn(8, TOKENS, WIDTH, generator=torch.Generator().manual_seed(engine.num_steps))
    rows: Any = x.chunk(num_shares)[share]
    if "sp" in engine.mesh.axes:
        rows = engine.split_sequence(rows)
    return engine.train_step(rows, loss_fn=lambda output: output.square().mean()).item()


def main(folder: Path, num_steps: int, mesh: dict[str, int]) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(int(folder.exists()))  # a job that resumes has other numbers, and other values, of its own
    with sw.World.join() as world:
        model = nn.Sequential(*(Block() for _ in range(2)))
        plan: dict[str, Any] = {"preset": "zero1", "mesh": mesh, "accumulate": 2, "clip_grad_norm": 1.0}
        if "tp" in mesh:
            plan["tensor"] = TENSOR
        with sw.shard(model, plan, optimizer=torch.optim.AdamW(model.parameters()), world=world) as engine:
            engine.resume(folder)
            while engine.num_steps < num_steps:
                losses = world.exchange(train_one(engine).hex().encode())
                if "pp" in mesh:  # stages drop different features, and go on with the same numbers
                    states = world.exchange(hashlib.sha256(torch.get_rng_state().numpy()).digest())
                    assert len(set(states)) == 1
                engine.save(folder)
                found = digest(engine)
                if world.rank == 0:
                    told = " ".join(loss.decode() for loss in losses)
                    print(engine.num_steps, told, float(engine.gradient_norm or 0.0).hex(), found, flush=True)


if __name__ == "__main__":
    axes = (axis.split("=") for axis in sys.argv[3].split(","))
    main(Path(sys.argv[1]), int(sys.argv[2]), {name: int(size) for name, size in axes})
