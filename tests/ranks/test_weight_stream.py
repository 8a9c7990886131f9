"""`engine.weights()`: every tensor that comes is that of the plain model's files, in one order on all ranks, and as its
metadata said."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small_transformers import VOCAB, gpt2, llama, mixtral, qwen_moe, vit
from torch import nn
from twins import work_on_mesh

import shardwise as sw
from shardwise.errors import CheckpointError, ConfigError
from tests import inside
from tests.models import Transformer
from tests.thorough import sampled

Tensor = torch.Tensor
MODELS = {"llama": llama, "gpt2": gpt2, "mixtral": mixtral, "qwen_moe": qwen_moe, "vit": vit}
PLANS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"preset": "ddp"}),
    ("gpt2", {"preset": "zero1"}),
    ("vit", {"preset": "zero2", "precision": "bf16"}),
    ("mixtral", {"preset": "zero3"}),
    ("qwen_moe", {"preset": "zero3-offload"}),
    ("llama", {"preset": "hsdp", "mesh": {"node": 2, "local": 2}}),
    ("llama", {"preset": "zero3", "mesh": {"dp": 2, "tp": 2}}),
    ("gpt2", {"preset": "zero2", "mesh": {"tp": 2}}),
    ("gpt2", {"preset": "zero3", "mesh": {"pp": 2}}),
    ("llama", {"preset": "zero1", "mesh": {"pp": 2, "tp": 2}}),
    ("mixtral", {"preset": "zero3", "mesh": {"ep": 2}}),
    ("qwen_moe", {"preset": "zero2", "mesh": {"pp": 2, "dp": 2}}),
]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def on_ranks(model: nn.Module, plan: dict[str, Any], work: Any) -> list[Any]:
    return work_on_mesh(work, plan, model, adamw)


def collected(stream: Any) -> dict[str, Tensor]:
    """What a stream has, which is what its metadata says."""
    found: dict[str, Tensor] = {}
    for said, (name, tensor) in zip(stream.metadata(), stream, strict=True):
        assert (said.name, said.shape, said.dtype) == (name, tuple(tensor.shape), tensor.dtype)
        found[name] = tensor.clone()
    assert len(found) == len(stream)
    assert stream.num_bytes == sum(one.numel() * one.itemsize for one in found.values())
    return found


@pytest.mark.parametrize(("name", "plan"), PLANS)
@sampled
def test_the_stream_has_what_the_library_writes(name: str, plan: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = MODELS[name]()
    model.save_pretrained(tmp_path / "theirs")
    expected = load_file(tmp_path / "theirs" / "model.safetensors")

    def work(engine: sw.Engine) -> Any:
        stream = engine.weights()
        again = collected(stream)
        assert list(again) == list(collected(stream))
        engine.save_pretrained(tmp_path / "ours")
        return again, engine.state_dict(), collected(engine.weights(names="module", dtype="bf16"))

    results = on_ranks(model, plan, work)
    for found, state, narrow in results:
        assert list(found) == list(results[0][0])
        assert found.keys() == expected.keys()
        assert all(torch.equal(one, expected[key]) for key, one in found.items())
        assert set(narrow) <= set(state)
        assert all(torch.equal(one, state[key].to(one.dtype)) for key, one in narrow.items())
        assert {one.dtype for one in narrow.values() if one.is_floating_point()} == {torch.bfloat16}
    written = load_file(tmp_path / "ours" / "model.safetensors")
    assert written.keys() == expected.keys()
    assert all(torch.equal(one, expected[key]) for key, one in written.items())


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"pp": 2}, {"dp": 2, "tp": 2}])
@sampled
def test_the_stream_follows_training(mesh: dict[str, int], tmp_path: Path) -> None:
    """The same stream has the values after each step, tied weights once."""
    torch.manual_seed(2)
    model = gpt2()
    tokens = torch.randint(0, VOCAB, (4, 8))

    def work(engine: sw.Engine) -> None:
        stream = engine.weights()
        share, shares = engine.data_ranks
        for _ in range(2):
            rows = tokens.chunk(shares)[share]
            engine.train_step({"input_ids": rows, "labels": rows})
            found, state = collected(stream), engine.state_dict()
            assert set(state) - set(found) == {"lm_head.weight"}
            assert all(torch.equal(one, state[key]) for key, one in found.items())

    on_ranks(model, {"preset": "zero3", "mesh": mesh}, work)


@pytest.mark.parametrize(("names", "mesh"), [("module", {"dp": 2}), ("hf", {"dp": 2}), ("hf", {"pp": 2})])
def test_no_more_than_a_unit_is_held(names: Any, mesh: dict[str, int]) -> None:
    """What a receiver lets go is free before the next unit is gathered."""
    torch.manual_seed(3)
    model = Transformer(num_blocks=6)

    def work(engine: sw.Engine) -> None:
        alive: dict[int, int] = {}
        most = largest = 0
        for _, tensor in engine.weights(names=names):
            storage = tensor.untyped_storage()
            if id(storage) not in alive:
                alive[id(storage)] = storage.nbytes()
                weakref.finalize(storage, alive.pop, id(storage))
            largest = max(largest, storage.nbytes())
            most = max(most, sum(alive.values()))
            del tensor, storage
        assert most == largest > 0

    on_ranks(model, {"preset": "zero3", "mesh": mesh}, work)


@pytest.mark.parametrize(
    ("preset", "precision", "share"), [("zero3", "fp32", 0.5), ("zero3", "bf16", 0.5), ("zero1", "bf16", 0.0)]
)
def test_weights_are_sent_in_the_precision_that_is_asked_for(preset: str, precision: str, share: float) -> None:
    """Half as many bytes, or none where every rank has them, and the same values as if they were rounded afterwards.
    What has come stays as it is when training goes on."""
    torch.manual_seed(4)
    tokens = torch.randint(0, 8, (2, 6))

    def work(engine: sw.Engine) -> None:
        sent, found = [], {}
        engine.train_step((tokens, tokens))
        for dtype in ("bf16", None):
            inside.ledger(engine).clear()
            stream = engine.weights(dtype=dtype)
            assert len(stream.metadata()) == len(stream)
            assert not sum(inside.ledger(engine).sent_bytes.values()), "metadata is from shapes alone"
            found[dtype] = dict(stream)
            sent.append(inside.ledger(engine).sent_bytes["gather", "dp"])
        engine.train_step((tokens, tokens))
        assert all(torch.equal(found["bf16"][name], value.to(torch.bfloat16)) for name, value in found[None].items())
        assert sent[0] == share * sent[1]
        assert sent[1] > 0

    on_ranks(Transformer(), {"preset": preset, "precision": precision}, work)


def test_a_receiver_that_fails_leaves_no_rank_waiting() -> None:
    model = Transformer()

    def work(engine: sw.Engine) -> int:
        received: list[str] = []

        def receive(name: str, _: Tensor) -> None:
            received.append(name)
            if len(received) == 2:
                raise OSError("the sampler is gone")

        if engine.world.rank == 0:
            with pytest.raises(OSError, match="the sampler is gone"):
                engine.weights(names="module").send(receive)
        else:
            engine.weights(names="module").send(None)
        assert len(collected(engine.weights(names="module"))) > 2  # and all go on
        return len(received)

    assert on_ranks(model, {"preset": "zero3"}, work) == [2, 0]


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    def work(engine: sw.Engine) -> None:
        names: Any = "vllm"
        with pytest.raises(ConfigError, match="'hf' are the names"):
            engine.weights(names=names)
        (tmp_path / "file").touch()
        with pytest.raises(CheckpointError, match="could not be written"):
            engine.save_pretrained(tmp_path / "file" / "out")

    on_ranks(Transformer(), {"preset": "zero2", "mesh": {"pp": 2}}, work)
