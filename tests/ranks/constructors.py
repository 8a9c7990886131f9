"""A model whose constructor uses everything that constructors commonly do."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own_parameters()
        self.torch_inits()
        self.copies_and_views()
        self.values_read()
        self.modules_of_torch()
        self.apply(_small_linears)

    def own_parameters(self) -> None:
        self.drawn = nn.Parameter(torch.randn(5, 7))
        self.scaled = nn.Parameter(self.drawn.detach().clone() * 2 + torch.arange(7))
        self.seeded = nn.Parameter(torch.randn(3, generator=torch.Generator().manual_seed(3)))
        self.bernoulli = nn.Parameter(torch.bernoulli(torch.full((50,), 0.3)))
        self.dropped = nn.Parameter(F.dropout(torch.ones(40)))
        self.like = nn.Parameter(torch.randn_like(self.drawn))
        self.narrow = nn.Parameter(torch.empty(30, dtype=torch.float64).uniform_(-1, 1).to(torch.bfloat16))
        self.given = nn.Parameter(torch.empty(3))
        self.given.data.copy_(torch.tensor([1.0, 2.0, 3.0]))
        self.counted = nn.Parameter(torch.arange(5) / 2)

    def torch_inits(self) -> None:
        self.orthogonal = nn.Parameter(nn.init.orthogonal_(torch.empty(40, 12)))
        self.truncated = nn.Parameter(nn.init.trunc_normal_(torch.empty(9, 9)))
        self.sparse = nn.Parameter(nn.init.sparse_(torch.empty(10, 5), 0.3))
        self.dirac = nn.Parameter(nn.init.dirac_(torch.empty(4, 4, 3)))

    def copies_and_views(self) -> None:
        self.tokens = nn.Embedding(10, 8, padding_idx=3)
        self.tokens.weight.data.normal_()
        self.tokens.weight.data[2].fill_(5)
        with torch.no_grad():
            self.tokens.weight[self.tokens.padding_idx].zero_()
            self.tokens.weight[:, 1::2].mul_(0.5)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.tokens.weight
        query, key, _ = torch.randn(3, 4, 4).unbind()
        self.query, self.key = nn.Parameter(query), nn.Parameter(key)
        self.turned = nn.Parameter(torch.randn(4, 6).t())
        self.narrow_linear = nn.Linear(3, 3).to(torch.bfloat16)

    def values_read(self) -> None:
        self.register_buffer("mask", torch.tril(torch.ones(6, 6)))
        self.register_buffer("inverse", 1.0 / 10 ** (torch.arange(0, 8, 2) / 8), persistent=False)
        self.slopes = torch.linspace(0, 1, 4)
        self.rates = [rate.item() for rate in torch.linspace(0, 0.3, 3)]
        self.numbers = (torch.arange(4).numpy() * 2).tolist() + torch.eye(2).tolist()
        self.positive = nn.Parameter(self.seeded.detach()[self.seeded > -9])
        if torch.rand(()) > 0.5:
            self.sometimes = nn.Linear(2, 2)

    def modules_of_torch(self) -> None:
        self.norm = nn.BatchNorm1d(4)
        self.copied = copy.deepcopy(self.norm)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2, enable_nested_tensor=False)
        self.attention = nn.MultiheadAttention(8, 2)
        self.weight_norm = parametrizations.weight_norm(nn.Linear(4, 4))
        self.spectral_norm = parametrizations.spectral_norm(nn.Linear(4, 6))
        self.memory = nn.LSTM(4, 4)
        self.conv = nn.ConvTranspose2d(3, 4, 3)


def _small_linears(module: nn.Module) -> None:
    if type(module) is nn.Linear:
        nn.init.normal_(module.weight, std=0.02)
