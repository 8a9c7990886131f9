"""A model of transformers inside of a module of one's own (a LightningModule, say): its plans and config are found."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_transformers import VOCAB, dinov2, gpt2, llama, mixtral, qwen_moe
from torch import nn
from twins import work_on_ranks

import shardwise as sw
from shardwise.checkpoint import unwrapped
from shardwise.errors import ModelError
from shardwise.testing import run_ranks


class Wrapper(nn.Module):
    def __init__(self, model: nn.Module, *others: nn.Module) -> None:
        super().__init__()
        self.model, self.others = model, nn.ModuleList(others)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(tokens, labels=tokens, use_cache=False).loss
        return loss


@pytest.mark.parametrize(("axis", "build"), [("tp", llama), ("ep", mixtral)])
def test_it_is_split_as_by_itself(axis: str, build: type[nn.Module]) -> None:
    """Of the layers that are split a rank has a half, and the loss is that of the whole model."""
    wrapper = Wrapper(build())
    tokens = torch.randint(VOCAB, (2, 6))
    plan = {"preset": "ddp", "mesh": {axis: 2} if axis == "ep" else {"dp": 1, axis: 2}}

    def work(engine: sw.Engine) -> int:
        mine = engine.module
        loss = mine(tokens)
        engine.backward(loss)
        engine.step()
        assert loss.item() == pytest.approx(wrapper(tokens).item(), rel=1e-5)
        return sum(param.numel() for param in mine.parameters())

    whole = sum(param.numel() for param in wrapper.parameters())
    assert all(
        found < 0.8 * whole
        for found in work_on_ranks(2, work, plan, wrapper, lambda mine: torch.optim.SGD(mine.parameters(), lr=0.1))
    )


class Distilled(nn.Module):
    """A teacher, which is not trained, beside a student of another kind and with other heads."""

    def __init__(self, teacher: nn.Module, student: nn.Module) -> None:
        super().__init__()
        self.teacher, self.student = teacher.requires_grad_(False), student

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            wanted = self.teacher(tokens, use_cache=False).logits.softmax(-1)
        loss: torch.Tensor = nn.functional.cross_entropy(self.student(tokens, use_cache=False).logits.mT, wanted.mT)
        return loss


TWO = {
    "tp": lambda: Distilled(gpt2(), llama(num_attention_heads=2, num_key_value_heads=2)),
    "ep": lambda: Distilled(mixtral(), qwen_moe()),
}


@pytest.mark.parametrize("axis", TWO)
def test_of_two_beside_each_other_each_is_split_by_its_own_plan(axis: str) -> None:
    model = TWO[axis]()
    whole = copy.deepcopy(model)
    tokens = torch.randint(VOCAB, (4, 6))
    optimizer = torch.optim.SGD(whole.student.parameters(), lr=0.1)
    expected = []
    for _ in range(2):
        loss = whole(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    sizes = {name: sum(map(torch.numel, part.parameters())) for name, part in whole.named_children()}
    plan = {"preset": "ddp", "mesh": {axis: 2} if axis == "ep" else {"dp": 1, axis: 2}}

    def work(engine: sw.Engine) -> None:
        mine = engine.module
        share = tokens.chunk(2)[engine.world.rank] if axis == "ep" else tokens
        for loss in expected:
            ours = mine(share)
            engine.backward(ours)
            engine.step()
            assert engine.mean(ours.item()) == pytest.approx(loss, rel=1e-5)
        for name, part in mine.named_children():
            assert sum(map(torch.numel, part.parameters())) < 0.8 * sizes[name], name

    work_on_ranks(2, work, plan, model, lambda mine: torch.optim.SGD(mine.student.parameters(), lr=0.1))


def test_one_of_two_without_a_plan_is_named() -> None:
    models = [Wrapper(llama(), dinov2()) for _ in range(2)]

    def rank(world: sw.World) -> None:
        with pytest.raises(ModelError, match=r"^Dinov2.* has no tensor-parallel plan of its own"):
            sw.shard(models[world.rank], {"preset": "ddp", "mesh": {"dp": 1, "tp": 2}}, world=world)

    run_ranks(2, rank)


def _checkpointed(model: nn.Module) -> nn.Module:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, nn.TransformerEncoderLayer))
    return model


def _blocks_compiled(model: nn.Module) -> nn.Module:
    for index, block in enumerate(model):
        model[index] = torch.compile(block, backend="eager")
    return model


WRAPPINGS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "nothing": lambda model: model,
    "checkpoint_wrapper": _checkpointed,
    "torch.compile of blocks": _blocks_compiled,
    "torch.compile": lambda model: torch.compile(model, backend="eager"),  # type: ignore[dict-item]
    "both": lambda model: _blocks_compiled(_checkpointed(model)),
}


@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_is_that_of_the_same_model_without_wrappers(tmp_path: Path) -> None:
    """Names inside of wrappers have a part for each, in the model and in checkpoints that were written with them."""

    def build(how: str) -> nn.Module:
        torch.manual_seed(0)
        layers = [nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) for _ in range(2)]
        return WRAPPINGS[how](nn.Sequential(*layers, nn.Linear(8, 8)))

    def run(how: str, then: Callable[[sw.Engine], Any]) -> Any:
        make_optimizer = lambda model: torch.optim.AdamW(model.parameters(), lr=0.1)  # noqa: E731
        return work_on_ranks(2, then, "zero3", lambda: build(how), make_optimizer)[0]

    def trained(engine: sw.Engine) -> None:
        engine.backward(engine(torch.ones(2, 3, 8)).square().mean())
        engine.step()
        engine.save(tmp_path / "plain")

    def read(engine: sw.Engine, folder: str) -> dict[str, torch.Tensor]:
        engine.resume(tmp_path / folder)
        found = {}
        for name, _ in engine.module.named_parameters():
            moment = engine.get(name, "exp_avg")
            assert moment is not None
            found[unwrapped(name)] = torch.stack([engine.get(name), moment])
        engine.save(tmp_path / "again")
        return found

    run("nothing", trained)
    expected = run("nothing", lambda engine: read(engine, "plain"))
    for how in WRAPPINGS:  # not called, because Dynamo cannot be used by threads
        for reader, folder in ((how, "plain"), ("nothing", "again")):
            found = run(reader, lambda engine: read(engine, folder))  # noqa: B023
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], value) for name, value in expected.items()), (how, reader)
            assert {spec.name for spec in sw.inspect(tmp_path / "again").source.specs} == expected.keys()
