"""Run by `test_sequence_processes.py`: trains a model with dropout over split sequences, saves every step, resumes.

    split_and_save.py FOLDER STEPS

All ranks are seeded alike. Prints, from rank 0, one line per step: its number, the loss of every rank, how many
different masks the ranks drew, and how many different generators they were left with.
"""

from __future__ import annotations

import hashlib
import json
import sys

import torch
from torch import nn
from torch.nn import functional

import shardwise as sw

TOKENS, WIDTH = 8, 16


class Model(nn.Module):
    """Drops inputs, and weights of its attention; keeps which inputs were dropped last."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropped = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = functional.dropout(torch.ones_like(x), 0.3, training=self.training)
        self.dropped = digest(kept)
        query, key, value = self.mix(x * kept).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, dropout_p=0.2, is_causal=True)
        return self.out(attended.transpose(1, 2).flatten(2))


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def main(folder: str, num_steps: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with sw.World.join() as world:
        model = Model()
        plan = {"preset": "zero3", "mesh": {"sp": world.size}}
        with sw.shard(model, plan, optimizer=torch.optim.AdamW(model.parameters()), world=world) as engine:
            engine.resume(folder)
            while engine.num_steps < num_steps:
                x = torch.randn(2, TOKENS, WIDTH)  # the same on all ranks, or it is refused
                loss = engine(engine.split_sequence(x)).square().mean()
                engine.backward(loss)
                engine.step()
                engine.save(folder)
                mine = [loss.item(), model.dropped, digest(torch.get_rng_state())]
                told = [json.loads(message) for message in world.exchange(json.dumps(mine).encode())]
                losses, masks, left = zip(*told, strict=True)
                if world.rank == 0:
                    print(engine.num_steps, *losses, len(set(masks)), len(set(left)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
