"""What a loop does with its part of a split sequence: what mixes tokens, or counts those of one rank, is refused."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sequences import assert_trains_as_whole, batches, split_run
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from twins import work_on_ranks

import shardwise as sw
from shardwise.errors import ModelError
from tests.models import Gpt

Tensor = torch.Tensor
Loss = Callable[[Tensor, Tensor], Any]


def log_probs(logits: Tensor, words: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, words[..., None]).squeeze(-1)


def entropy(logits: Tensor, words: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), words.flatten())


WRONG: dict[str, Loss] = {
    "slices": lambda logits, words: entropy(logits[:, :-1], words[:, 1:]),
    "an ellipsis": lambda logits, words: logits[..., :-1, :],
    "after other functions": lambda logits, words: (logits.float() / 0.7)[:, :-1],
    "narrow": lambda logits, words: logits.narrow(1, 0, 3),
    "labels rolled": lambda logits, words: entropy(logits, words.roll(-1, 1)),
    "labels padded": lambda logits, words: functional.pad(words[:, 1:], (0, 1), value=-100),
    "logits transposed": lambda logits, words: functional.cross_entropy(logits.mT[..., :-1], words[:, 1:]),
    "row by row": lambda logits, words: [
        entropy(a[None, :-1], b[None, 1:]) for a, b in zip(logits, words, strict=True)
    ],
    "sums by sample": lambda logits, words: log_probs(logits, words).sum(-1),
    "losses by sample": lambda logits, words: functional.cross_entropy(logits.mT, words, reduction="none").sum(1),
    "whole samples right": lambda logits, words: (logits.argmax(-1) == words).all(-1),
    "the last token": lambda logits, words: logits[:, -1],
    "the last counted token": lambda logits, words: logits[torch.arange(len(words)), (words > 0).sum(-1)],
    "a mean over tokens": lambda logits, words: logits.mean(dim=1),
    "neighbours": lambda logits, words: log_probs(logits, words).diff(dim=-1),
    "returns": lambda logits, words: log_probs(logits, words).flip(1).cumsum(1),
    "a product over tokens": lambda logits, words: logits.mT @ logits,
    "an equation over tokens": lambda logits, words: torch.einsum("btv,btw->bvw", logits, logits),
}
RIGHT: dict[str, Loss] = {
    "entropy": entropy,
    "transposed": lambda logits, words: functional.cross_entropy(logits.mT, words),
    "of each token": lambda logits, words: -log_probs(logits, words).mean(),
    "with more terms": lambda logits, words: entropy(logits, words) + 1e-2 * logits.logsumexp(-1).square().mean(),
    "changed in place": lambda logits, words: entropy(logits.div_(2.0), words),
    "of products": lambda logits, words: (
        entropy(logits, words) + 1e-3 * (logits @ torch.linspace(-1, 1, logits.shape[-1])).square().mean()
    ),
    "recomputed": lambda logits, words: checkpoint(entropy, logits, words, use_reentrant=False),
    "beside what is logged": lambda logits, words: (
        entropy(logits, words)
        + 0 * (logits.argmax(-1) == words).float().mean()
        + 0 * float(logits.detach().numpy()[0, 0, 0])
    ),
}


def token_losses(logits: Tensor, words: Tensor) -> Tensor:
    return functional.cross_entropy(logits.mT, words, reduction="none", ignore_index=-100)


OWN_MEANS: dict[str, Loss] = {
    "by the sum of a mask": lambda logits, words: (
        (token_losses(logits, words) * (words != -100)).sum() / (words != -100).sum()
    ),
    "by a float mask": lambda logits, words: (
        (token_losses(logits, words) * words.ne(-100).float()).sum() / words.ne(-100).float().sum().clamp(min=1.0)
    ),
    "by a number": lambda logits, words: token_losses(logits, words).sum() / (words != -100).sum().item(),
    "by an int": lambda logits, words: token_losses(logits, words).sum() / max(int((words >= 0).sum()), 1),
    "by a product": lambda logits, words: (
        token_losses(logits, words).sum() * (1.0 / torch.count_nonzero(words != -100))
    ),
    "in place": lambda logits, words: token_losses(logits, words).sum().div_((words != -100).sum() + 1e-6),
    "flat": lambda logits, words: token_losses(logits, words).view(-1).sum() / (words.view(-1) != -100).sum(),
    "of two masks": lambda logits, words: token_losses(logits, words).sum() / ((words != -100) & (words != 3)).sum(),
    "by weights": lambda logits, words: (
        (token_losses(logits, words) * (words.clamp(min=0) / 40)).sum() / (words.clamp(min=0) / 40).sum()
    ),
    "by weights of classes": lambda logits, words: (
        token_losses(logits, words).sum() / torch.linspace(1, 2, logits.shape[-1])[words.clamp(min=0)].sum()
    ),
    "entropy with weights": lambda logits, words: functional.cross_entropy(
        logits.mT, words, torch.linspace(1, 2, logits.shape[-1])
    ),
    "of what counts": lambda logits, words: token_losses(logits, words)[words != -100].mean(),
    "of what is selected": lambda logits, words: torch.masked_select(token_losses(logits, words), words != -100).mean(),
    "entropy of what counts": lambda logits, words: functional.cross_entropy(
        logits[words != -100], words[words != -100]
    ),
    "squares of what counts": lambda logits, words: functional.mse_loss(
        logits[words != -100][:, 0], torch.zeros(int(words.shape[0] and logits[words != -100].shape[0]))
    ),
}


def on_two(work: Callable[[sw.Engine], object], **more: Any) -> None:
    torch.manual_seed(0)
    model = Gpt()
    plan = {"preset": "zero1", "mesh": {"sp": 2}, **more}
    work_on_ranks(2, work, plan, model, None)


@pytest.mark.parametrize("attention", ["ulysses", "ring"])
def test_what_mixes_the_tokens_of_a_part_is_refused(attention: str) -> None:
    def work(engine: sw.Engine) -> None:
        (batch,) = batches(1)
        part = engine.split_sequence(batch)
        for wrong in WRONG.values():
            logits = engine(part["input_ids"], part["position_ids"])
            with pytest.raises(ModelError, match=r"mixes its tokens.*Shift labels before engine.split_sequence"):
                wrong(logits, part["labels"])
        whole = engine.join_sequence(engine(part["input_ids"], part["position_ids"]))
        entropy(whole[:, :-1], batch["labels"][:, :-1])

    on_two(work, sequence={"attention": attention})


@pytest.mark.parametrize("how", RIGHT)
def test_other_losses_train_as_on_whole_sequences(how: str) -> None:
    model, data = Gpt(), batches(2)

    def loss_of(model: Any, batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = RIGHT[how](model(batch["input_ids"], batch["position_ids"]), batch["labels"])
        return loss

    assert_trains_as_whole(model, data, "zero2", {"sp": 2}, loss_of=loss_of)


def test_a_mean_of_losses_is_refused_if_other_numbers_of_labels_count_on_the_ranks() -> None:
    def work(engine: sw.Engine) -> None:
        (batch,) = batches(1)
        for counted in (slice(3, None), slice(1, 16, 2)):
            labels = torch.full_like(batch["labels"], -100)
            labels[:, counted] = batch["labels"][:, counted]
            part = engine.split_sequence({**batch, "labels": labels})
            logits, words = engine(part["input_ids"], part["position_ids"]).flatten(0, 1), part["labels"].flatten()
            if counted.step:  # as many on each rank
                functional.cross_entropy(logits, words)
                continue
            told = r"the labels of this batch count 20, 32 of them .* engine.mean_over_tokens"
            for mean in (functional.cross_entropy, nn.CrossEntropyLoss(label_smoothing=0.1)):
                with pytest.raises(ModelError, match=told):
                    mean(logits, words)
            with pytest.raises(ModelError, match="count 20, 32"):
                functional.nll_loss(logits.log_softmax(-1), words)
            losses = functional.cross_entropy(logits, words, reduction="none")
            assert losses.isfinite().all()
            engine.mean_over_tokens(losses, words != -100)

    on_two(work, sequence={"attention": "ulysses"})


@pytest.mark.parametrize("attention", ["ulysses", "ring"])
def test_own_means_are_refused_if_other_numbers_of_tokens_count_on_the_ranks(attention: str) -> None:
    def work(engine: sw.Engine) -> None:
        (batch,) = batches(1)
        uneven, even = batch["labels"].clone(), batch["labels"].clone()
        uneven[:, 1:4], even[:, 2::4] = -100, -100
        even[:, 3::4] = -100
        for labels in (uneven, even):
            part = engine.split_sequence({**batch, "labels": labels})
            for name, mean in OWN_MEANS.items():
                logits = engine(part["input_ids"], part["position_ids"])
                if labels is even and "weights" not in name:
                    assert mean(logits, part["labels"]).isfinite()
                    continue
                with pytest.raises(ModelError, match=r"ranks along sp.*engine.mean_over_tokens"):
                    mean(logits, part["labels"])
        part = engine.split_sequence({**batch, "labels": uneven})
        words = part["labels"].masked_fill(part["labels"] == -100, 0)
        losses = token_losses(engine(part["input_ids"], part["position_ids"]), words)
        assert engine.mean_over_tokens(losses, part["labels"] != -100).isfinite()
        counted = (part["labels"] != -100).sum()
        expected = (uneven != -100).sum().item() / 2
        assert engine.mean(counted) == expected  # for a log, of which the engine knows that it is of all ranks
        assert engine.log({"tokens": counted})["tokens"] == expected

    on_two(work, sequence={"attention": attention})


def test_own_means_over_as_many_tokens_train_as_on_whole_sequences() -> None:
    model, data = Gpt(), batches(2)
    for batch in data:
        batch["labels"] = batch["labels"].clone()
        batch["labels"][:, ::2] = -100

    def loss_of(model: Any, batch: dict[str, Tensor]) -> Tensor:
        losses, mask = (
            token_losses(model(batch["input_ids"], batch["position_ids"]), batch["labels"]),
            batch["labels"] >= 0,
        )
        total: Tensor = (losses * mask).sum() / mask.sum().clamp(min=1) + losses[mask].mean()
        return total

    assert_trains_as_whole(model, data, "zero2", {"sp": 2}, loss_of=loss_of)


def test_copies_are_plain() -> None:
    def work(engine: sw.Engine) -> None:
        part = engine.split_sequence(batches(1)[0])
        logits = engine(part["input_ids"], part["position_ids"]).detach()
        file = io.BytesIO()
        torch.save({"logits": logits, **part}, file)
        file.seek(0)
        for one in (*torch.load(file).values(), copy.deepcopy(logits), engine.join_sequence(logits)):
            assert type(one) is Tensor

    on_two(work)


class Heads(nn.Module):
    """Works along heads, of which there are as many as a rank has tokens."""

    def __init__(self, *, mixes: bool) -> None:
        super().__init__()
        self.qkv, self.out, self.mixes = nn.Linear(16, 48), nn.Linear(16, 16), mixes

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        query = torch.cat([query[:, :2], query[:, 2:] / 2], 1)
        key = functional.normalize(key, dim=1)
        value = value - value.mean(1, keepdim=True)
        heads = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = x + self.out(heads.transpose(1, 2).flatten(2))
        return out - out.mean(1, keepdim=True) if self.mixes else out


class Headed(nn.Module):
    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Heads(**how) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            # torch 2.11's checkpoint leaves its hooks to whichever thread frees the error that a forward has raised
            x = block(x) if block.mixes else checkpoint(block, x, use_reentrant=False)
        return x


@pytest.mark.parametrize("preset", ["zero1", "zero3"])
@pytest.mark.parametrize("attention", ["ulysses", "ring"])
def test_what_is_as_many_as_tokens_is_told_from_them(preset: str, attention: str) -> None:
    model, data = Headed(mixes=False), [{"x": torch.randn(4, 8, 16)} for _ in range(2)]

    def loss_of(model: Any, batch: dict[str, Tensor]) -> Tensor:
        return model(batch["x"]).square().mean()  # type: ignore[no-any-return]

    assert_trains_as_whole(model, data, preset, {"sp": 2}, loss_of=loss_of, sequence={"attention": attention})
    with pytest.raises(ModelError, match=r"calls mean on a tensor of shape .* mixes its tokens"):
        split_run(Headed(mixes=True), data, preset, {"sp": 2}, loss_of=loss_of, sequence={"attention": attention})
