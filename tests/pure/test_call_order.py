"""The order in which a forward calls modules, read from its source."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from shardwise.parallel.pipeline import sequence_of
from shardwise.parallel.pipeline.call_order import in_order_of_calls

Tensor = torch.Tensor


class Parts(nn.Module):
    """Has modules in another order than forwards call them."""

    norm_first = False

    def __init__(self) -> None:
        super().__init__()
        for name in ("head", "norm", "middle", "tokens", "unused"):
            self.add_module(name, nn.Linear(2, 2))
        self.up = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
        self.config: Any = nn.Identity()
        self.pre_norm = self.norm_first


class InOneExpression(Parts):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.tokens(x)
        return self.head(self.norm(self.blocks(hidden).to(self.head.weight.dtype)))

    def blocks(self, hidden: Tensor) -> Tensor:
        for block in self.down:
            hidden = block(hidden)
        hidden = self.middle(hidden) if self.middle is not None else hidden
        for number in range(len(self.up)):
            hidden = self.up[number](hidden)
        return hidden


class ThroughSuper(InOneExpression):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Recomputed(Parts):
    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.tokens, x, use_reentrant=False)
        seen = [block(hidden) for block in self.down]
        bottom = self.middle
        hidden = bottom(sum(seen))
        for block, one in zip(self.up, reversed(seen), strict=True):
            hidden = checkpoint(block, hidden + one, use_reentrant=False)
        if self.norm is not None:
            hidden = self.norm(hidden)
        return self.head(hidden)


class PassedOn(Parts):
    """What it passes on runs after what it calls for the other arguments."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint_sequential(self.down, 2, self.tokens(x), use_reentrant=False)
        hidden = checkpoint_sequential(self.up, 2, self.middle(hidden), use_reentrant=False)
        return self.head(checkpoint(self.norm, hidden, use_reentrant=False))


class Branching(Parts):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.tokens(x)
        if self.pre_norm:
            hidden = self.norm(hidden)
        for block in [*self.down, self.middle, *self.up]:
            hidden = block(hidden)
        if not self.pre_norm:
            hidden = self.norm(hidden)
        return self.head(hidden)


class PreNorm(Branching):
    norm_first = True


class Rescaled(InOneExpression):
    """As RWKV, whose blocks have other weights in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.is_rescaled = False

    def forward(self, x: Tensor) -> Tensor:
        if self.training == self.is_rescaled:
            self.rescale()
        if not self.training:
            self.rescale()
        return super().forward(x)

    def rescale(self) -> None:
        for block in self.up:
            block.weight.data.div_(2)


ORDER = ["tokens", "unused", "down", "middle", "up", "norm", "head"]


@pytest.mark.parametrize(
    ("kind", "order"),
    [
        (InOneExpression, ORDER),
        (ThroughSuper, ORDER),
        (Recomputed, ORDER),
        (PassedOn, ORDER),
        (Branching, ORDER),
        (Rescaled, ORDER),
        (PreNorm, ["tokens", "unused", "norm", "down", "middle", "up", "head"]),
    ],
)
@pytest.mark.parametrize("training", [True, False])
def test_modules_are_ordered_as_they_are_called(kind: type[Parts], order: list[str], *, training: bool) -> None:
    """In training, whatever the model was in when its stages were cut."""
    model = kind().train(training)
    assert in_order_of_calls(model, [name for name, _ in model.named_children() if name != "config"]) == order
    nested = [f"{name}.{number}" for name in ("up", "down") for number in "01"]
    assert in_order_of_calls(model, nested) == [*nested[2:], *nested[:2]]


class InnerLater(Parts):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.tokens(x)
        for block in self.down:
            hidden = block(hidden)
        return self.head(hidden) * self.down[0](x) + self.head.weight.mean()


def test_a_module_that_is_called_again_inside_of_another_comes_twice() -> None:
    assert in_order_of_calls(InnerLater(), ["head", "tokens", "down"]) == ["tokens", "down", "head", "down.0"]


def test_without_a_source_they_stay_as_they_are_registered() -> None:
    model = Parts()
    model.__class__ = type("Unread", (Parts,), {"forward": eval("lambda self, x: self.tokens(x)")})
    names = [name for name, _ in model.named_children()]
    assert in_order_of_calls(model, names) == names


class Tied(nn.Module):
    """Keeps a table for others, which it does not call itself, as T5 does."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.tokens = nn.Embedding(9, 2), nn.Embedding(9, 2)
        self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
        self.head = nn.Linear(2, 9, bias=False)
        self.tokens.weight = self.head.weight = self.shared.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.tokens(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def test_no_stage_begins_with_a_module_that_is_never_called() -> None:
    assert sequence_of(Tied()) == [["shared", "tokens"], ["blocks.0"], ["blocks.1"], ["head"]]
