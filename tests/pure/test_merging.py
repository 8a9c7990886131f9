"""Adapters that cannot be merged are refused, with the way out, before any tensor is gathered; with peft's own layers
`tests/extras/test_merged_adapters.py` compares what is merged."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwise.checkpoint.formats.merged_adapters import merging
from shardwise.errors import ModelError


class Adapted(nn.Module):
    """As peft's layers: what it adapts, and what it adds."""

    def __init__(self, base: nn.Parameter, why_not: str = "") -> None:
        super().__init__()
        self.base_layer = nn.Module()
        self.base_layer.weight = base
        self.lora = nn.Parameter(torch.ones(2))
        self.why_not = why_not

    def merge(self) -> None:
        if self.why_not:
            raise NotImplementedError(self.why_not)
        self.base_layer.weight.data += self.lora

    def get_base_layer(self) -> nn.Module:
        return self.base_layer


def likes_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: param.to("meta") for name, param in model.named_parameters()}


def test_a_layer_is_merged_when_all_of_it_has_come_and_stays_as_it_is() -> None:
    model = nn.ModuleDict({"a": Adapted(nn.Parameter(torch.zeros(2))), "b": nn.Linear(2, 2)})
    found = merging(model, likes_of(model), {})
    assert found is not None
    params = {name: param.detach().clone() for name, param in model.named_parameters()}
    merged = dict(found.of(params.items()))
    assert list(merged) == list(found.made) == ["a.weight", "b.weight", "b.bias"]
    assert merged["a.weight"].tolist() == [1.0, 1.0]
    assert model["a"].base_layer.weight.tolist() == [0.0, 0.0]


def test_codes_of_a_quantizer_are_refused() -> None:
    codes = nn.Parameter(torch.zeros(2, dtype=torch.uint8), requires_grad=False)
    model = nn.ModuleDict({"a": Adapted(codes)})
    with pytest.raises(ModelError, match=r"a\.base_layer\.weight has codes of a quantizer.*Pass merge_adapters=False"):
        merging(model, likes_of(model), {})


def test_what_peft_cannot_merge_is_refused_by_name() -> None:
    model = nn.ModuleDict({"a": Adapted(nn.Parameter(torch.zeros(2)), "it is not linear.")})
    with pytest.raises(ModelError, match=r"adapters of a cannot be merged: it is not linear\. Pass merge_adapters"):
        merging(model, likes_of(model), {})


@pytest.mark.parametrize(
    ("alias", "name"),
    [("head.base_layer.weight", "embed.weight"), ("head.weight", "embed.token_adapter.base_layer.weight")],
)
def test_adapters_of_one_of_two_tied_weights_are_refused(alias: str, name: str) -> None:
    model = nn.ModuleDict({"a": Adapted(nn.Parameter(torch.zeros(2)))})
    with pytest.raises(ModelError, match=f"{alias} is tied to {name}.*Pass merge_adapters=False"):
        merging(model, likes_of(model), {alias: name})


def test_weights_that_one_layer_of_peft_has_twice_are_merged() -> None:
    model = nn.ModuleDict({"a": Adapted(nn.Parameter(torch.zeros(2)))})
    inside = {"embed.token_adapter.base_layer.weight": "embed.original_module.weight"}
    assert merging(model, likes_of(model), {**inside, "head.weight": "embed.weight"}) is not None
