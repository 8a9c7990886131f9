"""Every Python block in the README and in docs/ runs as it is, given the names that its page assumes."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_transformers import llama, mixtral
from torch import nn

import shardwise as sw
import shardwise.integrations.deepspeed as deepspeed
from shardwise.errors import FaultError
from shardwise.testing import run_ranks, skip_at
from tests.thorough import each_value

ROOT = Path(__file__).parents[2]
Names = dict[str, Any]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(x)


class Small(nn.Module):
    """A model with the module names of the pages; its output is its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(11, 8)
        self.h = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.wte(tokens)
        for block in self.h:
            hidden = block(hidden)
        loss: torch.Tensor = self.head(hidden).square().mean()
        return loss


BATCH = torch.arange(6).reshape(2, 3)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-4)


def trained(model: nn.Module, world: sw.World | None) -> Names:
    """An engine that has taken a step, and the other names that a loop has."""
    optimizer = adamw(model)
    engine = sw.shard(model, "zero3", optimizer=optimizer, world=world)
    engine.backward(engine(BATCH))
    engine.step()
    return {"engine": engine, "model": model, "optimizer": optimizer, "batch": BATCH, "micro_batch": BATCH}


def nothing(_: sw.World | None) -> Names:
    return {"build": Small, "model": Small(), "loader": [BATCH] * 2, "data": [BATCH] * 6}


def a_model(_: sw.World | None) -> Names:
    model = Small()
    return {"sw": sw, "model": model, "optimizer": adamw(model), "batch": BATCH}


def an_engine(world: sw.World | None) -> Names:
    return trained(Small(), world)


def a_model_in_stages(world: sw.World | None) -> Names:
    model = Small()
    return {"model": model, "optimizer": adamw(model), "world": world, "batch": torch.arange(8).reshape(8, 1)}


def an_engine_in_stages(world: sw.World | None) -> Names:
    names = a_model_in_stages(world)
    plan = {"preset": "zero1", "mesh": {"pp": 2}, "accumulate": 2}
    engine = sw.shard(names["model"], plan, optimizer=names["optimizer"], world=world)
    return {**names, "engine": engine, "micro_batch": names["batch"][:1]}


def a_loop(world: sw.World | None) -> Names:
    names = trained(Small(), world)
    scheduler = torch.optim.lr_scheduler.ConstantLR(names["optimizer"])
    loader = sw.data.Loader([BATCH[0]] * 8, batch_rows=2, steps=4)
    return {**names, "scheduler": scheduler, "loader": loader, "epoch": 0}


def a_model_and_data(world: sw.World | None) -> Names:
    model = Small()
    return {"model": model, "optimizer": adamw(model), "loader": [BATCH] * 2, "world": world}


def a_whole_data_set(world: sw.World | None) -> Names:
    return {**a_model_and_data(world), "dataset": torch.stack([BATCH[0]] * 8)}


def a_plain_loop(world: sw.World | None) -> Names:
    model = Small()
    names = trained(model, world)
    return {**names, "weights": model.state_dict(), "x": BATCH}


def a_language_model(_: sw.World | None) -> Names:
    model = llama()
    model.save_pretrained("path/to/folder")
    engine = sw.shard(model, "zero3")
    return {"engine": engine, "config": model.config, "prompt": torch.tensor([[1, 2]])}


def hidden_states(_: sw.World | None) -> Names:
    return {"hidden": torch.randn(2, 4, 8), "head": torch.nn.Linear(8, 11), "labels": torch.arange(8).reshape(2, 4)}


def a_policy(world: sw.World | None) -> Names:
    """Trained on several ranks, with samples; a version of it is in `weights` if this is the only rank."""
    engine = sw.shard(llama(), "zero3", world=world)
    if world is None:
        engine.publish("weights")
    tokens = torch.arange(8).reshape(2, 4)
    return {
        **{"engine": engine, "version": -1, "tokens": tokens, "of_sampler": -torch.ones(2, 4), "model": llama()},
        **{"samples": {"input_ids": tokens, "log_probs": -torch.ones(2, 4), "counted": tokens % 4 > 1}},
        **{"is_sampled": tokens % 4 > 1, "sampler": llama()},
        "prompt": tokens[:1],
    }


def a_saved_model(world: sw.World | None) -> Names:
    if world is not None and world.rank == 0:
        llama().save_pretrained("model")
    return {"world": world, "prompts": torch.tensor([[3, 1, 2]])}


def a_deepspeed_script_that_generates(world: sw.World | None) -> Names:
    return {"deepspeed": deepspeed, "model": llama(), "world": world, "prompts": torch.tensor([[3, 1, 2]])}


def a_language_model_in_stages(world: sw.World | None) -> Names:
    model = llama()
    plan = {"preset": "zero1", "mesh": {"pp": 2}, "accumulate": 2}
    engine = sw.shard(model, plan, optimizer=adamw(model), world=world)
    tokens = torch.tensor([[3, 1, 2]])
    return {"model": model, "engine": engine, "tokens": tokens, "prompt": torch.tensor([[1, 2]])}


def a_split_language_model(world: sw.World | None) -> Names:
    model = llama()
    return {"model": model, "optimizer": adamw(model), "loader": [torch.arange(8).reshape(1, 8)] * 2, "world": world}


def a_mixture(world: sw.World | None) -> Names:
    model = mixtral()
    return {"model": model, "optimizer": adamw(model), "loader": [torch.arange(8).reshape(1, 8)] * 2, "world": world}


def pairs(world: sw.World | None) -> Names:
    return {"data": [(torch.randn(2, 3, 16), torch.randn(2, 3, 16))] * 2, "world": world}


def a_monitored_script(world: sw.World | None) -> Names:
    return {"deepspeed": deepspeed, "model": Small(), "loader": [BATCH] * 2, "world": world}


def a_deepspeed_script(world: sw.World | None) -> Names:
    return {"deepspeed": deepspeed, "data": [torch.randn(2, 8, 16)] * 2, "world": world}


def an_optimizer_and_a_batch(_: sw.World | None) -> Names:
    return {"model": Small(), "batch": BATCH}


def an_optimizer_of_its_and_a_batch(world: sw.World | None) -> Names:
    model = Small()
    return {"model": model, "optimizer": adamw(model), "batch": BATCH, "world": world}


def its_world(world: sw.World | None) -> Names:
    return {"world": world}


def a_loop_to_log(world: sw.World | None) -> Names:
    model = Small()
    return {"model": model, "optimizer": adamw(model), "loader": [BATCH] * 4, "world": world}


def a_head(_: sw.World | None) -> Names:
    head = nn.Linear(4, 11)
    return {"head": head, "logits": head(torch.ones(6, 4)), "targets": torch.arange(6)}


def data_sets(_: sw.World | None) -> Names:
    rows = [torch.arange(3) for _ in range(96)]
    np.arange(4000, dtype=np.uint16).tofile("tokens.bin")
    model = Small()
    return {
        **dict.fromkeys(("dataset", "web", "code"), rows),
        "my_collate": torch.stack,
        "lengths": [1000] * 4,
        "model": model,
        "optimizer": adamw(model),
        "plan": "zero3",
    }


def a_data_set(world: sw.World | None) -> Names:
    return {"model": Small(), "dataset": [torch.arange(3)] * 16, "world": world}


def a_plain_optimizer(world: sw.World | None) -> Names:
    plain = Small()
    optimizer = adamw(plain)
    plain(BATCH).backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), "adamw.pt")
    return trained(Small(), world)


class Positioned(Small):
    """A model that takes positions and returns logits."""

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden = self.wte(tokens) + self.wte(positions)
        attended = torch.nn.functional.scaled_dot_product_attention(*[hidden.unflatten(-1, (2, 4)).transpose(1, 2)] * 3)
        for block in self.h:
            hidden = block(hidden + attended.transpose(1, 2).flatten(2))
        return self.head(hidden)


def sequences(world: sw.World | None) -> Names:
    gpt, model = Positioned(), llama()
    optimizers = {"optimizer": torch.optim.SGD([*gpt.parameters()], lr=0.1)}
    data = [(torch.arange(16).reshape(2, 8) % 11, torch.arange(16).reshape(2, 8) % 11)] * 2
    return {"model": model, "gpt": gpt, "data": data, "dataset": [torch.arange(8)] * 16, "world": world, **optimizers}


def a_split_llama(world: sw.World | None) -> Names:
    names = sequences(world)
    return {**names, "optimizer": adamw(names["model"])}


def a_script(_: sw.World | None) -> Names:
    return {"data": [BATCH], "train": lambda batch: None, "save_checkpoint": lambda: None}


@dataclass(frozen=True)
class Setting:
    """The names that a block is given, the number of threads as ranks (0: none), and replacements that shorten it."""

    names: Callable[[sw.World | None], Names] = nothing
    num_ranks: int = 0
    instead: dict[str, str] = field(default_factory=dict)


FEW = {"steps=10_000": "steps=4", "run/": "here/"}
OVER_TWO = {'"sp": 4': '"sp": 2', "=optimizer)": "=optimizer, world=world)"}
OWN_WORLD = {"optimizer=optimizer)": "optimizer=optimizer, world=world)"}
BLOCKS: dict[tuple[str, int], Setting] = {
    ("README.md", 0): Setting(a_model),
    ("README.md", 1): Setting(),
    ("docs/activations.md", 0): Setting(an_optimizer_and_a_batch),
    ("docs/activations.md", 1): Setting(hidden_states),
    ("docs/activations.md", 2): Setting(an_engine),
    ("docs/activations.md", 3): Setting(a_model),
    ("docs/after-training.md", 0): Setting(a_policy, num_ranks=2),
    ("docs/after-training.md", 1): Setting(a_policy, num_ranks=2),
    ("docs/after-training.md", 2): Setting(a_policy, num_ranks=2),
    ("docs/after-training.md", 3): Setting(a_policy, num_ranks=2),
    ("docs/after-training.md", 4): Setting(a_policy),
    ("docs/after-training.md", 5): Setting(a_policy),
    ("docs/after-training.md", 6): Setting(a_policy, num_ranks=2, instead={"tell=servers": "tell=[]"}),
    ("docs/after-training.md", 7): Setting(a_policy, num_ranks=2),
    ("docs/after-training.md", 8): Setting(a_policy, num_ranks=2),
    ("docs/after-training.md", 9): Setting(a_saved_model, num_ranks=2, instead={"mesh=": "world=world, mesh="}),
    ("docs/auto.md", 0): Setting(an_optimizer_of_its_and_a_batch),
    ("docs/auto.md", 1): Setting(an_optimizer_of_its_and_a_batch),
    ("docs/deferred-init.md", 0): Setting(),
    ("docs/deferred-init.md", 1): Setting(a_language_model),
    ("docs/deferred-init.md", 2): Setting(a_language_model),
    ("docs/deferred-init.md", 3): Setting(),
    ("docs/deferred-init.md", 4): Setting(a_language_model, instead={"=100": "=2"}),
    ("docs/deferred-init.md", 5): Setting(a_language_model),
    ("docs/checkpoints.md", 0): Setting(a_loop, instead={"...": "engine.backward(engine(batch))", "% 100": "% 2"}),
    ("docs/checkpoints.md", 1): Setting(an_engine, num_ranks=8),
    ("docs/convert.md", 0): Setting(an_engine),
    ("docs/data.md", 0): Setting(data_sets, instead=FEW),
    ("docs/data.md", 1): Setting(data_sets, instead=FEW),
    ("docs/data.md", 2): Setting(data_sets),
    ("docs/data.md", 3): Setting(data_sets),
    ("docs/data.md", 4): Setting(data_sets),
    ("docs/deepspeed.md", 0): Setting(
        a_data_set, num_ranks=2, instead={"    model=model,": "    model=model, world=world,"}
    ),
    ("docs/deepspeed.md", 1): Setting(
        a_monitored_script, num_ranks=2, instead={"    model=model,": "    model=model, world=world,"}
    ),
    ("docs/deepspeed.md", 2): Setting(
        a_deepspeed_script_that_generates, num_ranks=2, instead={"(model, tensor": "(model, world=world, tensor"}
    ),
    ("docs/deepspeed.md", 3): Setting(
        a_deepspeed_script, num_ranks=2, instead={"    model=model, opt": "    model=model, world=world, opt"}
    ),
    ("docs/engine.md", 0): Setting(),
    ("docs/engine.md", 1): Setting(an_engine, num_ranks=2),
    ("docs/engine.md", 2): Setting(a_loop, num_ranks=2),
    ("docs/engine.md", 3): Setting(an_engine, num_ranks=2),
    ("docs/engine.md", 4): Setting(a_plain_loop, num_ranks=2, instead={'torch.load("weights.pt")': "weights"}),
    ("docs/engine.md", 5): Setting(an_engine, num_ranks=2),
    ("docs/experts.md", 0): Setting(a_mixture, num_ranks=4, instead=OWN_WORLD),
    ("docs/experts.md", 1): Setting(pairs, num_ranks=4, instead=OWN_WORLD),
    ("docs/experts.md", 2): Setting(),
    ("docs/faults.md", 0): Setting(),
    ("docs/horovod.md", 0): Setting(a_model_and_data, num_ranks=2, instead={"hvd.init()": "hvd.init(world)"}),
    ("docs/horovod.md", 1): Setting(a_model_and_data, num_ranks=2, instead=OWN_WORLD),
    ("docs/horovod.md", 2): Setting(a_whole_data_set, num_ranks=2, instead={"hvd.init()": "hvd.init(world)"}),
    ("docs/index.md", 0): Setting(its_world, num_ranks=2, instead=OWN_WORLD),
    ("docs/launching.md", 0): Setting(a_script),
    ("docs/pipeline.md", 0): Setting(a_model_in_stages, num_ranks=4),
    ("docs/pipeline.md", 1): Setting(an_engine_in_stages, num_ranks=2),
    ("docs/pipeline.md", 2): Setting(a_language_model_in_stages, num_ranks=2),
    ("docs/pipeline.md", 3): Setting(a_language_model_in_stages, num_ranks=2, instead={"=100": "=2"}),
    ("docs/optimizers.md", 0): Setting(),
    ("docs/optimizers.md", 1): Setting(),
    ("docs/optimizers.md", 2): Setting(),
    ("docs/optimizers.md", 3): Setting(),
    ("docs/optimizers.md", 4): Setting(a_plain_optimizer),
    ("docs/optimizers.md", 5): Setting(),
    ("docs/seeing.md", 0): Setting(a_loop_to_log, num_ranks=2, instead=OWN_WORLD),
    ("docs/tensor-parallel.md", 0): Setting(
        a_split_language_model, num_ranks=4, instead={"optimizer=optimizer": "optimizer=optimizer, world=world"}
    ),
    ("docs/tensor-parallel.md", 1): Setting(a_head),
    ("docs/sequence.md", 0): Setting(
        a_split_llama, 4, {'"sp": 4': '"sp": 2', "=optimizer)": "=optimizer, world=world)"}
    ),
    ("docs/sequence.md", 1): Setting(sequences, 2, OVER_TWO),
    ("docs/tiers-machine.md", 0): Setting(),
    ("docs/tiers-machine.md", 1): Setting(),
    ("docs/tiers-machine.md", 2): Setting(),
    ("docs/tiers.md", 0): Setting(an_optimizer_and_a_batch),
}


ELSEWHERE = {"accelerate.md", "horovod-frameworks.md", "lightning.md", "ray.md", "transformers.md", "tutorial.md"}
"""Pages whose blocks need other libraries. tests/extras runs them: test_integration_docs.py, test_tutorial.py and
horovod_ranks.py."""


def blocks() -> dict[tuple[str, int], str]:
    """Every Python block, by page and number."""
    found = {}
    pages = [page for page in sorted((ROOT / "docs").glob("*.md")) if page.name not in ELSEWHERE]
    for page in (ROOT / "README.md", *pages):
        for number, text in enumerate(
            re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
        ):
            found[str(page.relative_to(ROOT)), number] = text
    return found


def test_every_block_has_a_setting() -> None:
    assert set(BLOCKS) == set(blocks())


@each_value
@pytest.mark.parametrize(("page", "number"), BLOCKS, ids=[f"{page}-{number}" for page, number in BLOCKS])
def test_a_block_of_the_docs_runs(page: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    setting, text = BLOCKS[page, number], blocks()[page, number]
    for long, short in setting.instead.items():
        assert long in text or setting.instead is FEW
        text = text.replace(long, short)

    def run(world: sw.World | None) -> None:
        given = {"sw": sw, "torch": torch, "np": np, "pytest": pytest, "FaultError": FaultError}
        names: Names = {**given, "run_ranks": run_ranks, "skip_at": skip_at, **setting.names(world)}
        if "transformers" in text:
            names["transformers"] = pytest.importorskip("transformers")
        exec(compile(text, f"{page}, block {number}", "exec"), names)

    if setting.num_ranks:
        run_ranks(setting.num_ranks, run)
    else:
        run(None)
