"""Run by `test_elastic_restarts.py` on real processes: a loop that saves and resumes, as anybody writes it, of
whose ranks one is killed once.

restarting_rank.py OUT PLAN STEPS VICTIM AT     OUT: a folder; PLAN: JSON
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from survivor import OUTPUTS, WIDTH, batch_of, build, loss_of  # a file beside this one
from torch import nn

import shardwise as sw

Tensor = torch.Tensor
NUM_HEADS, NUM_TOKENS = 2, 4


class Attending(nn.Module):
    """Each row is cut into tokens, which attend to each other: what `sp` divides."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed, self.out = nn.Linear(WIDTH // NUM_TOKENS, 3 * WIDTH), nn.Linear(WIDTH, OUTPUTS // NUM_TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        heads = self.mixed(tokens).unflatten(-1, (3, NUM_HEADS, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(attended.transpose(1, 2).flatten(2))


def model_for(axis: str) -> nn.Module:
    """The model of which ranks along `axis` have parts."""
    torch.manual_seed(0)
    if axis == "sp":
        return Attending()
    return build()


def data_for(axis: str, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The batch as the model takes it."""
    return (x.unflatten(1, (NUM_TOKENS, -1)), y.unflatten(1, (NUM_TOKENS, -1))) if axis == "sp" else (x, y)


def main(out: Path, plan: str, num_steps: int, victim: int, at: int) -> None:
    torch.set_num_threads(1)
    axis = "sp" if "sp" in json.loads(plan).get("mesh", {}) else ""
    model = model_for(axis)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses: dict[int, float] = {}
    with sw.shard(model, json.loads(plan), optimizer=optimizer) as engine:
        resumed = engine.resume(out / "checkpoints")
        first = engine.num_steps
        while engine.num_steps < num_steps:
            step = engine.num_steps
            x, y = data_for(axis, *batch_of(step, *engine.data_ranks))
            if axis == "sp":
                x, y = engine.split_sequence((x, y))
            if (engine.world.rank, step, resumed) == (victim, at, None):
                os.kill(os.getpid(), signal.SIGKILL)
            if "pp" in engine.mesh.axes:
                loss = engine.forward_backward(x, y, loss_fn=loss_of)
            else:
                loss = loss_of(model(x), y)
                engine.backward(loss)
            engine.step()
            losses[step] = engine.mean(loss.item())
            if engine.num_steps % 2 == 0:
                engine.save(out / "checkpoints")
        facts = {"first": first, "losses": losses, "size": engine.world.size}
        (out / f"rank-{engine.world.rank}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
