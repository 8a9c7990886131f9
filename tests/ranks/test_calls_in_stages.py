"""What calls of a model in pipeline stages return, and which of them are split along the samples."""

from __future__ import annotations

import copy
import math
from collections import namedtuple
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from pipelined import batches
from test_pipeline_loops import looped, plainly
from torch import nn
from twins import adamw, assert_alike, work_on_ranks

import shardwise as sw
from shardwise.errors import ConfigError, ModelError
from shardwise.runtime.rehearsal import Twin
from shardwise.testing import run_ranks
from tests.models import LENGTH, VOCAB, WIDTH, Decoder
from tests.thorough import sampled

Tensor = torch.Tensor


class Named(NamedTuple):
    logits: Tensor
    hidden: list[Any]


@dataclass(frozen=True)
class Outputs:
    logits: Tensor
    inner: Any
    text: str = "x"


class Returning(Decoder):
    """Returns its logits and what comes before them in a class of its own."""

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        hidden = self.tokens(x)
        for block in self.blocks:
            hidden = block(hidden)
        return Outputs(self.head(self.norm(hidden)), {"named": Named(hidden, [hidden * 2, 3])})


def test_calls_return_namedtuples_and_dataclasses() -> None:
    model, data = Returning(), batches(2, 8)

    def loss_of(model: Any, x: Tensor, y: Tensor) -> Tensor:
        output = model(x)
        assert type(output) is Outputs
        assert type(output.inner["named"]) is Named
        assert (output.text, output.inner["named"].hidden[1]) == ("x", 3)
        logits, named = output.logits.flatten(0, 1), output.inner["named"]
        return F.cross_entropy(logits, y.flatten()) + named.logits.square().mean() + named.hidden[0].mean()

    for told in looped(model, {"preset": "zero1", "mesh": {"pp": 2}}, data, loss_of):
        assert_alike(told, plainly(model, data, loss_of), rtol=1e-4, of_all=False)


class Unfound(Decoder):
    """Returns a class that only its forward knows."""

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        local = namedtuple("local", ["logits"])
        return local(super().forward(x))


def test_a_class_that_other_ranks_cannot_find_is_refused() -> None:
    ((x, _),) = batches(1, 8)

    def work(engine: sw.Engine) -> None:
        with pytest.raises(ModelError, match=r"Unfound returns a local, a class that other ranks cannot find"):
            engine(x)

    work_on_ranks(2, work, {"preset": "zero1", "mesh": {"pp": 2}}, Unfound, None)


class Pulled(torch.autograd.Function):
    """A tensor as it is, of which the backward pulls the mean of squares towards zero, as router losses do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad + 0.1 * x / x.numel()


class Centred(torch.autograd.Function):
    """A tensor as it is, of which the backward takes the mean over samples out."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad - 0.5 * grad.mean(0, keepdim=True)


class Product(torch.autograd.Function):
    """A linear layer, of which the gradients of weight and bias are sums over samples."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.mT + bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.flatten(0, 1).mT @ x.flatten(0, 1), grad.sum((0, 1))


class Mixing(nn.Module):
    """A block that mixes the samples of its batch, counts them, or keeps what it has seen of earlier ones."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(WIDTH, WIDTH), how
        self.register_buffer("seen", torch.zeros(WIDTH))
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.linear(x)
        pooled = x.mean(1)
        if self.how == "mean":
            return x - 0.5 * x.mean(0, keepdim=True)
        if self.how == "negatives":
            return x + ((pooled @ pooled.T).softmax(-1) @ pooled)[:, None]
        if self.how == "batch norm":
            # Without x, the bias's gradient would be nothing but rounding, of which Adam makes whole steps.
            return x + F.batch_norm(x.mT, None, None, training=True).mT
        if self.how == "spread":
            return x * (1 + x.std(dim=0).mean())
        if self.how == "divided":
            x = x * (1 + 0.5 / len(x))
        if self.how == "divided by a tensor":
            x = x / (1 + 1 / torch.tensor(float(x.shape[0])))
        if self.how == "divided by several":
            x = x / torch.full((WIDTH,), 1 + len(x))
        if self.how == "numbered":
            x = x + torch.linspace(0, 1, len(x))[:, None, None]
        if self.how == "numbered by rows":
            x = x + torch.eye(64)[: len(x), None, :WIDTH]
        if self.how == "features numbered":
            x = x + torch.linspace(0, 1, WIDTH) * torch.ones(len(x), 1, 1)
        if self.how == "backward by number":
            x = Pulled.apply(x)
        if self.how == "backward by mean":
            x = Centred.apply(x)
        if self.how == "own product":
            x = x + Product.apply(x, self.linear.weight, self.linear.bias)
        if self.how == "scaled gradients" and x.requires_grad:
            x.register_hook(lambda grad: grad / (1 + grad.norm()))
        if self.how == "hook" and x.requires_grad:
            x.register_hook(lambda grad: grad * (1 + 1 / len(grad)))
        if self.how == "written":
            self.seen.mul_(0.5).add_(x.detach().mean((0, 1)))
        if self.how == "assigned":
            self.seen = 0.5 * self.seen + x.detach().mean((0, 1))
        if self.how == "counted":
            self.num_calls += 1
        return (x - self.seen) / max(self.num_calls, 1)


OF_SAMPLES = ("mean", "negatives", "batch norm", "spread", "written", "assigned", "counted")
BY_NUMBER = ("divided", "divided by a tensor", "divided by several", "numbered", "numbered by rows")
IN_BACKWARDS = ("backward by number", "backward by mean", "hook", "scaled gradients")
APART = ("nothing", "own product", "features numbered")


@sampled
@pytest.mark.parametrize("how", [*OF_SAMPLES, *BY_NUMBER, *IN_BACKWARDS, *APART])
@pytest.mark.parametrize("is_chain", [False, True])
def test_a_call_is_not_split_if_blocks_mix_samples(how: str, is_chain: bool, caplog: pytest.LogCaptureFixture) -> None:
    if is_chain:
        chain = [nn.Embedding(VOCAB, WIDTH), *(Mixing(how) for _ in range(3)), nn.Linear(WIDTH, VOCAB)]
        model: nn.Module = nn.Sequential(*chain)
    else:
        model = Decoder(block=lambda *_: Mixing(how))
    data = batches(2, 8)

    def loss_of(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten())

    for told in looped(model, {"preset": "zero1", "mesh": {"pp": 2}}, data, loss_of):
        assert_alike(told, plainly(model, data, loss_of), rtol=1e-4, of_all=False)
    assert ("because blocks mix them" in caplog.text) == (how not in APART)


def test_a_call_is_surveyed_once_on_one_copy_of_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """What shows whether blocks mix samples shows what later stages read. The last stage is surveyed in two parts."""
    surveyed: list[nn.Module] = []
    make = Twin.__init__

    def noted(twin: Twin, model: nn.Module, *others: Any) -> None:
        surveyed.append(model)
        make(twin, model, *others)

    monkeypatch.setattr(Twin, "__init__", noted)

    def loss_of(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten())

    looped(Decoder(), {"preset": "zero1", "mesh": {"pp": 2}}, batches(2, 8), loss_of)
    assert len(surveyed) == len(set(surveyed)) == 2


class Skipping(Decoder):
    """Adds what the first of its modules has returned behind the last block."""

    def forward(self, x: Tensor) -> Tensor:
        early = hidden = self.tokens(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden + early))


def test_each_part_of_a_call_has_what_later_stages_read() -> None:
    model, data = Skipping(), batches(2, 8)

    def loss_of(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten())

    for told in looped(model, {"preset": "zero1", "mesh": {"pp": 2}}, data, loss_of):
        assert_alike(told, plainly(model, data, loss_of), rtol=1e-4, of_all=False)


class Masked(Decoder):
    """Takes a mask of tokens by tokens, the same for all samples, and one of samples by tokens."""

    def forward(self, x: Tensor, mask: Tensor, kept: Tensor) -> Tensor:
        hidden = self.tokens(x) * kept[..., None]
        for block in self.blocks:
            hidden = block(mask.softmax(-1) @ hidden)
        return self.head(self.norm(hidden))


def test_a_mask_with_as_many_rows_as_there_are_samples_stays_whole(caplog: pytest.LogCaptureFixture) -> None:
    model, data = Masked(), batches(2, LENGTH)

    def loss_of(model: Any, x: Tensor, y: Tensor) -> Tensor:
        mask = torch.linspace(-1, 1, LENGTH * LENGTH).view(LENGTH, LENGTH)
        return F.cross_entropy(model(x, mask=mask, kept=(x > 3).float()).flatten(0, 1), y.flatten())

    for told in looped(model, {"preset": "zero1", "mesh": {"pp": 2}}, data, loss_of):
        assert_alike(told, plainly(model, data, loss_of), rtol=1e-4, of_all=False)
    assert f"mask, [{LENGTH}, {LENGTH}], is that of all samples" in caplog.text


class Nodes(Decoder):
    """Its rows are no samples, but nodes of a graph."""

    def forward(self, x: Tensor, near: Tensor) -> Tensor:
        hidden = self.tokens(x)
        for block in self.blocks:
            hidden = block(near @ hidden)
        return self.head(self.norm(hidden))


def test_a_call_that_needs_as_many_rows_as_it_has_stays_whole(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model, data = Nodes(block=lambda *_: nn.Linear(WIDTH, WIDTH)), batches(2, 8)

    def loss_of(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x[:, 0], torch.linspace(-1, 1, 64).view(8, 8)), y[:, 0])

    for told in looped(model, {"preset": "zero1", "mesh": {"pp": 2}}, data, loss_of):
        assert_alike(told, plainly(model, data, loss_of), rtol=1e-4, of_all=False)
    assert "with another number of them the call fails" in caplog.text


@pytest.mark.parametrize("mesh", [{"pp": 2}, {"dp": 1}], ids=str)
def test_a_mask_that_micro_batches_would_cut_is_refused(mesh: dict[str, int]) -> None:
    """A mask of samples by tokens of the same shape is cut."""
    ((x, y),) = batches(1, LENGTH)
    models = [Masked() for _ in range(2)]
    mask, kept = torch.zeros(LENGTH, LENGTH), torch.ones(LENGTH, LENGTH)

    def rank(world: sw.World) -> None:
        model = models[world.rank]
        plan = {"preset": "zero1", "mesh": mesh, "accumulate": 2}
        with sw.shard(model, plan, optimizer=adamw(model), world=world) as engine:
            loss_fn = lambda logits, words: F.cross_entropy(logits.flatten(0, 1), words.flatten())  # noqa: E731
            with pytest.raises(
                ConfigError, match=r"mask, \[6, 6\], has as many rows as the batch has samples.* a list"
            ):
                engine.train_step((x, mask, kept), y, loss_fn=loss_fn)
            parts = [(rows, mask, kept[:3]) for rows in x.chunk(2)]
            engine.train_step(parts, list(y.chunk(2)), loss_fn=loss_fn)

    run_ranks(math.prod(mesh.values()), rank)


@sampled
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=lambda mode: mode.__name__)
@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("preset", ["zero1", "zero3"])
def test_an_evaluation_without_gradients(preset: str, is_first: bool, mode: Any) -> None:
    torch.manual_seed(0)
    plain, ((x, y),) = Decoder(), batches(1, 8)
    models = [copy.deepcopy(plain) for _ in range(2)]

    def train(model: Any, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        found = []
        for step in range(2):
            if step or not is_first:
                model(x, y).backward()
                optimizer.step()
                optimizer.zero_grad()
            model.eval()
            with mode():
                found.append(model(x).clone())
            model.train()
        return found

    def rank(world: sw.World) -> list[Tensor]:
        model = models[world.rank]
        optimizer = adamw(model)
        with sw.shard(model, {"preset": preset, "mesh": {"pp": 2}}, optimizer=optimizer, world=world):
            return train(model, optimizer)

    expected = train(plain, adamw(plain))
    for found in run_ranks(2, rank):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
