"""A frozen base in four bits with trainable adapters, as in QLoRA (arXiv:2305.14314). Codes are integer parameters,
which are sharded, gathered, saved and offloaded like any frozen ones; adapters train as on the plain model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pipelined import batches as token_batches
from pipelined import unsplit
from safetensors.torch import load_file
from test_adapters import adamw_of_trainable
from test_pipeline import CLIP, pipelined
from test_pipeline import assert_same as assert_same_stages
from torch import nn
from twins import assert_same, batches, plain_run, sharded_run, work_on_ranks

import shardwise as sw
from shardwise.testing import run_ranks
from tests import inside
from tests.models import Decoder, Transformer
from tests.ranks.test_lost_ranks import PLANS, TIERS, DiesAt, Net, race
from tests.thorough import sampled, thorough_only

Tensor = torch.Tensor
BLOCK = 16
"""Elements that share a scale."""


class FourBit(nn.Module):
    """A frozen linear layer whose weight is two 4-bit codes per byte, with a scale per block; and an adapter."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.shape = base.weight.shape
        blocks = base.weight.detach().reshape(-1, BLOCK)
        scales = blocks.abs().amax(1, keepdim=True) / 7
        codes = (blocks / scales).round().add(8).to(torch.uint8).reshape(-1)
        self.codes = nn.Parameter(codes[::2] | codes[1::2] << 4, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.normal_(self.up.weight, std=0.05)

    def weight(self) -> Tensor:
        codes = torch.stack([self.codes & 15, self.codes >> 4], -1)
        return ((codes.to(self.scales.dtype) - 8).reshape(-1, BLOCK) * self.scales).reshape(self.shape)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight()) + self.up(self.down(x))


class Quantized(Transformer):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        for block in self.blocks:
            block.qkv, block.down = FourBit(block.qkv), FourBit(block.down)


def quantized() -> nn.Module:
    torch.manual_seed(0)
    return Quantized()


RUNS: list[tuple[str, int, dict[str, int] | None]] = [
    ("zero3", 2, None),
    ("ddp", 2, None),
    ("zero2", 3, None),
    ("zero3-offload", 2, None),
    ("zero3-kept", 3, None),
    ("hpz", 4, {"node": 2, "local": 2}),
    ("hsdp", 4, {"node": 2, "local": 2}),
    ("infinity", 2, None),
]


@pytest.mark.parametrize(("preset", "num_ranks", "mesh"), RUNS)
@pytest.mark.parametrize("shares_memory", [True, False])
@sampled
def test_adapters_over_a_base_in_four_bits_train_like_the_plain_model(
    preset: str,
    num_ranks: int,
    mesh: dict[str, int] | None,
    shares_memory: bool,
    tmp_path: Path,
) -> None:
    model, data = quantized(), batches(5, rows=12)
    codes = {name: param.clone() for name, param in model.named_parameters() if name.endswith("codes")}

    def kept(engine: sw.Engine) -> dict[str, Any]:
        return {"codes": {name: engine.state_dict()[name] for name in codes}}

    more: dict[str, Any] = {"rows": {"param": {"tier": "disk"}}, "disk": str(tmp_path)} if preset == "infinity" else {}
    run = sharded_run(
        model, data, preset, num_ranks, mesh, adamw_of_trainable, after=kept, shares_memory=shares_memory, **more
    )
    assert_same(run, plain_run(model, data, adamw_of_trainable))
    for name, value in codes.items():
        assert torch.equal(run.extra["codes"][name], value), name


def resumed_by(world: sw.World, model: nn.Module, preset: str, folder: Path) -> dict[str, Tensor]:
    """What is in `folder`, read into a copy of `model` without its values."""
    mine = copy.deepcopy(model)
    with torch.no_grad():
        for param in mine.parameters():
            param.zero_()
    with sw.shard(mine, preset, optimizer=adamw_of_trainable(mine), world=world) as engine:
        assert engine.resume(folder) is not None
        return engine.state_dict()


def saved_and_resumed(
    model: nn.Module, plan: Any, num_ranks: int, folder: Path, train: Callable[[sw.Engine], object] | None = None
) -> dict[str, Tensor]:
    """The values that ranks with `plan` save, after they `train`; they are those that three ranks then resume."""

    def save(world: sw.World) -> dict[str, Tensor]:
        mine = copy.deepcopy(model)
        with sw.shard(mine, plan, optimizer=adamw_of_trainable(mine), world=world) as engine:
            if train is not None:
                train(engine)
            engine.save(folder)
            return engine.state_dict()

    saved: dict[str, Tensor] = run_ranks(num_ranks, save)[0]
    resumed = run_ranks(3, lambda world: resumed_by(world, model, "zero2", folder))[0]
    assert saved.keys() == resumed.keys()
    for name, value in saved.items():
        assert torch.equal(resumed[name], value), name
    return saved


def test_a_base_in_four_bits_is_saved_and_resumed_by_another_world(tmp_path: Path) -> None:
    model = quantized()
    saved = saved_and_resumed(model, "zero3", 2, tmp_path)
    for name, value in model.named_parameters():
        assert torch.equal(saved[name], value), name


def test_each_rank_keeps_its_part_of_the_codes() -> None:
    """Under ZeRO-3 half of all bytes on two ranks, codes included, under ddp all."""
    model = quantized()
    codes = sum(param.numel() for name, param in model.named_parameters() if name.endswith("codes"))
    others = sum(param.nbytes for param in model.parameters()) - codes

    def at_rest(preset: str) -> list[int]:

        def work(engine: sw.Engine) -> int:
            return inside.meter(engine).now["param"]

        return work_on_ranks(2, work, preset, model, adamw_of_trainable)

    assert at_rest("ddp") == pytest.approx([codes + others] * 2, rel=0.01)
    assert at_rest("zero3") == pytest.approx([(codes + others) / 2] * 2, rel=0.01)


def test_codes_of_a_live_model_are_read_written_and_moved() -> None:
    model = quantized()
    names = [name for name, _ in model.named_parameters() if name.endswith("codes")]
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    models = [copy.deepcopy(model) for _ in range(2)]

    def has_codes(state: dict[str, Tensor]) -> bool:
        return all(torch.equal(state[name], wanted[name]) for name in names)

    def rank(world: sw.World) -> None:
        mine = models[world.rank]
        engine = sw.shard(mine, "zero3", optimizer=adamw_of_trainable(mine), world=world)
        for plan in ("ddp", "zero3-offload", "zero1", {"preset": "zero3", "precision": "bf16"}, "zero3"):
            engine.reshard(plan)
            assert has_codes(engine.state_dict())
        first = mine.get_parameter(names[0])
        engine.set(names[0], wanted[names[0]] + 1)
        assert torch.equal(engine.get(names[0]), wanted[names[0]] + 1)
        assert torch.equal(first & 15, (wanted[names[0]] + 1) & 15)
        with torch.no_grad():
            first.copy_(wanted[names[0]])
        with engine.gathered(names[1], write=True):
            mine.get_parameter(names[1]).data.fill_(7)
        assert engine.get(names[1]).unique().tolist() == [7]
        engine.load_state_dict(wanted)
        engine.unshard()
        assert has_codes(mine.state_dict())

    run_ranks(2, rank)


def test_codes_are_exported_as_they_are(tmp_path: Path) -> None:
    model = quantized()

    def work(engine: sw.Engine) -> None:
        engine.save(tmp_path / "kept")
        engine.save_pretrained(tmp_path / "live")
        engine.save_pretrained(tmp_path / "narrow", dtype="bf16")
        stream = engine.weights(dtype="bf16", merge_adapters=False)
        sent = {name: tensor.clone() for name, tensor in stream}
        assert [(one.name, one.dtype, tuple(one.shape)) for one in stream.metadata()] == [
            (name, tensor.dtype, tuple(tensor.shape)) for name, tensor in sent.items()
        ]
        for name, value in model.state_dict().items():
            assert torch.equal(sent[name], value if name.endswith("codes") else value.bfloat16()), name

    work_on_ranks(2, work, "zero3", model, adamw_of_trainable)
    sw.convert(tmp_path / "kept", tmp_path / "converted", to="hf", dtype="bf16")
    for folder in ("live", "narrow", "converted"):
        stored = load_file(tmp_path / folder / "model.safetensors")
        for name, value in model.state_dict().items():
            if name.endswith("codes"):
                assert torch.equal(stored[name], value), (folder, name)

    def read(world: sw.World) -> dict[str, Tensor]:
        with sw.deferred_init():
            mine = Quantized()
        files = tmp_path / "live" / "model.safetensors"
        with sw.shard(mine, "zero3", optimizer=adamw_of_trainable(mine), world=world, weights=files) as engine:
            return engine.state_dict()

    for name, value in run_ranks(1, read)[0].items():
        assert torch.equal(value, model.state_dict()[name]), name


class Codes(nn.Parameter):
    """As the library's own parameters."""

    @property
    def quant_storage(self) -> torch.dtype:
        return self.dtype


class Packed(FourBit):
    """Its codes are in a floating-point dtype, as bitsandbytes may pack them, and are no numbers."""

    def __init__(self, base: nn.Linear, storage: torch.dtype) -> None:
        super().__init__(base)
        self.codes = Codes(self.codes.detach().view(storage), requires_grad=False)

    def weight(self) -> Tensor:
        codes = self.codes.view(torch.uint8)
        apart = torch.stack([codes & 15, codes >> 4], -1).to(self.scales.dtype) - 8
        return (apart.reshape(-1, BLOCK) * self.scales).reshape(self.shape)


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("preset", ["ddp", "zero3", "zero3-offload"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@sampled
def test_codes_packed_into_a_floating_point_dtype_are_never_converted(
    precision: str, preset: str, storage: torch.dtype, tmp_path: Path
) -> None:
    model = quantized()
    for block in model.blocks:
        for name, layer in (("qkv", block.qkv), ("down", block.down)):
            block.register_module(name, Packed(nn.Linear(layer.shape[1], layer.shape[0]), storage))
    plan = {"preset": preset, "precision": precision}

    def work(engine: sw.Engine) -> tuple[list[float], dict[str, Tensor]]:
        mine = engine.module
        losses = []
        for x, y in batches(2, rows=12):
            loss = mine(x, y)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        engine.save_pretrained(tmp_path, dtype="fp16")
        return losses, engine.state_dict()

    plain, expected = copy.deepcopy(model), []
    optimizer = adamw_of_trainable(plain)
    for x, y in batches(2, rows=12):
        optimizer.zero_grad()
        loss = plain(x, y)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    results = work_on_ranks(2, work, plan, model, adamw_of_trainable)
    stored = load_file(tmp_path / "model.safetensors")
    for losses, params in results:
        assert losses == pytest.approx(expected, rel=1e-5 if precision == "fp32" else 0.02)
        for name, value in model.named_parameters():
            if name.endswith("codes"):
                for found in (params, stored):
                    assert torch.equal(found[name].view(torch.uint8), value.view(torch.uint8)), name


def test_checkpoints_with_whole_codes_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were written when every rank kept codes whole, like buffers."""
    model = quantized()

    def save(world: sw.World) -> None:
        mine = copy.deepcopy(model)
        with sw.shard(mine, "zero3", optimizer=adamw_of_trainable(mine), world=world) as engine:
            engine.save(tmp_path)

    with monkeypatch.context() as former:
        former.setattr("shardwise.memory.dtypes._CODES", {})
        run_ranks(1, save)

    resumed = run_ranks(2, lambda world: resumed_by(world, model, "zero3", tmp_path))[0]
    for name, value in resumed.items():
        assert torch.equal(value, model.state_dict()[name]), name


class QuantizedNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.c = FourBit(nn.Linear(16, 32))


@pytest.mark.parametrize("plan", [PLANS["zero3"], PLANS["zero1"], PLANS["hsdp"], TIERS["zero3-offload"]])
@sampled
def test_codes_of_a_lost_rank_are_found_elsewhere(plan: dict[str, Any], tmp_path: Path) -> None:
    model = QuantizedNet()
    race(plan, DiesAt({1: 17, 3: 40}), tmp_path, model=model)


class QuantizedDecoder(Decoder):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        for block in self.blocks:
            block.qkv, block.down = FourBit(block.qkv), FourBit(block.down)


@pytest.mark.parametrize(
    ("preset", "mesh"),
    [
        ("zero1", {"pp": 2}),
        ("zero3", {"pp": 2, "dp": 2}),
        ("ddp", {"pp": 2, "dp": 2}),
        ("zero2", {"dp": 2, "pp": 2}),
        ("zero3-offload", {"pp": 2, "dp": 2}),
    ],
)
@sampled
def test_stages_of_a_base_in_four_bits_train_like_the_plain_model(preset: str, mesh: dict[str, int]) -> None:
    model, data = QuantizedDecoder(), token_batches(3, 8)
    runs = pipelined(model, mesh, data, preset=preset, optimizer=adamw_of_trainable)
    assert_same_stages(runs, unsplit(model, data, clip=CLIP, make_optimizer=adamw_of_trainable))
    for name, codes in model.named_parameters():
        if name.endswith("codes"):
            assert all(torch.equal(run.params[name], codes) for run in runs), name


@thorough_only("slow; smaller tests beside it cover the same code")
def test_stages_of_a_base_in_four_bits_are_saved_and_resumed_without_stages(tmp_path: Path) -> None:
    def train(engine: sw.Engine) -> None:
        engine.forward_backward(token_batches(1, 4)[0])
        engine.step()

    torch.manual_seed(0)
    plan = {"preset": "zero3", "mesh": {"pp": 2, "dp": 2}, "accumulate": 2}
    saved_and_resumed(QuantizedDecoder(), plan, 4, tmp_path, train)
