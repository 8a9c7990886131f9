"""Two processes that drop out and recompute, or have activations elsewhere, beside the plain model with their draws."""

from __future__ import annotations

from pathlib import Path

from launching import launch

from tests.thorough import thorough_only

TRAINS = """
import copy, sys
import torch
from torch import nn
import shardwise as sw

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)
        self.up, self.down, self.drop = nn.Linear(32, 128), nn.Linear(128, 32), nn.Dropout(0.2)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1)
        x = x + self.drop(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + self.drop(self.down(self.drop(nn.functional.gelu(self.up(x)))))

def batch(step, rank):
    return torch.randn(4, 16, 32, generator=torch.Generator().manual_seed(10 * step + rank))

def loss_of(model, step, rank):
    torch.manual_seed(100 * step + rank)
    return model(batch(step, rank)).square().mean()

world = sw.World.join()
torch.manual_seed(0)
plain = nn.Sequential(*(Block() for _ in range(3)))
expected = []
twin = copy.deepcopy(plain)
optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
for step in range(3):
    grads = []
    for rank in range(2):
        loss = loss_of(twin, step, rank)
        grads.append((loss.item(), torch.autograd.grad(loss, list(twin.parameters()))))
    for param, *parts in zip(twin.parameters(), *(grads for _, grads in grads)):
        param.grad = (parts[0] + parts[1]) / 2
    expected.append(([loss for loss, _ in grads], [param.grad.clone() for param in twin.parameters()]))
    optimizer.step()

disk = sys.argv[1]
for preset, activations in [
    ("zero3", "recompute"), ("zero2", "selective"), ("zero3", "offload"), ("ddp", {"policy": "disk", "every": 2})
]:
    model = copy.deepcopy(plain)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = {"preset": preset, "activations": activations, "disk": disk}
    with sw.shard(model, plan, optimizer=optimizer, world=world) as engine:
        for step, (losses, grads) in enumerate(expected):
            loss = loss_of(engine, step, world.rank)
            engine.backward(loss)
            assert loss.item() == losses[world.rank], (preset, activations, step)
            for (name, _), grad in zip(model.named_parameters(), grads):
                assert torch.equal(engine.get(name, "grad"), grad), (preset, activations, step, name)
            engine.step()
print("equal")
"""


@thorough_only("slow; smaller tests beside it cover the same code")
def test_dropout_comes_to_the_bits_of_the_plain_model(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(TRAINS)
    done = launch(script, 2, str(tmp_path / "scratch"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("equal") == 2
