"""What later stages read of earlier ones besides what they are called with: skips, sums over layers, conditions."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from twins import work_on_ranks

import shardwise as sw
from shardwise.errors import FaultError, ModelError
from tests import inside
from tests.in_stages import Messages, race
from tests.models import Lora
from tests.thorough import sampled

Tensor = torch.Tensor
WIDTH, VOCAB, LENGTH = 16, 11, 5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, *skips: Tensor) -> Tensor:
        return hidden + torch.tanh(self.linear(self.norm(sum(skips, hidden))))


class Net(nn.Module):
    """Blocks of an encoder and of a decoder, and one between them that is registered last."""

    num_blocks = 3

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.down = nn.ModuleList(Block() for _ in range(self.num_blocks))
        self.up = nn.ModuleList(Block() for _ in range(self.num_blocks))
        self.middle = Block()
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.hidden(x)).flatten(0, 1), y.flatten())

    def hidden(self, x: Tensor) -> Tensor:
        """A U-Net: each up block gets what the down block opposite has returned."""
        hidden = self.tokens(x)
        skips = []
        for block in self.down:
            hidden = block(hidden)
            skips.append(hidden)
        hidden = self.middle(hidden)
        for block in self.up:
            hidden = block(hidden, skips.pop())
        return hidden


class Condition(Net):
    """All decoder blocks are called with the encoder's states, each with a tensor of its own."""

    def hidden(self, x: Tensor) -> Tensor:
        states = self.tokens(x)
        for block in self.down:
            states = block(states)
        hidden = self.middle(self.tokens.weight.new_zeros(*x.shape, WIDTH))
        for number, block in enumerate(self.up):
            hidden = block(hidden, states * (number + 1))
        return hidden


class SumOfLayers(Net):
    """What comes after the last block reads what all of them have returned."""

    def hidden(self, x: Tensor) -> Tensor:
        hidden = self.tokens(x)
        seen = [hidden]
        for block in [*self.down, self.middle, *self.up]:
            hidden = block(hidden)
            seen.append(hidden)
        return torch.stack(seen).mean(0)


class Penalised(Net):
    """Its loss has terms of what modules of all stages have returned, with gradients and without."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.tokens(x)
        seen = [hidden]
        for block in [*self.down, self.middle, *self.up]:
            hidden = block(hidden)
            seen.append(hidden)
        loss = F.cross_entropy(self.head(hidden).flatten(0, 1), y.flatten())
        return loss * (1 + seen[2].detach().std()) + 0.1 * sum(one.square().mean() for one in seen)


class OfSeveral(Net):
    """Blocks return dicts and tuples, of which later ones read some; a skip passes recomputed blocks."""

    def hidden(self, x: Tensor) -> Tensor:
        hidden = self.tokens(x)
        early = hidden
        for block in self.down:
            hidden = checkpoint(block, hidden, use_reentrant=False)
        middle = self.middle(hidden, early)
        for block in self.up:
            hidden = checkpoint(block, middle, hidden, early, use_reentrant=False)
        return hidden + early.detach()


class CallsInner(Net):
    """What comes after the last block calls a layer of the first one, too."""

    def hidden(self, x: Tensor) -> Tensor:
        hidden = super().hidden(x)
        return hidden + torch.tanh(self.down[0].linear(hidden))


class TwoTowers(Net):
    """Of images and text, say, whose results meet behind the last block (CLIP, SigLIP): the second gets nothing of the
    first."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        first = self.tokens(x)
        for block in [*self.down, self.middle]:
            first = block(first)
        second = F.one_hot(y, WIDTH).to(first.dtype)
        for block in self.up:
            second = block(second)
        each, other = self.head(first.mean(1)), self.head(second.mean(1))
        return F.cross_entropy(each @ other.T, torch.arange(len(x), device=x.device))


NETS = [TwoTowers, Net, Condition, SumOfLayers, Penalised, OfSeveral, CallsInner]
SPLITS: dict[str, dict[str, Any]] = {
    "pp4": {"pp": 4},
    "pp2-dp2-zero3": {"pp": 2, "dp": 2, "preset": "zero3"},
    "interleaved": {"pp": 2, "pipeline": {"schedule": "interleaved"}},
    "zb-h1": {"pp": 2, "preset": "zero2", "pipeline": {"schedule": "zb-h1"}},
    "gpipe": {"pp": 3, "preset": "ddp", "pipeline": {"schedule": "gpipe"}},
}


def made(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def drawn(num_steps: int = 3, micro_batches: int = 4) -> list[list[dict[str, Tensor]]]:
    numbers = torch.Generator().manual_seed(1)
    return [
        [{name: torch.randint(0, VOCAB, (2, LENGTH), generator=numbers) for name in "xy"} for _ in range(micro_batches)]
        for _ in range(num_steps)
    ]


def loss_itself(output: Tensor) -> Tensor:
    return output


@sampled
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("kind", NETS)
def test_they_train_as_in_a_plain_loop(kind: type[nn.Module], split: str) -> None:
    race(made(kind), drawn(), loss_fn=loss_itself, **SPLITS[split])


def test_a_stage_may_begin_with_what_gets_nothing_of_earlier_ones() -> None:
    """What it reads of them is carried there, in a step and in calls."""
    stages = [["tokens", "down.*", "middle"], ["up.*", "head"]]
    race(made(TwoTowers), drawn(), loss_fn=loss_itself, pipeline={"stages": stages})
    [parts] = drawn(num_steps=1)
    batch = {name: torch.cat([part[name] for part in parts]) for name in "xy"}
    plan = {"mesh": {"pp": 2}, "preset": "zero1", "pipeline": {"stages": stages}}

    def norm(engine: sw.Engine) -> float:
        engine.backward(engine(**batch))
        return engine.clip_grad_norm_(float("inf"))

    plain = made(TwoTowers)
    plain(**batch).backward()
    expected = float(torch.nn.utils.get_total_norm([param.grad for param in plain.parameters()]))
    for found in work_on_ranks(2, norm, plan, lambda: made(TwoTowers), None):
        assert found == pytest.approx(expected, rel=1e-5)


def test_two_arguments_of_one_shape_are_told_apart() -> None:
    """The first step follows every operation, and its stand-ins are all different; those of later ones share memory."""
    race(made(OfSeveral), drawn(num_steps=2), loss_fn=loss_itself, pp=3)


def test_skips_are_sent_once_to_where_they_are_read_and_priced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the last down block and the first up block all three outputs of down blocks are on their way, one of
    which is the hidden state as well."""
    messages = Messages(monkeypatch)
    stages = [["tokens", "down.*"], ["middle", "up.*", "head"]]
    data = drawn(num_steps=1)
    look = partial(foreseen_bytes, batch=data[0][0])
    foreseen = race(made(Net), data, loss_fn=loss_itself, pipeline={"stages": stages}, look=look)
    hidden = 2 * LENGTH * WIDTH * 4
    assert messages.of("activation") == messages.of("gradient") == len(data[0]) * 3 * hidden
    assert foreseen == [3 * hidden, 3 * hidden]


def foreseen_bytes(engine: sw.Engine, batch: dict[str, Tensor]) -> int:
    """That a rank sends for a micro-batch, as a rehearsal says."""
    from shardwise.fit.stage_rehearsal import StageRehearsal

    sharded = inside.sharded(engine)
    pipeline, sharding = sharded.parts.pipeline, sharded.parts.sharding
    assert pipeline is not None
    found = StageRehearsal(
        pipeline.staged, sharding.units, batch, sharding.device, sharded.table.compute, lambda output: output
    )
    found.activations(pipeline.exchange)
    return found.rank.sent_bytes


@pytest.mark.parametrize("frozen", [("tokens", "down"), ("tokens", "down", "middle", "up")])
def test_frozen_stages_send_no_gradients_and_keep_nothing(
    frozen: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have the same norm as the others, in fp64 too, of which they have no gradient."""
    messages = Messages(monkeypatch)
    model = made(Net).double()
    for name, param in model.named_parameters():
        param.requires_grad = not name.startswith(frozen)
    stages = {"stages": [["tokens", "down.*"], ["middle", "up.0"], ["up.1", "up.2", "head"]]}

    def norm(engine: sw.Engine) -> float:
        return float(engine.gradient_norm or 0.0)

    norms = race(model, drawn(), loss_fn=loss_itself, pp=3, look=norm, precision="fp64", pipeline=stages)
    assert len(set(norms)) == 1
    senders = {ranks for (kind, ranks), num in messages.sent.items() if kind == "gradient" and num}
    assert len(senders) == (0 if "up" in frozen else 1)
    assert messages.of("activation")


@sampled
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
def test_adapters_of_the_last_stages_alone(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen model with low-rank adapters in its up blocks: nothing comes back to the stage before them."""
    messages, model = Messages(monkeypatch), made(Net)
    model.requires_grad_(False)
    for block in model.up:
        block.linear = Lora(block.linear)
    stages = [["tokens", "down.*", "middle"], ["up.0", "up.1"], ["up.2", "head"]]
    race(model, drawn(), loss_fn=loss_itself, pp=3, pipeline={"stages": stages, "schedule": schedule})
    assert len({ranks for (kind, ranks), num in messages.sent.items() if kind == "gradient" and num}) == 1


class InPlace(Net):
    def hidden(self, x: Tensor) -> Tensor:
        first = self.down[0](self.tokens(x))
        first += 1
        hidden = first
        for block in [*self.down[1:], self.middle, *self.up]:
            hidden = block(hidden)
        return hidden + first


class Selecting(Net):
    """A block computes with as many tokens as the values of a batch say, and the last stage divides by their number.
    What is passed on has all tokens."""

    def __init__(self) -> None:
        super().__init__()
        del self.middle
        self.down = nn.ModuleList([Block()])

    def hidden(self, x: Tensor) -> Tensor:
        hidden = self.tokens(x)
        kept = self.down[0](hidden[:, : int(x[0, 0]) % 2 + 3])
        if len(self.down) > 1:
            (kept, _) = self.down[1]((kept, x))
        hidden = torch.cat([kept, hidden[:, kept.shape[1] :]], 1)
        for block in self.up:
            hidden = block(hidden)
        return hidden / kept.shape[1]


class OfPair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return self.block(pair[0]), pair[1]


class SelectingPairs(Selecting):
    def __init__(self) -> None:
        super().__init__()
        self.down.append(OfPair())


class SelectingTokens(Net):
    """All of its blocks compute with the tokens that the values of a batch say, and so do messages."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        is_kept = self.kept(x)
        hidden = self.tokens(x)[is_kept]
        for block in [*self.down, self.middle, *self.up]:
            hidden = block(hidden)
        return F.cross_entropy(self.head(hidden), y[is_kept])

    def kept(self, x: Tensor) -> Tensor:
        return x > 2


class ByLengths(SelectingTokens):
    """By lengths, which it reads as a list of numbers."""

    def kept(self, x: Tensor) -> Tensor:
        return torch.stack([torch.arange(LENGTH) < 2 + number % (LENGTH - 1) for number in x[:, 0].tolist()])


class WithinBlock(Net):
    """A block returns the tokens that it selects, which the next one puts back."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        is_kept = x > 2
        hidden = self.tokens(x)
        for block in self.down:
            hidden = hidden.masked_scatter(is_kept[..., None], block(hidden[is_kept]))
        for block in [self.middle, *self.up]:
            hidden = block(hidden)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), y.flatten())


@sampled
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("kind", [Selecting, SelectingPairs, SelectingTokens, ByLengths, WithinBlock])
def test_values_of_each_micro_batch_decide_on_shapes(kind: type[nn.Module], split: str) -> None:
    race(made(kind), drawn(), loss_fn=loss_itself, **SPLITS[split])


@sampled
@pytest.mark.parametrize("kind", [Selecting, SelectingPairs, SelectingTokens, ByLengths, WithinBlock])
def test_values_of_each_call_decide_on_shapes(kind: type[nn.Module]) -> None:
    """In a loop of one's own, whose calls are split along their samples if what blocks return has these."""
    data = [{name: torch.cat([part[name] for part in parts]) for name in "xy"} for parts in drawn(num_steps=4)]
    for batch in data:
        batch["x"][:, 0] = batch["x"][0, 0]  # in all rows: parts of a call have others
    plain = made(kind)
    expected = []
    for batch in data:
        loss = plain(**batch)
        loss.backward()
        grads = [param.grad for param in plain.parameters() if param.grad is not None]
        expected.append((loss.item(), float(torch.nn.utils.get_total_norm(grads))))
        plain.zero_grad()

    def calls(engine: sw.Engine) -> list[tuple[float, float]]:
        found = []
        for batch in data:
            loss = engine(**batch)
            engine.backward(loss)
            found.append((loss.item(), engine.clip_grad_norm_(float("inf"))))
            engine.zero_grad()
        return found

    for found in work_on_ranks(2, calls, {"mesh": {"pp": 2}, "preset": "zero1"}, lambda: made(kind), None):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=1e-6)


def test_shapes_that_precede_each_message_are_priced() -> None:
    data = drawn(num_steps=1)
    num_tokens = int((data[0][0]["x"] > 2).sum())
    look = partial(foreseen_bytes, batch=data[0][0])
    first, last = race(made(SelectingTokens), data, loss_fn=loss_itself, look=look)
    assert last == num_tokens * WIDTH * 4
    assert last + 100 < first < last + 2000


class ByNumber(Selecting):
    """Computes with as many tokens as a number says that is no tensor."""

    def forward(self, x: Tensor, y: Tensor, num: int) -> Tensor:
        hidden = self.tokens(x)
        kept = self.down[0](hidden[:, :num])
        for block in self.up:
            hidden = block(hidden)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), y.flatten()) / kept.shape[1]


def test_shapes_that_something_else_decides_on_are_those_of_the_first_batch_or_refused() -> None:
    """Later stages know them of the first micro-batch of the same shapes alone."""
    parts = [{**part, "num": 3} for part in drawn(num_steps=1)[0]]
    race(made(ByNumber), [parts], loss_fn=loss_itself)
    parts[-1]["num"] = 4
    with pytest.raises((ModelError, FaultError), match=r"down\.0 returned tensors .* or leave pp out of the mesh"):
        race(made(ByNumber), [parts], loss_fn=loss_itself)


class Reading(Net):
    """Cannot run on fake tensors: it reads a number that is drawn, which none is in a rehearsal."""

    def hidden(self, x: Tensor) -> Tensor:
        first = self.down[0](self.tokens(x))
        hidden = first * (1.0 + 0.0 * float(torch.rand(())))
        for block in [*self.down[1:], self.middle, *self.up]:
            hidden = block(hidden)
        return hidden + first


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (InPlace, r"What down\.0 returned is changed in place, and a later pipeline stage reads it"),
        (Reading, r"uses what down\.0 returned .*That was impossible: "),
    ],
)
def test_what_cannot_be_carried_is_refused_with_the_reason(kind: type[nn.Module], words: str) -> None:
    [parts] = drawn(num_steps=1)

    def work(engine: sw.Engine) -> None:
        engine.forward_backward(list(parts), loss_fn=loss_itself)

    with pytest.raises((ModelError, FaultError), match=words):
        work_on_ranks(2, work, {"mesh": {"pp": 2}, "preset": "zero1", "accumulate": 4}, lambda: made(kind), None)
