"""Pipeline stages with split sequences: each rank computes its stage for its own tokens."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from sequences import TOKENS, Batch, train_in_one_call, whole_run
from sequences import batches as gpt_batches
from test_sequence_transformers import batches, built, gpt2, llama, own_loss
from torch import Tensor, nn
from torch.nn import functional
from twins import Run, assert_alike, at_once, ranks_run, work_on_ranks

import shardwise as sw
from shardwise.errors import ModelError
from tests.models import Chain, Gpt
from tests.thorough import sampled, thorough_only

pytestmark = sampled


def staged_run(model: nn.Module, data: list[Batch], mesh: dict[str, int], train: Any, **plan: Any) -> list[Run]:
    """Train by `train(engine, its rows of a batch)`; returns the results of every rank."""
    return ranks_run(model, data, {"mesh": mesh, **plan}, train=at_once(train))


@thorough_only("slow; smaller tests beside it cover the same code")
@pytest.mark.parametrize("recomputes", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize(
    ("build", "preset", "mesh", "schedule", "attention"),
    [
        (llama, "zero3", {"pp": 2, "sp": 2}, "1f1b", "ring"),
        (llama, "zero1", {"pp": 2, "dp": 2, "sp": 2}, "1f1b", "ulysses"),
        (llama, "zero2", {"sp": 2, "pp": 2}, "gpipe", "ulysses"),
        (gpt2, "zero2", {"sp": 2, "pp": 2}, "zb-h1", "ring"),
        (llama, "ddp", {"pp": 2, "sp": 3}, "1f1b", "ring"),
        (llama, "zero1", {"pp": 2, "tp": 2, "sp": 2}, "1f1b", "ring"),
    ],
    ids=lambda one: "x".join(f"{axis}{size}" for axis, size in one.items()) if isinstance(one, dict) else None,
)
def test_a_model_of_transformers_is_given_whole_batches(
    build: Any, preset: str, mesh: dict[str, int], schedule: str, attention: str, recomputes: bool
) -> None:
    """With the model's own loss. Labels that do not count are distributed unevenly over the ranks."""
    model, data = built(build), batches(3)
    if recomputes:
        model.activation_checkpointing_enable()
    model.train()
    plan = {"preset": preset, "accumulate": 2, "pipeline": {"schedule": schedule}, "sequence": {"attention": attention}}
    twin = whole_run(model, data, loss_of=own_loss, shares=2)
    for run in staged_run(model, data, mesh, sw.Engine.forward_backward, **plan):
        assert_alike(run, twin)


def outside(model: Any, batch: Batch) -> Tensor:
    """A loss of the loop's own, from all logits."""
    logits = model(**{name: value for name, value in batch.items() if name != "labels"}, use_cache=False).logits
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


@thorough_only("slow; smaller tests beside it cover the same code")
@pytest.mark.parametrize("loss_of", [own_loss, outside])
@pytest.mark.parametrize(
    ("preset", "mesh", "attention"),
    [
        ("zero3", {"pp": 2, "sp": 2}, "ring"),
        ("zero1", {"pp": 2, "sp": 2}, "ulysses"),
        ("zero2", {"pp": 2, "dp": 2, "sp": 2}, "ulysses"),
    ],
    ids=str,
)
def test_loops_call_a_model_of_transformers_with_whole_batches(
    preset: str, mesh: dict[str, int], attention: str, loss_of: Any
) -> None:
    """Padded, with tokens that do not divide, and evaluated in between; the loss is the same on all ranks."""
    model, data = built(llama), batches(3, tokens=15)
    for batch in data:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["attention_mask"][1, 9:] = 0
    labels_of_each = [(batch["labels"][rows, 1:] != -100).sum() for batch in data for rows in (slice(2), slice(2, 4))]
    assert len(set(map(int, labels_of_each))) == 1  # so that a mean over data ranks is the whole batch's
    twin = whole_run(model, data, loss_of=loss_of)

    def train(engine: sw.Engine, rows: Batch) -> Tensor:
        engine.give_whole_outputs()
        loss = loss_of(engine.module, rows)
        with torch.no_grad():
            logits = engine.module(rows["input_ids"], attention_mask=rows["attention_mask"]).logits
        assert logits.shape[:2] == rows["input_ids"].shape
        engine.backward(loss)
        return loss

    for run in staged_run(model, data, mesh, train, preset=preset, sequence={"attention": attention}):
        assert_alike(run, twin)


@pytest.mark.parametrize("attention", ["ulysses", "ring"])
def test_loops_call_a_model_with_documents_of_split_sequences(attention: str) -> None:
    """The parts of a call have documents of their own; three rows are no multiple of them."""
    model, data = Gpt(num_blocks=3), gpt_batches(2, rows=3)

    def train(engine: sw.Engine, rows: Batch) -> Tensor:
        part = engine.split_sequence(rows, documents=DOCUMENTS[:3])
        labels = part.pop("labels")
        loss = functional.cross_entropy(engine(**part).flatten(0, 1), labels.flatten())
        engine.backward(loss)
        return loss

    twin = whole_run(model, data, loss_of=lambda plain, batch: packed_loss(plain, batch, DOCUMENTS[:3]))
    plan = {"preset": "zero2", "sequence": {"attention": attention}}
    for run in staged_run(model, data, {"pp": 2, "sp": 2}, train, **plan):
        assert_alike(run, twin)


def packed_loss(model: Any, batch: Batch, documents: Tensor) -> Tensor:
    """The loss of a plain model, document by document and row by row."""
    losses = []
    for row, numbers in enumerate(documents):
        for number in numbers.unique():
            at = (numbers == number).nonzero()[:, 0]
            part = {name: value[row : row + 1, at] for name, value in batch.items()}
            logits = model(part["input_ids"], part["position_ids"]).flatten(0, 1)
            losses.append(functional.cross_entropy(logits, part["labels"].flatten(), reduction="none"))
    return torch.cat(losses).mean()


DOCUMENTS = torch.tensor([[0] * cut + [1] * (TOKENS - cut) for cut in (3, 9, 16, 5)])


@pytest.mark.parametrize("recomputes", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("attention", ["ulysses", "ring"])
@pytest.mark.parametrize("mesh", [{"sp": 2}, {"pp": 2, "sp": 2}], ids=["sp", "pp-sp"])
def test_micro_batches_have_documents_of_their_own(mesh: dict[str, int], attention: str, recomputes: bool) -> None:
    """A split batch is cut into micro-batches, several of which are in flight. Each keeps its own documents."""
    model, data = Gpt(num_blocks=3, recomputes=recomputes), gpt_batches(2)

    def loss_of(plain: Any, batch: Batch) -> Tensor:
        return packed_loss(plain, batch, DOCUMENTS)

    twin = whole_run(model, data, loss_of=loss_of)
    plan = {"preset": "zero2", "accumulate": 4, "sequence": {"attention": attention}}
    train = partial(train_in_one_call, documents=DOCUMENTS)
    for run in staged_run(model, data, mesh, train, **plan):
        assert_alike(run, twin)


def test_stages_none_of_which_has_attention_are_told() -> None:

    plan = {"preset": "zero1", "mesh": {"pp": 2, "sp": 2}, "accumulate": 2}

    def work(engine: sw.Engine) -> None:
        part = engine.split_sequence(torch.ones(2, 4, 8))
        engine.forward_backward(part, loss_fn=lambda out: out.square().mean())

    with pytest.raises(ModelError, match=r"Chain computed a forward without any attention that could be split"):
        work_on_ranks(4, work, plan, Chain(4), None)
