"""Run by `test_tensor_dropout.py`: a model with dropout, split over two ranks; each prints what it dropped."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw

Tensor = torch.Tensor


class Block(nn.Module):
    def __init__(self, *, drops_last: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.inner, self.outer = nn.Dropout(0.5), nn.Dropout(0.5) if drops_last else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(self.down(self.inner(self.up(x).abs() + 1)) + 5)


class Adapted(nn.Module):
    """As peft wraps a linear module."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_dropout = nn.ModuleDict({"default": nn.Dropout(0.5)})
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, 4, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(4, base.out_features, bias=False)})

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.base_layer(x)
        return made + self.lora_B["default"](self.lora_A["default"](self.lora_dropout["default"](x)))


class Model(nn.Module):
    def __init__(self, *, recomputes: bool, drops_last: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(drops_last=drops_last) for _ in range(3))
        self.recomputes = recomputes

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return x


def main(folder: Path, kind: str) -> None:
    with sw.World.join() as world:
        torch.manual_seed(world.rank)  # on purpose not the same
        model = Model(recomputes="recomputed" in kind, drops_last="early" not in kind)
        if "adapted" in kind:
            for block in model.blocks:
                block.up, block.down = Adapted(block.up), Adapted(block.down)
                block.inner = nn.Identity()  # so that what the adapters drop is seen
        tensor = {"plan": {"blocks.*.up": "column", "blocks.*.down": "row"}, "sequence": "sequence" in kind}
        plan = {"preset": "zero1", "mesh": {"dp": 1, "tp": 2}, "tensor": tensor}
        if "stages" in kind:
            plan |= {"mesh": {"pp": 2, "tp": 2}, "accumulate": 2}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        dropped: dict[str, list[list[bool]]] = {}
        with sw.shard(model, plan, optimizer=optimizer, world=world) as engine:
            for name, module in model.named_modules():
                if isinstance(module, nn.Dropout):
                    masks = dropped.setdefault(name, [])
                    module.register_forward_hook(
                        lambda _, __, out, masks=masks: masks.append((out == 0).flatten().tolist())
                    )
            norms = []
            for _ in range(2):
                if "stages" in kind:
                    engine.train_step(torch.ones(4, 8, 16), loss_fn=lambda out: out.square().mean())
                    norms.append(float(engine.gradient_norm or 0.0))
                    continue
                engine.backward(engine(torch.ones(2, 8, 16, requires_grad=True)).square().mean())
                norms.append(float(engine.step() or 0.0))
        told = {"dropped": dropped, "norms": norms, "next": torch.rand(3).tolist()}
        (folder / f"{world.rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
