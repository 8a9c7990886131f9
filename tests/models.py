"""The models that tests train: one small Transformer in the forms between which plans make a difference, with experts,
positions of its own or given ones, and adapters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwise.parallel.experts import MoE, auxiliary_loss

Tensor = torch.Tensor
VOCAB, WIDTH, LENGTH = 67, 32, 6


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        # Without a bias: the gradient of the keys' bias is only rounding, which Adam would turn into full-size updates.
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.wide(self.norm2(x))

    def wide(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class ExpertBlock(Block):
    """A block with experts instead of its MLP."""

    def __init__(self, width: int, **experts: Any) -> None:
        super().__init__(width)
        del self.up, self.down
        self.moe = MoE(width, 24, **{"num_experts": 4, "top_k": 2, **experts})

    def wide(self, x: Tensor) -> Tensor:
        return self.moe(x)


class Stack(nn.Module):
    """An embedding, `length` learned positions, blocks, a norm and a head, tied on request."""

    def __init__(
        self,
        num_blocks: int,
        *,
        block: Callable[[int, int], nn.Module] = lambda _, width: Block(width),
        width: int = WIDTH,
        length: int = 0,
        tied: bool = False,
        recomputes: bool = False,
        reentrant: bool = False,
    ) -> None:
        """`block` makes each block from its place and the width."""
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, width)
        if length:
            self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(block(place, width) for place in range(num_blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
        self.recomputes, self.reentrant = recomputes, reentrant
        for param in self.parameters():
            if param.dim() > 1:
                nn.init.normal_(param, std=0.1)

    def logits_of(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=self.reentrant) if self.recomputes else block(hidden)
        return self.head(self.norm(hidden))


class Transformer(Stack):
    """With learned positions; its output is its loss."""

    def __init__(self, *, num_blocks: int = 3, **more: Any) -> None:
        super().__init__(num_blocks, length=LENGTH, **more)

    def logits(self, x: Tensor) -> Tensor:
        return self.logits_of(self.tokens(x) + self.positions.weight[: x.shape[1]])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(x).float().flatten(0, 1), y.flatten())


class Mixture(Transformer):
    """With experts in every block but the first. Its loss includes the routers' one."""

    def __init__(self, *, recomputes: bool = False, num_blocks: int = 3, **experts: Any) -> None:
        def block(place: int, width: int) -> nn.Module:
            return ExpertBlock(width, **experts) if place else Block(width)

        super().__init__(num_blocks=num_blocks, block=block, recomputes=recomputes)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x, y) + auxiliary_loss(self)


class Decoder(Stack):
    """Computes positions from its input. Without targets its output is its logits."""

    def __init__(self, *, num_blocks: int = 4, **more: Any) -> None:
        super().__init__(num_blocks, **more)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        hidden = self.tokens(x)
        logits = self.logits_of(hidden + torch.linspace(-1, 1, x.shape[1], dtype=hidden.dtype)[:, None])
        if y is None:
            return logits
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(wide.flatten(0, 1), y.flatten())


class Gpt(Stack):
    """Takes position ids; a tied head."""

    def __init__(self, *, num_blocks: int = 2, tokens: int = 16, **more: Any) -> None:
        super().__init__(num_blocks, length=tokens, tied=True, **more)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        return self.logits_of(self.tokens(input_ids) + self.positions(position_ids))


class Chain(nn.Module):
    """Square linear layers, with `between` after each."""

    def __init__(self, num_layers: int, between: Callable[[Tensor], Tensor] = lambda x: x, *, width: int = 8) -> None:
        super().__init__()
        self.between = between
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.between(layer(x))
        return x


class Lora(nn.Module):
    """A frozen linear layer with a low-rank adapter (arXiv:2106.09685)."""

    def __init__(self, base: nn.Linear, rank: int = 2, *, scale: float = 1.0) -> None:
        super().__init__()
        self.base, self.scale = base.requires_grad_(False), scale
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.normal_(self.up.weight, std=0.1)  # not zero, so that `down` has gradients in the first step

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.scale * self.up(self.down(x))


class Hidden:
    """An object that hides a tensor: nobody sees it in the output of a module."""

    __slots__ = ("get",)

    def __init__(self, hidden: Tensor) -> None:
        self.get = lambda: hidden
