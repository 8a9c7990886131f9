"""What a forward computes that is right for all tokens alone, and not for a rank's: it is told in a rehearsal, from
what is right for a part too."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwise.errors import ModelError
from shardwise.parallel.sequence.coincidences import Coincidences

Tensor = torch.Tensor
Compute = Callable[[Tensor], Tensor]
SAMPLES, TOKENS, WIDTH = 2, 4, 8


class Computes(nn.Module):
    """Of `[samples, tokens, features]`."""

    def __init__(self, how: Compute) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(WIDTH, WIDTH), how

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self.linear(x))


def refuse_part(how: Compute) -> None:
    coincidences = Coincidences(Computes(how), (), torch.device("cpu"), "fp32", lambda _: nullcontext(), 1)
    coincidences.refuse_part((torch.randn(SAMPLES, TOKENS, WIDTH),), {}, TOKENS)


def table(num: int) -> Tensor:
    """Rows that differ."""
    return torch.ones(64, num).cumsum(0)


def with_kernel(x: Tensor) -> Tensor:
    return F.conv2d(x[:, None], torch.ones(1, 1, 3, 1), padding=(1, 0))[:, 0]


def numbered_by_an_offset(x: Tensor) -> Tensor:
    places = torch.arange(x.shape[1]) + torch.randint(0, 2, ())
    return x + F.embedding(places, table(WIDTH))


NUMBERS: dict[str, Compute] = {
    "a number in a tensor": lambda x: x / torch.tensor(float(x.shape[1])),
    "of a dtype": lambda x: x / torch.as_tensor(x.shape[1], dtype=x.dtype),
    "several": lambda x: x / torch.tensor([x.shape[1]] * WIDTH),
    "like another": lambda x: x / x.new_tensor(x.shape[1]),
    "full of it": lambda x: x / torch.full((), float(x.shape[1])),
    "full of it, for each feature": lambda x: x / torch.full((WIDTH,), x.shape[1]),
    "lengths of samples": lambda x: x / x.new_full((x.shape[0], 1, 1), x.shape[1]),
    "filled with it": lambda x: x / torch.empty(WIDTH).fill_(x.shape[1]),
    "filled in one place": lambda x: x + torch.zeros(WIDTH).index_fill(0, torch.tensor([0]), x.shape[1]),
    "times a tensor": lambda x: x / (torch.ones(()) * x.shape[1]),
    "its root": lambda x: x / torch.sqrt(torch.tensor(x.shape[1], dtype=torch.float32)),
    "a power of it": lambda x: x * torch.pow(torch.tensor(0.9), x.shape[1]),
    "of numpy": lambda x: x / torch.from_numpy(np.array(float(x.shape[1]))).float(),
    "in weights": lambda x: x * (nn.Parameter(torch.ones(WIDTH)) / x.shape[1]),
    "chosen": lambda x: torch.where(x > 0, x, float(x.shape[1])),
    "as an exponent of features": lambda x: x + torch.logspace(0, x.shape[1], WIDTH),
    "written in": lambda x: x.clone().mul_(1 / x.shape[1]),
}
NUMBERING: dict[str, Compute] = {
    "from one": lambda x: x + torch.arange(1, x.shape[1] + 1)[:, None],
    "by keyword": lambda x: x + torch.arange(end=x.shape[1])[:, None],
    "backwards": lambda x: x + torch.arange(x.shape[1] - 1, -1, -1)[:, None],
    "by twos": lambda x: x + torch.arange(0, 2 * x.shape[1], 2)[:, None],
    "evenly": lambda x: x + torch.linspace(0, 1, x.shape[1])[:, None],
    "by a range": lambda x: x + torch.tensor(range(x.shape[1]))[:, None],
    "by a list": lambda x: x + torch.tensor([float(place) for place in range(x.shape[1])])[:, None],
    "by numpy": lambda x: x + torch.from_numpy(np.arange(x.shape[1]))[:, None],
    "by a diagonal": lambda x: x + torch.eye(x.shape[1])[:, :1],
    "by places": lambda x: x + torch.ones(x.shape[1]).nonzero(),
    "by a triangle": lambda x: x + torch.ones(x.shape[1], x.shape[1]).tril()[:, :1] + torch.eye(x.shape[1])[:1].T,
    "by sines": lambda x: x + torch.outer(torch.arange(x.shape[1]), torch.arange(WIDTH)).sin(),
    "by one in many": lambda x: x + F.one_hot(torch.arange(x.shape[1]), 64)[:, :WIDTH],
    "from an offset": numbered_by_an_offset,
    "by a table, narrowed": lambda x: x + table(WIDTH).narrow(0, 0, x.shape[1]),
    "by a table, split": lambda x: x + table(WIDTH).split(x.shape[1])[0],
    "by a table's end": lambda x: x + table(WIDTH)[-x.shape[1] :],
    "by a table with a dimension more": lambda x: x + table(WIDTH)[None, : x.shape[1]],
    "by a learned table": lambda x: x + nn.Parameter(torch.randn(64, WIDTH)).narrow(0, 0, x.shape[1]),
    "by a stretched table": lambda x: x + F.interpolate(nn.Parameter(torch.randn(1, WIDTH, 4)), x.shape[1]).mT,
}
MIXING: dict[str, Compute] = {
    "their mean": lambda x: x - x.mean(),
    "their mean, of heads": lambda x: x - x.unflatten(-1, (2, 4)).transpose(1, 2).mean(2).flatten(1)[:, None],
    "their norm": lambda x: x / x.norm(),
    "the greatest": lambda x: (x * (127 / x.abs().max())).round(),
    "a quantile": lambda x: x - x.quantile(0.5),
    "a dot product": lambda x: x * torch.dot(x.flatten(), x.flatten()),
    "likeness of samples": lambda x: x * F.cosine_similarity(x.flatten(1), x.flatten(1) + 1)[:, None, None],
    "the first": lambda x: x - x.mT[..., :1].mT,
    "the best": lambda x: x * (x.norm(dim=-1) >= x.norm(dim=-1).topk(2).values[:, -1:])[..., None],
    "in order": lambda x: x.mT.sort(-1).values.mT,
    "softmax": lambda x: x.mT.softmax(-1).mT,
    "sums so far": lambda x: x.mT.cumsum(-1).mT,
    "flipped": lambda x: x.mT.flip(-1).mT,
    "rolled": lambda x: x.mT.roll(1, -1).mT,
    "shifted": lambda x: torch.cat([x.new_zeros(SAMPLES, WIDTH, 1), x.mT[..., :-1]], -1).mT,
    "padded": lambda x: F.pad(x.mT, (1, -1)).mT,
    "normalized as a batch": lambda x: F.batch_norm(x.mT, None, None, training=True).mT,
    "normalized as instances": lambda x: F.instance_norm(x.mT).mT,
    "normalized in groups": lambda x: F.group_norm(x.mT, 2).mT,
    "normalized along": lambda x: F.layer_norm(x.mT, (x.shape[1],)).mT,
    "normalized with features": lambda x: F.rms_norm(x, x.shape[1:]),
    "pooled": lambda x: F.avg_pool2d(x[None], (3, 1), 1, (1, 0))[0],
    "convolved": with_kernel,
    "stretched": lambda x: F.interpolate(x.mT, scale_factor=2, mode="linear")[..., ::2].mT,
    "windows": lambda x: F.pad(x.mT, (1, 1)).unfold(-1, 3, 1).sum(-1).mT,
    "softmax of windows of features": lambda x: x.unfold(dimension=-1, size=1, step=1)[..., 0].mT.softmax(-1).mT,
    "in groups": lambda x: (
        x.unflatten(1, (2, -1)).mean(2, keepdim=True).expand(-1, -1, x.shape[1] // 2, -1).flatten(1, 2)
    ),
    "one of each group": lambda x: (
        x.reshape(x.shape[0], 2, -1, WIDTH).sum(1, keepdim=True).repeat(1, 2, 1, 1).flatten(1, 2)
    ),
    "pooled, and returned": lambda x: x.mT.mean(-1),
    "shares of features": lambda x: (x.flatten(0, 1).softmax(-1).mean(0) * WIDTH).sum(),
}


def written(x: Tensor) -> Tensor:
    made = torch.empty(*x.shape[:2], 2 * WIDTH)
    made[..., :WIDTH], made[..., WIDTH:] = x, 2 * x
    return made + 1


def with_losses(x: Tensor) -> Tensor:
    x.exp().sum(-1).log().square().mean() / (x.shape[0] * x.shape[1])
    return x


def with_a_mask_for_others(x: Tensor) -> Tensor:
    torch.triu(torch.full((x.shape[1], x.shape[1]), float("-inf")), 1)
    return x


def sorted_and_back(x: Tensor) -> Tensor:
    """As experts' rows are."""
    rows = x.flatten(0, 1)
    order = (rows[:, 0] > 0).long().argsort()
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))
    return rows[order].relu()[back].view_as(x)


def experts(x: Tensor) -> Tensor:
    gates = x[..., :4].softmax(-1)
    return (gates[..., None] * torch.stack([x * expert for expert in range(4)], -2)).sum(-2)


RIGHT: dict[str, Compute] = {
    "constants": lambda x: x * torch.tensor(0.5) + torch.zeros(WIDTH) + torch.ones_like(x) + x.new_zeros(x.shape),
    "constants for each token": lambda x: x + torch.zeros(x.shape[1], WIDTH) * torch.full((x.shape[1], 1), 0.5),
    "features numbered": lambda x: x + torch.arange(WIDTH) + torch.linspace(0, 1, WIDTH) + 2.0 ** -torch.arange(WIDTH),
    "features repeated": lambda x: (
        x + torch.arange(8.0).expand(x.shape) + torch.ones(1, 1, WIDTH).repeat(*x.shape[:2], 1)
    ),
    "scaled each": lambda x: x / x.abs().amax(-1, keepdim=True),
    "normalized each": lambda x: F.group_norm(F.layer_norm(x.flatten(0, 1), (WIDTH,)), 2).view_as(x),
    "samples by place": lambda x: x[torch.arange(x.shape[0])],
    "tokens by place": lambda x: x.flatten(0, 1)[torch.arange(x.shape[0] * x.shape[1])].view_as(x),
    "rows of a table": lambda x: (
        x + table(WIDTH)[(x[..., 0] > 0).long()] + F.embedding((x > 0).long()[..., 0], table(WIDTH))
    ),
    "buckets": lambda x: x + torch.bucketize(x, torch.linspace(-1, 1, 5)).float(),
    "windows of features": lambda x: x.unfold(dimension=-1, size=2, step=2).flatten(2),
    "convolved each": lambda x: F.conv1d(x.mT, torch.ones(WIDTH, WIDTH, 1)).mT,
    "features mixed": lambda x: x.cumsum(-1) + x.flip(-1) + x.roll(1, -1) + x.sort(-1).values + F.pad(x, (1, -1)),
    "features multiplied": lambda x: torch.einsum("btd,de->bte", x, torch.eye(WIDTH)) @ torch.ones(WIDTH, WIDTH).tril(),
    "the best features": lambda x: torch.zeros_like(x).scatter(-1, x.topk(2, -1).indices, 1.0) * x,
    "features of each other": lambda x: (x[..., None] * x[..., None, :]).mean(-1),
    "masked": lambda x: x.masked_fill(torch.zeros(x.shape[1], dtype=torch.bool)[None, :, None], 0),
    "noise": lambda x: x + torch.randn_like(x) + torch.rand(x.shape) + F.dropout(x, 0.5),
    "norms of weights": lambda x: x * (torch.ones(WIDTH, WIDTH).norm() + torch.ones(WIDTH).mean()),
    "recomputed": lambda x: checkpoint(torch.relu, x, use_reentrant=False),
    "written": written,
    "experts": experts,
    "sorted and back": sorted_and_back,
    "losses": with_losses,
    "a mask for others": with_a_mask_for_others,
}


@pytest.mark.parametrize("how", NUMBERS)
def test_numbers_that_depend_on_how_many_tokens_there_are(how: str) -> None:
    with pytest.raises(ModelError, match="with a number that depends on how many tokens there are"):
        refuse_part(NUMBERS[how])


@pytest.mark.parametrize("how", NUMBERING)
def test_tokens_that_are_numbered(how: str) -> None:
    with pytest.raises(
        ModelError, match=r"The model numbers its tokens by itself .* Let its forward take position_ids"
    ):
        refuse_part(NUMBERING[how])


@pytest.mark.parametrize("how", MIXING)
def test_tokens_that_are_mixed_wherever_they_are(how: str) -> None:
    with pytest.raises(ModelError, match=r"The model calls \w+ on a tensor of shape .* and mixes its tokens"):
        refuse_part(MIXING[how])


class Shifted(nn.Module):
    """Fills a tensor of its own with the batch's tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(64, WIDTH)

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        filled = ids.new_zeros(ids.shape)
        filled[:, 0] = ids[:, 0]
        filled[:, 1:] = ids[:, 1:].clone()
        out: Tensor = x + self.tokens(filled)
        return out


def test_what_is_filled_from_the_batch_is_the_batchs() -> None:
    coincidences = Coincidences(Shifted(), (), torch.device("cpu"), "fp32", lambda _: nullcontext(), 1)
    ids = torch.arange(SAMPLES * TOKENS).view(SAMPLES, TOKENS)
    coincidences.refuse_part((ids, torch.randn(SAMPLES, TOKENS, WIDTH)), {}, TOKENS)


@pytest.mark.parametrize("how", RIGHT)
def test_what_is_right_for_a_part(how: str) -> None:
    refuse_part(RIGHT[how])
