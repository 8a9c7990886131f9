"""Results of ranks along `sp`, joined: they equal the whole model's, and losses computed from them count once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sequences import Batch, batches, own_grads, split_run, whole_run
from small_transformers import VOCAB, library, llama
from torch import nn
from torch.nn import functional
from twins import Run, assert_alike, chunked, work_on_ranks

import shardwise as sw
from shardwise.errors import ConfigError, StateError
from tests.models import Gpt
from tests.thorough import sampled

Tensor = torch.Tensor
IGNORED = -100


def built() -> nn.Module:
    library()
    torch.manual_seed(0)
    return llama()


def labelled(num_steps: int, tokens: int) -> list[Batch]:
    """Rows with different numbers of labels that count, and with padding at their ends."""
    draw = torch.Generator().manual_seed(5)
    made = []
    for _ in range(num_steps):
        ids = torch.randint(1, VOCAB, (4, tokens), generator=draw)
        mask, labels = torch.ones_like(ids), ids.clone()
        for row in range(4):
            mask[row, tokens - row :] = 0
            labels[row, : 2 * row] = IGNORED
        labels[mask == 0] = IGNORED
        made.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return made


def on_ranks(mesh: dict[str, int], work: Callable[[sw.Engine, Any], Any], attention: str = "ulysses") -> list[Any]:
    num_ranks = int(torch.tensor(list(mesh.values())).prod())
    plan = {"preset": "zero3", "mesh": mesh, "sequence": {"attention": attention}}
    return work_on_ranks(num_ranks, lambda engine: work(engine, engine.module), plan, built)


def assert_close(ours: Tensor, plain: Tensor) -> None:
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("attention", ["ulysses", "ring"])
def test_an_evaluation_returns_what_the_whole_model_does(attention: str) -> None:
    (batch,) = labelled(1, tokens=15)
    with torch.no_grad():
        plain = built()(**batch, output_hidden_states=True)

    def work(engine: sw.Engine, model: Any) -> Any:
        engine.give_whole_outputs()
        with torch.no_grad():
            whole = model(**batch, output_hidden_states=True)
            engine.give_whole_outputs(tokens=False)
            parts = model(**batch)
            asked = {name: value for name, value in batch.items() if name != "labels"}
            return whole, parts, model(**asked).logits

    kept = batch["attention_mask"].bool()
    for whole, parts, without_labels in on_ranks({"sp": 2}, work, attention):
        assert_close(without_labels[kept], plain.logits[kept])  # needed to compute a loss
        assert_close(whole.loss, plain.loss)
        assert whole["logits"] is whole.logits
        assert_close(whole.logits[kept], plain.logits[kept])
        assert len(whole.hidden_states) == len(plain.hidden_states)
        for ours, theirs in zip(whole.hidden_states, plain.hidden_states, strict=True):
            assert_close(ours[kept], theirs[kept])
        assert_close(parts.loss, plain.loss)
        assert parts.logits.shape[1] == 8


def from_logits(model: Any, batch: Batch) -> Tensor:
    """A loss with label smoothing over whole sequences, as in a loop that does not know of the split."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    wanted = batch["labels"][:, 1:].flatten()
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), wanted, ignore_index=IGNORED, label_smoothing=0.1)


def own_loss(model: Any, batch: Batch) -> Tensor:
    return model(**batch).loss


@sampled
@pytest.mark.parametrize("attention", ["ulysses", "ring"])
@pytest.mark.parametrize("loss_of", [from_logits, own_loss])
def test_losses_of_the_whole_are_trained(loss_of: Callable[[Any, Batch], Tensor], attention: str) -> None:
    data = labelled(2, tokens=15)
    twin = whole_run(built(), data, loss_of=loss_of)

    def work(engine: sw.Engine, model: Any) -> Run:
        engine.give_whole_outputs()
        run = Run()
        for batch in data:
            loss = loss_of(model, batch)
            engine.backward(loss)
            run.losses.append(loss.item())
            run.grads.append(own_grads(engine))
            run.norms.append(float(engine.step()))
        run.params = {name: value.clone() for name, value in engine.state_dict().items()}
        return run

    for run in on_ranks({"sp": 2}, work, attention):  # not only their mean
        assert_alike(run, twin)


def test_the_models_own_loss_leaves_logits_in_parts() -> None:
    (batch,) = labelled(1, tokens=16)

    def work(engine: sw.Engine, model: Any) -> Any:
        engine.give_whole_outputs()
        output = model(**batch)
        return output.logits.detach(), engine.join_sequence(output.logits).detach(), model(**batch, return_dict=False)

    with torch.no_grad():
        plain = built()(**batch)
    kept = batch["attention_mask"].bool()
    for part, whole, several in on_ranks({"sp": 2}, work):
        assert part.shape == (4, 8, VOCAB)
        assert_close(whole[kept], plain.logits[kept])
        assert_close(several[0].detach(), plain.loss)


def test_a_plan_taken_later_gives_wholes_too() -> None:
    (batch,) = labelled(1, tokens=16)

    def work(engine: sw.Engine, model: Any) -> Any:
        engine.give_whole_outputs()
        engine.reshard({"preset": "zero2", "mesh": {"sp": 2}})
        return model(**batch).loss.item()

    plain = built()(**batch).loss.item()
    assert on_ranks({"dp": 2}, work) == pytest.approx([plain, plain], abs=1e-5)


@sampled
@pytest.mark.parametrize("attention", ["ulysses", "ring"])
@pytest.mark.parametrize("mesh", [{"sp": 2}, {"dp": 2, "sp": 2}])
def test_own_models_join_by_hand(mesh: dict[str, int], attention: str) -> None:
    model, data = Gpt(), batches(2)

    def joined_loss(engine: Any, batch: Batch) -> Tensor:
        part = engine(batch["input_ids"], batch["position_ids"])
        first = engine.join_sequence(part.transpose(0, 1), dim=0).transpose(0, 1)
        logits, labels = engine.join_sequence(part), engine.join_sequence(batch["labels"], dim=-1)
        assert torch.equal(first, logits)
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    run = split_run(copy.deepcopy(model), data, "zero3", mesh, sequence={"attention": attention}, loss_of=joined_loss)
    assert_alike(run, whole_run(model, data))


def test_what_cannot_be_joined() -> None:
    (batch,) = labelled(1, tokens=16)

    def work(engine: sw.Engine, model: Any) -> str:
        with pytest.raises(StateError, match="there is none yet"):
            engine.join_sequence(torch.zeros(1, 8))
        with torch.no_grad():
            logits = model(**batch).logits
        for tensor, dim in ((logits, 0), (logits, 3), (torch.zeros(4, 16), 1)):
            with pytest.raises(ConfigError, match="this rank has 8 tokens"):
                engine.join_sequence(tensor, dim)
        with engine.inference():
            assert engine.join_sequence(batch["input_ids"]) is batch["input_ids"]
        return "done"

    assert on_ranks({"sp": 2}, work) == ["done", "done"]


def test_without_sp_nothing_changes() -> None:
    (batch,) = labelled(1, tokens=16)

    def work(engine: sw.Engine, model: Any) -> Any:
        engine.give_whole_outputs()
        share, num_shares = engine.data_ranks
        output = model(**chunked(batch, num_shares)[share])
        assert engine.join_sequence(output.logits) is output.logits
        return output.loss.item()

    twin = built()
    plain = [twin(**part).loss.item() for part in chunked(batch, 2)]
    assert on_ranks({"dp": 2}, work) == pytest.approx(plain, abs=1e-5)
