"""Weights from safetensors files: each rank reads its own part, and every mistake is reported at once."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_transformers import gpt2, llama, mixtral, qwen_moe, vit
from torch import nn

import shardwise as sw
from shardwise.errors import CheckpointError, ModelError
from shardwise.init.files import WeightFiles
from shardwise.plan.placement import Span
from shardwise.testing import run_ranks
from tests.models import Transformer
from tests.thorough import sampled


def empty(build: Callable[[], nn.Module], how: str, num: int) -> list[nn.Module]:
    models = []
    for _ in range(num):
        with torch.device("meta") if how == "meta" else sw.deferred_init():
            models.append(build().eval())
    return models


@sampled
@pytest.mark.parametrize("build", [gpt2, llama])
@pytest.mark.parametrize("how", ["meta", "deferred"])
@pytest.mark.parametrize("shard_size", ["5GB", "20KB"])
def test_folders_of_transformers(build: Any, how: str, shard_size: str, tmp_path: Path) -> None:
    torch.manual_seed(5)
    build().save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_size == "20KB")
    twin = build().from_pretrained(tmp_path).eval()
    tokens = torch.randint(0, 97, (2, 9))
    with torch.no_grad():
        expected = twin(tokens).logits
    models = empty(build, how, 2)

    def rank(world: sw.World) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        engine = sw.shard(models[world.rank], "zero3", weights=tmp_path, world=world)
        with torch.no_grad():
            return engine(tokens).logits, engine.state_dict()

    for logits, state in run_ranks(2, rank):
        for name, value in twin.state_dict().items():
            assert torch.equal(state[name], value), name
        for name, buffer in twin.named_buffers():
            assert torch.equal(models[0].get_buffer(name), buffer), name
        assert torch.equal(logits, expected)


@sampled
@pytest.mark.parametrize("build", [mixtral, vit, qwen_moe])
@pytest.mark.parametrize("how", ["meta", "deferred"])
def test_what_transformers_converts_while_loading(build: Any, how: str, tmp_path: Path) -> None:
    """`save_pretrained` writes other names than the model has, and separate experts that the model keeps stacked."""
    torch.manual_seed(5)
    build().save_pretrained(tmp_path)
    twin = build().from_pretrained(tmp_path)
    assert load_file(tmp_path / "model.safetensors").keys() != twin.state_dict().keys()
    models = empty(build, how, 2)
    states = run_ranks(
        2, lambda world: sw.shard(models[world.rank], "zero3", weights=tmp_path, world=world).state_dict()
    )
    for state in states:
        assert state.keys() == twin.state_dict().keys()
        for name, value in twin.state_dict().items():
            assert torch.equal(state[name], value), name


def test_what_cannot_be_converted_is_refused_by_name(tmp_path: Path) -> None:
    """Files that lack an expert, and of another model. On request, missing weights stay random, with a warning."""
    mixtral().save_pretrained(tmp_path)
    whole = load_file(tmp_path / "model.safetensors")
    experts = [name for name in whole if ".experts.1." in name]
    assert experts
    save_file({name: one for name, one in whole.items() if name not in experts}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"gate_up_proj is \[2, .*\] in the model and \[1, .*\] in the file"):
        sw.shard(empty(mixtral, "meta", 1)[0], weights=tmp_path)
    router = {"model.norm.weight": whole["model.norm.weight"], "router": torch.ones(3)}
    save_file(router, tmp_path / "y.safetensors")
    with pytest.raises(ModelError, match="with strict=False what they lack would keep its initial values"):
        sw.shard(empty(mixtral, "deferred", 1)[0], weights=tmp_path / "y.safetensors")
    models = empty(mixtral, "deferred", 2)

    def rank(world: sw.World) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            sw.shard(models[world.rank], weights=tmp_path / "y.safetensors", strict=False, world=world)
        return [str(one.message) for one in caught]

    [said] = [one for one in run_ranks(1, rank)[0] if "y.safetensors" in one]
    assert "the files lack model.embed_tokens.weight" in said
    assert "the model lacks router, which are not used" in said


def test_each_rank_reads_its_own_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(5)
    llama().save_pretrained(tmp_path)
    opened: list[WeightFiles] = []
    init = WeightFiles.__init__
    monkeypatch.setattr(WeightFiles, "__init__", lambda self, place: (init(self, place), opened.append(self))[0])
    models = empty(llama, "meta", 4)
    run_ranks(4, lambda world: sw.shard(models[world.rank], "zero3", weights=tmp_path, world=world).close())
    sizes = [files.bytes_read for files in opened]
    whole = sum(param.nbytes for param in llama().parameters())
    assert sum(sizes) == whole
    assert max(sizes) < 0.4 * whole


def test_tied_weights_and_base_models(tmp_path: Path) -> None:
    torch.manual_seed(5)
    whole = gpt2()
    whole.transformer.save_pretrained(tmp_path / "base")
    whole.save_pretrained(tmp_path / "whole")
    assert "lm_head.weight" not in load_file(tmp_path / "whole" / "model.safetensors")
    state = sw.shard(empty(gpt2, "meta", 1)[0], weights=tmp_path / "base").state_dict()
    for name, value in whole.state_dict().items():
        assert torch.equal(state[name], value), name
    base = empty(lambda: gpt2().transformer, "deferred", 1)[0]
    state = sw.shard(base, weights=tmp_path / "whole" / "model.safetensors").state_dict()
    for name, value in whole.transformer.state_dict().items():
        assert torch.equal(state[name], value), name


def test_dtypes_are_converted(tmp_path: Path) -> None:
    model = Transformer()
    save_file({name: value.half() for name, value in model.state_dict().items()}, tmp_path / "half.safetensors")
    save_file({name: value.bfloat16() for name, value in model.state_dict().items()}, tmp_path / "bf16.safetensors")
    for file, dtype in (("half", torch.float16), ("bf16", torch.bfloat16)):
        state = sw.shard(Transformer(), weights=str(tmp_path / f"{file}.safetensors")).state_dict()
        for name, value in model.state_dict().items():
            assert torch.equal(state[name], value.to(dtype).float()), name


def test_all_differences_are_in_one_error(tmp_path: Path) -> None:
    stored = Transformer().state_dict()
    del stored["norm.weight"]
    stored["extra.weight"] = torch.ones(2)
    stored["head.weight"] = torch.ones(3, 3)
    save_file(stored, tmp_path / "model.safetensors")
    models = [Transformer() for _ in range(2)]

    def rank(world: sw.World) -> None:
        with pytest.raises(ModelError) as caught:
            sw.shard(models[world.rank], weights=tmp_path, world=world)
        message = str(caught.value)
        assert "head.weight is [67, 32] in the model and [3, 3] in the file" in message
        assert "the files lack norm.weight; the model lacks extra.weight." in message
        assert "strict=False" in message

    run_ranks(2, rank)


def test_what_the_files_lack_has_its_own_first_values(tmp_path: Path) -> None:
    torch.manual_seed(5)
    stored = llama().state_dict()
    save_file(stored, tmp_path / "model.safetensors")
    torch.manual_seed(6)
    twin = llama(attention_bias=True)
    torch.manual_seed(6)
    with sw.deferred_init():
        model = llama(attention_bias=True)
    with pytest.raises(ModelError, match=r"the files lack model\.layers\.0\.self_attn\.q_proj\.bias"):
        sw.shard(model, weights=tmp_path)
    with pytest.warns(UserWarning, match=r"the files lack .*q_proj\.bias.* keep the values of a new model"):
        state = sw.shard(model, weights=tmp_path, strict=False).state_dict()
    for name, value in twin.state_dict().items():
        assert torch.equal(state[name], stored.get(name, value)), name


def test_damaged_and_foreign_files(tmp_path: Path) -> None:
    def refused(place: Path) -> str:
        with pytest.raises(CheckpointError) as caught:
            sw.shard(Transformer(), weights=place)
        return str(caught.value)

    assert "no such file or folder" in refused(tmp_path / "nowhere")
    assert "has neither" in refused(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert "is a pickle" in refused(tmp_path)
    save_file(Transformer().state_dict(), tmp_path / "model.safetensors")
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "short.safetensors").write_bytes(data[:-9])
    assert "lies outside the file" in refused(tmp_path / "short.safetensors")
    (tmp_path / "noise.safetensors").write_bytes(b"\\xff" * 64)
    assert "not a safetensors file" in refused(tmp_path / "noise.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    assert "names gone.safetensors" in refused(tmp_path)


def test_spans_are_read_as_stored(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(60).view(5, 12).float(), "b": torch.arange(7), "c": torch.tensor([True, False])}
    save_file(tensors, tmp_path / "x.safetensors")
    files = WeightFiles(tmp_path / "x.safetensors")
    assert torch.equal(files.read("a", Span(7, 31)), torch.arange(7, 31).float())
    assert torch.equal(files.read("b", Span(3, 7)), torch.arange(3, 7))
    assert torch.equal(files.read("c", Span(0, 2)), tensors["c"])
    assert files.bytes_read == 24 * 4 + 4 * 8 + 2
