"""Batches split for ranks that share sequences, losses over unequal shares, and what is refused."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from sequences import TOKENS, assert_trains_as_whole, batches, counted_loss
from torch import nn
from torch.nn import functional
from twins import work_on_ranks

import shardwise as sw
from shardwise.data import Loader
from shardwise.errors import ConfigError, DataError, ModelError, ShardwiseError, StateError
from shardwise.parallel.sequence.parallel import _random_numbers_of
from shardwise.testing import run_ranks
from tests.models import VOCAB, Gpt, Transformer
from tests.thorough import sampled

pytestmark = sampled

Tensor = torch.Tensor
PLAN: dict[str, Any] = {"preset": "zero3", "mesh": {"sp": 2}}


def on_two(work: Callable[[sw.Engine], Any], build: Callable[[], nn.Module] = Gpt, **more: Any) -> list[Any]:
    """What `work` returns on each of two ranks that share sequences."""
    return work_on_ranks(2, work, {**PLAN, **more}, build, None)


@pytest.mark.parametrize("attention", ["ulysses", "ring"])
@pytest.mark.parametrize("tokens", [TOKENS, TOKENS - 3])
def test_the_loss_counts_tokens_once(attention: str, tokens: int) -> None:
    """The labels that do not count are mostly on one rank, and a sequence that does not divide evenly is padded."""
    model, data = Gpt(), batches(2, tokens=tokens)
    for batch in data:
        batch["labels"] = batch["labels"].clone()
        batch["labels"][:, 1:7] = -100
    assert_trains_as_whole(model, data, "zero2", {"sp": 2}, sequence={"attention": attention}, loss_of=counted_loss)


def test_without_an_axis_sp_nothing_is_cut() -> None:
    def rank(world: sw.World) -> None:
        with sw.shard(Gpt(), {"preset": "zero3", "mesh": {"dp": 2, "sp": 1}}, world=world) as engine:
            batch = batches(1)[0]
            assert engine.split_sequence(batch) is batch
            assert engine.data_ranks == (world.rank, 2)
            assert engine.mean_over_tokens(torch.tensor([1.0, 2.0, 6.0])) == 3
            assert engine.mean_over_tokens(torch.tensor([1.0, 2.0, 6.0]), torch.tensor([True, False, True])) == 3.5
            with pytest.raises(ConfigError, match="documents= is for plans that split sequences"):
                engine.split_sequence(batch, documents=torch.zeros(4, TOKENS, dtype=torch.long))

    run_ranks(2, rank)


@pytest.mark.parametrize(
    ("attention", "order"), [("ulysses", [0, 1, 2, 3, 4, 5, 6, 7]), ("ring", [0, 1, 6, 7, 2, 3, 4, 5])]
)
def test_what_each_rank_gets(attention: str, order: list[int]) -> None:
    tokens, per_row = torch.arange(16).view(2, 8), torch.tensor([5, 6])

    def work(engine: sw.Engine) -> list[Tensor]:
        alone = engine.split_sequence(tokens)
        pair = engine.split_sequence((tokens, tokens + 100))
        assert isinstance(pair, tuple)
        named = engine.split_sequence({"input_ids": tokens, "rows": per_row, "name": "x", "labels": tokens})
        assert torch.equal(pair[1], alone + 100)
        assert torch.equal(named["input_ids"], alone)
        assert torch.equal(named["labels"], alone)
        assert (named["rows"] is per_row, named["name"]) == (True, "x")
        padded = engine.split_sequence({"input_ids": tokens[:, :5], "labels": tokens[:, :5]})
        return [alone, padded["labels"]]

    parts = on_two(work, sequence={"attention": attention})
    assert torch.cat([alone[0] for alone, _ in parts]).tolist() == order
    together = torch.cat([labels for _, labels in parts], 1)
    assert sorted(together[0].tolist()) == [-100] * (3 if attention == "ring" else 1) + [0, 1, 2, 3, 4]


def test_documents_of_an_own_model() -> None:
    """Two documents in one row give the same results as each alone."""
    model = Gpt()
    tokens = torch.randint(0, VOCAB, (1, TOKENS))
    positions = torch.cat([torch.arange(6), torch.arange(TOKENS - 6)])[None]
    documents = torch.tensor([[0] * 6 + [1] * (TOKENS - 6)])
    with torch.no_grad():
        parts = [model(tokens[:, at], positions[:, at]) for at in (slice(0, 6), slice(6, TOKENS))]

    def work(engine: sw.Engine) -> Tensor:
        batch = tokens, positions
        with torch.no_grad():
            return engine(*engine.split_sequence(batch, documents=documents))

    outputs = on_two(work, lambda: copy.deepcopy(model))
    torch.testing.assert_close(torch.cat(outputs, 1), torch.cat(parts, 1), rtol=1e-5, atol=1e-5)


def test_positions_of_an_own_model_say_nothing_of_documents() -> None:
    """Such a model decides by itself what its attention sees."""
    model, batch = seeded(Gpt), batches(1, rows=2)[0]
    batch["position_ids"] = torch.cat([torch.arange(6), torch.arange(TOKENS - 6)]).expand(2, -1)
    with torch.no_grad():
        expected = model(batch["input_ids"], batch["position_ids"])

    def work(engine: sw.Engine) -> Tensor:
        mine = engine.split_sequence(batch)
        with torch.no_grad():
            return engine(mine["input_ids"], mine["position_ids"])

    torch.testing.assert_close(torch.cat(on_two(work, lambda: seeded(Gpt)), 1), expected, rtol=1e-5, atol=1e-5)


def test_a_loader_deals_by_data_axes() -> None:
    """Ranks that share sequences read the same rows, and the others read other rows."""

    def rank(world: sw.World) -> list[int]:
        with sw.shard(Gpt(), {"preset": "zero1", "mesh": {"dp": 2, "sp": 2}}, world=world) as engine:
            loader = Loader(range(8), batch_rows=4, world=engine.data_ranks)
            return next(iter(loader)).tolist()

    first, second, third, fourth = run_ranks(4, rank)
    assert first == second != third == fourth
    assert len({*first, *third}) == 4


def test_ranks_with_other_samples_are_told() -> None:
    def work(engine: sw.Engine) -> None:
        batch = batches(1, seed=engine.world.rank)[0]
        with pytest.raises(DataError) as caught:
            engine.split_sequence(batch)
        assert str(caught.value) == (
            "Ranks 0 and 1 share each sample along the mesh axis 'sp', but were given different batches: input_ids, "
            "labels differ. Deal batches by data axes: sw.data.Loader(..., world=engine.data_ranks), or in a loop of "
            "your own by engine.data_ranks, which is (place, number)."
        )

    on_two(work)


class Positions(nn.Module):
    """Numbers its tokens by itself, in one of four ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.linear = nn.Linear(8, 8)
        self.rows = nn.Parameter(torch.zeros(TOKENS, 8))
        self.register_buffer("kept", torch.zeros(1, TOKENS, 8))
        self.angles = torch.zeros(TOKENS, 8)

    def forward(self, x: Tensor) -> Tensor:
        num_tokens = x.shape[1]
        if self.how == "arange":
            x = x + functional.embedding(torch.arange(num_tokens, device=x.device), self.rows)
        elif self.how == "parameter":
            x = x + self.rows[:num_tokens]
        elif self.how == "angles":
            x = x + self.angles[:num_tokens]
        else:
            x = x + self.kept[:, :num_tokens]
        heads = self.linear(x)[:, None]
        return functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)


@pytest.mark.parametrize(
    ("how", "said"),
    [("arange", "torch.arange"), *((how, "rows of a table") for how in ("parameter", "buffer", "angles"))],
)
def test_a_model_that_numbers_its_tokens_is_told(how: str, said: str) -> None:
    def work(engine: sw.Engine) -> None:
        with pytest.raises(ModelError, match=f"numbers its tokens by itself .*{said}.*position_ids"):
            engine(engine.split_sequence(torch.ones(2, TOKENS, 8)))

    on_two(work, lambda: Positions(how), sequence={"attention": "ring"})
    with pytest.raises(ModelError, match="numbers its tokens by itself"):
        on_two(lambda engine: engine(*engine.split_sequence(2 * (torch.zeros(2, 6, dtype=torch.long),))), Transformer)


MIXED: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: x.mean(1),
    "greatest": lambda x: x.amax(dim=1),
    "the first": lambda x: x[:, 0],
    "the last": lambda x: x[:, -1],
    "but the last": lambda x: x[:, :-1],
    "a sum so far": lambda x: torch.cumsum(x, 1),
    "shifted": lambda x: functional.pad(x, (0, 0, 1, -1)),
    "rolled": lambda x: x.roll(1, 1),
    "behind another": lambda x: torch.cat([x.new_zeros(2, 1, 8), x], 1),
    "neighbours": lambda x: functional.conv1d(functional.pad(x.transpose(1, 2), (2, 0)), torch.ones(8, 1, 3), groups=8),
    "normalized": lambda x: functional.normalize(x),
    "lengths": lambda x: (x > 0).any(-1).sum(1),
    "weights of attention": lambda x: (x[:, None] @ x[:, None].mT).softmax(-1),
    "halves": lambda x: x.chunk(2, dim=1)[0],
    "a product": lambda x: x.mT @ x,
    "products of samples": lambda x: torch.bmm(x.mT, x),
    "an equation": lambda x: torch.einsum("b t d, b t e -> b d e", x, x),
    "an equation without a result": lambda x: torch.einsum("...td,t", x, torch.ones(x.shape[1])),
    "attention without softmax": lambda x: torch.sigmoid(x @ x.mT) @ x,
}
UNMIXED: dict[str, Callable[[Tensor], Tensor]] = {
    "features": lambda x: x.mean(-1),
    "samples": lambda x: x.mean(0),
    "all": lambda x: x.square().mean(),
    "each": lambda x: x[:, :, 0] + x[..., 1] + x[:, None, :, 2].squeeze(1) + x[:, 0:, 3],
    "masked": lambda x: x[(x > 0).any(-1)],
    "features joined": lambda x: torch.cat([x, x], -1),
    "of samples": lambda x: x.new_zeros(2, 4).sum(1),  # features, not tokens
    "a product of features": lambda x: x @ torch.ones(8, 3) + x.matmul(torch.ones(8))[..., None],
    "of as many features as tokens": lambda x: x[..., :4] @ torch.ones(4, 4),
    "an equation of as many features": lambda x: torch.einsum("btd,de->bte", x[..., :4], torch.ones(4, 2)),
}


@pytest.mark.parametrize("how", [*MIXED, *UNMIXED])
def test_tokens_that_are_mixed_outside_of_attention_are_told(how: str) -> None:
    def compute(x: Tensor) -> Tensor:
        flat = x.transpose(1, 2).flatten(2)
        {**MIXED, **UNMIXED}[how](flat)
        return sdpa(x, x, x, is_causal=True)

    def work(engine: sw.Engine) -> None:
        told = pytest.raises(ModelError, match="mixes its tokens, of which each rank of a split sequence has a part")
        with told if how in MIXED else nullcontext():
            engine(engine.split_sequence(torch.ones(2, 8, 8)))

    on_two(work, lambda: Attends(compute))


NUMBERED: dict[str, Callable[[Tensor], Tensor]] = {
    "the logarithm of the length": lambda x: x * math.log(x.shape[1] + 1),
    "its root": lambda x: x / x.shape[1] ** 0.5,
}


def scaled(x: Tensor) -> Tensor:
    if x.requires_grad:
        x.register_hook(lambda grad: grad / (1 + grad.norm()))
    return x


FLATTENED: dict[str, Callable[[Tensor], Tensor]] = {
    "a mean of samples and tokens": lambda x: x - x.flatten(0, 1).mean(0),
    "an order of them": lambda x: x + x.flatten(0, 1).norm(dim=-1).argsort().view(x.shape[:2])[..., None],
    "a gradient scaled by the norm of all": scaled,
}


UNNUMBERED: dict[str, Callable[[Tensor], Tensor]] = {
    "a mean by hand": lambda x: (x, x.square().sum() / x.numel())[0],
    "the root of features": lambda x: x / x.shape[2] ** 0.5,
    "each of samples and tokens": lambda x: x.flatten(0, 1).softmax(-1).view_as(x),
}


@pytest.mark.parametrize("how", [*NUMBERED, *FLATTENED, *UNNUMBERED])
@pytest.mark.parametrize("training", [True, False])
def test_a_model_that_computes_with_the_number_of_its_tokens_is_told(how: str, training: bool) -> None:
    def compute(x: Tensor) -> Tensor:
        changed = {**NUMBERED, **FLATTENED, **UNNUMBERED}[how](x.transpose(1, 2).flatten(2))
        return sdpa(x, x, changed.unflatten(-1, (2, 4)).transpose(1, 2), is_causal=True)

    def work(engine: sw.Engine) -> None:
        engine.module.train(training)
        said = "with a number that depends on how many tokens there are|mixes its tokens"
        with nullcontext() if how in UNNUMBERED else pytest.raises(ModelError, match=said):
            engine(engine.split_sequence(torch.ones(2, 8, 8)))

    on_two(work, lambda: Attends(compute))


@pytest.mark.parametrize("called", [lambda engine: engine, lambda engine: engine.module], ids=["engine", "model"])
def test_tokens_that_a_module_of_torch_mixes_are_told_whoever_calls_the_model(called: Callable[[Any], Any]) -> None:
    """There is nothing but torch's code between the call of the model and the function that mixes."""

    def build() -> nn.Module:
        return nn.Sequential(Attends(lambda x: sdpa(x, x, x).transpose(1, 2).flatten(2)), nn.Softmax(dim=1))

    def work(engine: sw.Engine) -> None:
        with pytest.raises(ModelError, match=r"calls softmax on a tensor of shape \[2, 4, 8\] and mixes its tokens"):
            called(engine)(engine.split_sequence(torch.ones(2, 8, 8)))

    on_two(work, build)


class Attends(nn.Module):
    """Calls attention in the given way."""

    def __init__(self, attend: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.attend = attend

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(self.linear(x).unflatten(-1, (2, 4)).transpose(1, 2))


def sdpa(*args: Any, **kwargs: Any) -> Tensor:
    return functional.scaled_dot_product_attention(*args, **kwargs)


REFUSED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "mask": (lambda x: sdpa(x, x, x, attn_mask=torch.ones(8, 8)), r"a mask of shape \[8, 8\]"),
    "dims": (lambda x: sdpa(x[:, 0], x[:, 0], x[:, 0]), r"takes \[batch, heads, tokens, dim\]"),
    "lengths": (lambda x: sdpa(x, x[:, :, :4], x[:, :, :4]), "Attention of 8 queries to 4 keys"),
    "heads": (lambda x: sdpa(x, x[:, :1], x[:, :1]), "2 heads of queries and 1 of keys without enable_gqa"),
    "none": (lambda x: x * 2, "without any attention that could be split"),
    "by hand": (
        lambda x: (x @ x.transpose(-1, -2)).softmax(-1) @ x,
        r"calls matmul on a tensor of shape \[2, 2, 8, 4\], \[2, 2, 4, 8\] and mixes its tokens",
    ),
    "dtypes": (lambda x: sdpa(x, x.double(), x), "torch.float32 and torch.float64; make them one"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_attention_that_cannot_be_split_is_refused(what: str) -> None:
    attend, message = REFUSED[what]

    def work(engine: sw.Engine) -> None:
        with pytest.raises(ModelError, match=message):
            engine(engine.split_sequence(torch.ones(2, TOKENS, 8)))

    on_two(work, lambda: Attends(attend))


def test_a_batch_that_was_not_split_is_told() -> None:
    def work(engine: sw.Engine) -> None:
        batch = batches(1)[0]
        with pytest.raises(StateError, match=r"Call batch = engine\.split_sequence\(batch\) before the forward"):
            engine(batch["input_ids"], batch["position_ids"])
        engine.split_sequence(batch)
        with pytest.raises(ModelError, match=r"of 16 queries to 16 keys, but engine\.split_sequence gave this rank 8"):
            engine(batch["input_ids"], batch["position_ids"])

    on_two(work)


ODD: dict[str, tuple[Any, str]] = {
    "length": (torch.zeros(2, 7), "7 tokens do not divide into 2 parts for the 2 ranks of axis 'sp'"),
    "kind": (3, "takes a tensor .* not a int"),
    "rows": ((torch.zeros(2, 8), torch.zeros(2)), "has 8 tokens in the first and not in tensor 1"),
    "no tokens": ({"rows": torch.zeros(3)}, "found no tensor"),
    "mask": ({"input_ids": torch.zeros(2, 8), "attention_mask": torch.zeros(2, 1, 8, 8)}, r"attention_mask is \[2, 1"),
    "positions": ({"input_ids": torch.zeros(2, 8), "position_ids": torch.zeros(3, 2, 8)}, r"position_ids is \[3, 2, 8"),
    "unknown": ({"input_ids": torch.zeros(2, 7), "x": torch.zeros(2, 7)}, "the padding for x is not known"),
}


def test_batches_that_cannot_be_cut_are_refused() -> None:
    def work(engine: sw.Engine) -> None:
        for batch, message in ODD.values():
            with pytest.raises(ConfigError, match=message):
                engine.split_sequence(batch)
        with pytest.raises(ConfigError, match=r"documents is torch.float32 \[2, 8\]"):
            engine.split_sequence(torch.zeros(2, 8), documents=torch.zeros(2, 8))

    on_two(work)


def test_models_that_cannot_be_split_are_refused_and_left_as_they_were() -> None:
    models: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
        "0 .MultiheadAttention. does not go through": (lambda: nn.Sequential(nn.MultiheadAttention(8, 2)), {}),
        "0 is a LSTM, which reads neighbouring tokens": (lambda: nn.Sequential(nn.LSTM(8, 8)), {}),
        "1 is a Conv1d": (lambda: nn.Sequential(nn.Conv1d(8, 8, 1), nn.Conv1d(8, 8, 3)), {}),
        "compiles with 'eager' and splits sequences": (Gpt, {"compile": "eager"}),
    }
    for message, (build, more) in models.items():
        replicas = [build() for _ in range(2)]
        kept = copy.deepcopy(replicas[0].state_dict())
        with pytest.raises(ShardwiseError, match=message):
            run_ranks(2, lambda world: sw.shard(replicas[world.rank], {**PLAN, **more}, world=world))  # noqa: B023
        assert all(torch.equal(value, kept[name]) for name, value in replicas[0].state_dict().items())
        assert not any(module._forward_pre_hooks for module in replicas[0].modules())


def test_ring_attention_has_no_dropout() -> None:
    def work(engine: sw.Engine) -> None:
        with pytest.raises(ModelError, match=r"Ring attention has no dropout, and this model asks for 0.5"):
            engine(engine.split_sequence(torch.ones(2, TOKENS, 8)))

    on_two(work, lambda: Attends(lambda x: sdpa(x, x, x, dropout_p=0.5)), sequence={"attention": "ring"})


def test_ranks_that_are_seeded_alike_drop_other_tokens() -> None:
    """Afterwards their own generators agree again: each has advanced by one number."""
    drawn, left = [], []
    for place in (0, 1, 1):
        torch.manual_seed(7)
        with _random_numbers_of(place, torch.device("cpu")):
            drawn.append(torch.rand(8))
        left.append(torch.rand(4))
    assert not torch.equal(drawn[0], drawn[1])
    assert torch.equal(drawn[1], drawn[2])
    assert torch.equal(left[0], left[1])


def test_what_is_recomputed_is_of_its_own_batch() -> None:
    """Each batch has its own documents, not those of the batch that was split last. A backward of both is refused."""
    one, other = (torch.tensor([[0] * cut + [1] * (TOKENS - cut)]) for cut in (3, 9))

    def work(engine: sw.Engine) -> None:
        batch = batches(1, rows=1)[0]
        tensors = batch["input_ids"], batch["position_ids"]

        def loss(documents: torch.Tensor) -> torch.Tensor:
            return engine(*engine.split_sequence(tensors, documents=documents)).square().sum()

        def grads() -> dict[str, torch.Tensor]:
            found = {name: engine.get(name, "grad") for name, _ in engine.module.named_parameters()}
            engine.zero_grad()
            return {name: grad for name, grad in found.items() if grad is not None}

        expected = []
        for documents in (one, other):
            loss(documents).backward()
            expected.append(grads())
        first, second = loss(one), loss(other)
        first.backward()
        third = loss(one)
        first_grads = grads()
        second.backward()
        second_grads = grads()
        third.backward()
        for found, known in ((first_grads, expected[0]), (second_grads, expected[1]), (grads(), expected[0])):
            for name, grad in known.items():
                torch.testing.assert_close(found[name], grad, msg=name)
        with pytest.raises(StateError, match="it is unknown which of them it belongs to"):
            (loss(one) + loss(other)).backward()

    on_two(work, lambda: Gpt(recomputes=True))


def test_batches_may_be_split_before_others_are_computed() -> None:
    """The tensors that the model is called with identify the batch. Others work only if batches do not differ."""
    one, other = (torch.tensor([[0] * cut + [1] * (TOKENS - cut)]) for cut in (3, 9))

    def work(engine: sw.Engine) -> None:
        batch = batches(1, rows=1)[0]
        tensors = batch["input_ids"], batch["position_ids"]
        with torch.no_grad():
            alone = [engine(*engine.split_sequence(tensors, documents=documents)) for documents in (one, other)]
            split = [engine.split_sequence(tensors, documents=documents) for documents in (one, other)]
            for expected, (tokens, positions) in zip(alone, split, strict=True):
                assert torch.equal(engine(tokens, positions), expected)
            assert not torch.equal(*alone)
            with pytest.raises(StateError, match=r"tensors that engine\.split_sequence has not returned"):
                engine(tokens.clone(), positions.clone())
            del split, tokens, positions
            tokens, positions = engine.split_sequence(tensors, documents=other)
            assert torch.equal(engine(tokens.clone(), positions.clone()), alone[1])

    on_two(work, lambda: seeded(Gpt))


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build()


def test_after_close_and_reshard_the_model_computes_by_itself() -> None:
    model, batch = Gpt(), batches(1)[0]
    expected = model(batch["input_ids"], batch["position_ids"])

    def work(engine: sw.Engine) -> None:
        mine = engine.split_sequence(batch)
        part = engine(mine["input_ids"], mine["position_ids"])
        engine.reshard({"preset": "zero3", "mesh": {"dp": 2}})
        whole = engine(batch["input_ids"], batch["position_ids"])
        torch.testing.assert_close(whole, expected, rtol=1e-5, atol=1e-5)
        engine.reshard({"preset": "zero1", "mesh": {"sp": 2}})
        mine = engine.split_sequence(batch)
        torch.testing.assert_close(engine(mine["input_ids"], mine["position_ids"]), part, rtol=1e-5, atol=1e-5)

    work_on_ranks(2, work, PLAN, model, None)
