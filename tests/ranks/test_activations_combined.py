"""Recomputed or offloaded activations, combined with every other feature of a plan."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import test_experts
import test_pipeline_models
import test_tensor_parallel
import torch
from experts_models import mixture
from fake_devices import WHENS, Devices, Race, When
from pipelined import batches as pipeline_batches
from sequences import batches as sequence_batches
from sequences import split_run
from split_models import Transformer as SplitTransformer
from test_late_early import run_on_devices
from torch import nn
from twins import adamw, assert_same, batches, plain_run, sharded_run

from shardwise.errors import CommError
from shardwise.memory import HostMemory
from shardwise.runtime.activations import activation_offload, stores
from tests.models import Decoder, Gpt, Transformer
from tests.thorough import sampled, thorough_only

pytestmark = sampled

Tensor = torch.Tensor


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, float):
        return one == other or (math.isnan(one) and math.isnan(other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other) if not hasattr(one, "__dict__") else same(vars(one), vars(other))


def sequences(**plan: Any) -> Any:
    torch.manual_seed(0)
    return split_run(Gpt(), sequence_batches(2), "zero3", {"sp": 2}, sequence={"attention": "ring"}, **plan)


def ulysses(**plan: Any) -> Any:
    torch.manual_seed(0)
    return split_run(Gpt(), sequence_batches(2), "zero1", {"sp": 2}, sequence={"attention": "ulysses"}, **plan)


def stages(schedule: str, preset: str) -> Callable[..., Any]:
    def run(**plan: Any) -> Any:
        torch.manual_seed(0)
        data = [(batch, None) for batch in pipeline_batches(2, 8)]
        return test_pipeline_models.run(
            Decoder(num_blocks=3), data, preset=preset, pipeline={"schedule": schedule}, **plan
        )

    return run


def products(tensor: dict[str, Any]) -> Callable[..., Any]:
    def run(**plan: Any) -> Any:
        asked = {**test_tensor_parallel.TENSOR, **tensor}
        return test_tensor_parallel.sharded(SplitTransformer, "zero3", asked, dp=1, **plan)

    return run


def experts(**plan: Any) -> Any:
    return test_experts.dealt_run(mixture(balance_loss=0.05), test_experts.batches(2, 8), "zero3", {"ep": 2}, **plan)


def frozen(**plan: Any) -> Any:
    torch.manual_seed(0)
    model = Transformer(num_blocks=3)
    for name, param in model.named_parameters():
        param.requires_grad = not name.startswith(("tokens", "blocks.0", "blocks.1.up", "blocks.2.norm"))

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)

    return sharded_run(model, batches(2), "zero3", 2, None, optimizer, **plan)


def fp16(**plan: Any) -> Any:
    torch.manual_seed(0)
    settings = {"precision": "fp16", "loss_scale": {"initial": 2.0**20, "hysteresis": 1, "window": 2}}
    return sharded_run(Transformer(), batches(3), "zero2", 2, None, **settings, **plan)


def compiled(**plan: Any) -> Any:
    torch.manual_seed(0)
    torch.compiler.reset()
    return sharded_run(Transformer(num_blocks=2), batches(3), "zero3", 1, None, compile="aot_eager", **plan)


def autocast(**plan: Any) -> Any:
    def step(engine: Any, _: Any, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss = engine(*batch)
        engine.backward(loss)
        engine.step()
        return loss

    torch.manual_seed(0)
    return sharded_run(Transformer(), batches(2), "zero3", 2, None, step=step, **plan)


BESIDE: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "ring": (sequences, ("offload", "selective")),
    "ulysses": (ulysses, ("recompute", "offload")),
    "1f1b": (stages("1f1b", "zero3"), ("recompute", "disk")),
    "interleaved": (stages("interleaved", "zero1"), ("offload", "selective")),
    "zb-h1": (stages("zb-h1", "zero2"), ("recompute", "offload")),
    "products": (products({}), ("offload", "selective")),
    "products of cut sequences": (products({"sequence": True}), ("recompute", "disk")),
    "experts": (experts, ("recompute", "offload")),
    "frozen": (frozen, ("recompute", "offload")),
    "fp16": (fp16, ("recompute", "offload")),
    "compile": (compiled, ("recompute", "offload")),
    "autocast": (autocast, ("offload", "selective")),
}
CASES = [(name, policy) for name, (_, policies) in BESIDE.items() for policy in policies]


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo reads .grad of an input that is no leaf
@pytest.mark.parametrize(("name", "policy"), CASES)
def test_comes_to_the_same(name: str, policy: str, tmp_path: Path) -> None:
    run, _ = BESIDE[name]
    kept = run()
    assert same(run(activations=policy, disk=str(tmp_path)), kept)


@pytest.mark.parametrize("when", WHENS)
def test_trains_the_same_whenever_copies_are_done(when: When) -> None:
    assert not is_found(when)


@thorough_only("slow; smaller tests beside it cover the same code")
@pytest.mark.parametrize("when", WHENS)
def test_trains_the_same_whenever_copies_from_and_to_pages_of_files_are_done(
    when: When, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Activations, parameters and states on a disk, on devices."""
    monkeypatch.setattr(activation_offload, "SMALL_BYTES", 64)
    torch.manual_seed(0)
    model, data = Transformer(num_blocks=4), batches(3)
    plan = {"rows": {"param": {"tier": "disk"}}, "activations": "disk", "disk": str(tmp_path)}
    assert_same(run_on_devices(Devices(when), model, data, ("infinity", 2, None), **plan), plain_run(model, data))


@pytest.mark.parametrize("what", ["wait", "copy", "buffer"])
def test_what_is_forgotten_is_found(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if what == "wait":
        monkeypatch.setattr(activation_offload.Item, "whole", lambda item: item.fetch() or item._whole)
    elif what == "copy":  # to the host
        monkeypatch.setattr(stores._OnHost, "finish_copy", lambda _: None)
    else:
        honest = HostMemory.give_back
        monkeypatch.setattr(HostMemory, "give_back", lambda self, tensor, _=None: honest(self, tensor))
    assert is_found("late")


def is_found(when: When) -> bool:
    """Whether training raises because a tensor was touched in flight, or ends with other values than on the CPU."""
    torch.manual_seed(0)
    model, data = Transformer(num_blocks=4), batches(3)
    expected = sharded_run(model, data, "zero3", 2, None, adamw, shares_memory=False)
    try:
        run = run_on_devices(Devices(when), model, data, ("zero3", 2, None), activations="offload")
    except (AssertionError, Race, CommError):
        return True
    return any(not torch.equal(param, expected.params[name]) for name, param in run.params.items())
