"""What a pipeline cannot do is refused with a clear error, and a stage that fails is named."""

from __future__ import annotations

import copy
import logging
import math
from typing import Any

import pytest
import torch
from pipelined import batches
from torch import nn
from torch.nn import functional as F
from twins import adamw, work_on_ranks

import shardwise as sw
from shardwise.errors import ConfigError, DataError, FaultError, ModelError, ShardwiseError, StateError
from shardwise.parallel.pipeline.staged_model import PlaceholderModule
from shardwise.testing import InjectedError, run_ranks
from tests import inside
from tests.models import WIDTH, Block, Decoder
from tests.thorough import sampled

pytestmark = sampled

Tensor = torch.Tensor


class SameBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        block = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([block, nn.Linear(4, 4), block])


class OtherOrder(nn.Module):
    """Calls its modules in another order than it registers them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.last = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = x
        for block in reversed(self.blocks):
            hidden = block(hidden)
        return hidden.mean() + self.last(x).mean()


class NothingComputed(nn.Module):
    """Reads nothing that its first module computed."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        self.blocks[0](x)
        return self.blocks[1](x).mean()


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)


def plan(num_ranks: int = 2, **more: Any) -> dict[str, Any]:
    return {"preset": "zero1", "mesh": {"pp": num_ranks}, "accumulate": 4, **more}


@pytest.mark.parametrize(
    ("kind", "more", "error", "words"),
    [
        (
            Decoder,
            {"pipeline": {"schedule": "1f2b"}},
            ConfigError,
            "pipeline.schedule is '1f2b'; expected gpipe, 1f1b, interleaved or zb-h1.",
        ),
        (
            Decoder,
            {"pipeline": {"schedule": "zb-h1"}, "compile": "eager"},
            ConfigError,
            "splits the backward of linear",
        ),
        (
            Decoder,
            {"pipeline": {"schedule": "interleaved"}, "accumulate": 5},
            ConfigError,
            "in equal rounds of 2 or more, one for each pipeline rank, but accumulate is 5",
        ),
        (
            Decoder,
            {"pipeline": {"stages": [["tokens", "blocks.*"], ["norm"]]}},
            ConfigError,
            "stages miss head, which has the parameter head.weight",
        ),
        (
            Decoder,
            {"pipeline": {"stages": [["tokens", "blocks.*"], ["blocks.3", "norm", "head"]]}},
            ConfigError,
            "names 'blocks.3' twice",
        ),
        (
            Decoder,
            {"pipeline": {"stages": [["tokens", "block.*"], ["norm", "head"]]}},
            ConfigError,
            "names 'block.\\*', but the model has no such module",
        ),
        (
            Decoder,
            {"pipeline": {"stages": [["tokens"], ["blocks", "blocks.1", "norm", "head"]]}},
            ConfigError,
            "names 'blocks' and also 'blocks.1' inside",
        ),
        (
            Decoder,
            {"pipeline": {"stages": [["tokens"]]}},
            ConfigError,
            "lists 1 stages, but 2 ranks with 1 each make 2",
        ),
        (Decoder, {"pipeline": {"virtual_stages": 2}}, ConfigError, "has one stage for each rank"),
        (
            lambda: Decoder(num_blocks=1),
            {"pipeline": {"schedule": "interleaved", "virtual_stages": 3}},
            ModelError,
            "has no sequence of blocks",
        ),
        (
            lambda: nn.Sequential(nn.Linear(4, 4)),
            {},
            ConfigError,
            "2 pipeline stages need as many modules, but Sequential has 1 in a row: 0",
        ),
        (
            Decoder,
            {"mesh": {"pp": 2, "sp": 1, "tp": 1}, "accumulate": 5, "pipeline": {"schedule": "interleaved"}},
            ConfigError,
            "in equal rounds of 2 or more",
        ),
        (SameBlock, {}, ModelError, r"blocks.0 and blocks.2 are one module"),
        (Plain, {}, ModelError, "Plain has no sequence of blocks"),
    ],
)
def test_plans_and_models_that_make_no_pipeline_are_refused_and_nothing_is_changed(
    kind: Any, more: dict[str, Any], error: type[ShardwiseError], words: str
) -> None:
    models = [kind() for _ in range(2)]
    before = [dict(model.named_modules()) for model in models]

    def rank(world: sw.World) -> None:
        model = models[world.rank]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        num_params = len(optimizer.param_groups[0]["params"])
        with pytest.raises(error, match=words):
            sw.shard(model, plan(**more), optimizer=optimizer, world=world)
        assert len(optimizer.param_groups[0]["params"]) == num_params
        assert dict(model.named_modules()) == before[world.rank]

    run_ranks(2, rank)


def test_what_needs_the_whole_model_is_refused_by_name() -> None:
    models = [Decoder() for _ in range(2)]
    x, y = batches(1, 4)[0]

    def rank(world: sw.World) -> None:
        model = models[world.rank]
        optimizer = adamw(model)
        with sw.shard(model, plan(), optimizer=optimizer, world=world) as engine:
            with pytest.raises(StateError, match=r"splits the model into pipeline stages.*engine\.train_step"):
                model.forward(x, y)
            refused = {
                "reshard()": lambda: engine.reshard("zero1"),
                "gathered()": lambda: engine.gathered(),
                "optimizer_state_dict()": lambda: engine.optimizer_state_dict(),
                "optimizer.state_dict()": lambda: optimizer.state_dict(),
            }
            for what, call in refused.items():
                with pytest.raises(StateError) as refusal:
                    call()
                assert f"has no {what} in this version" in str(refusal.value)
            whole = engine.state_dict()
            absent = next(module for module in model.modules() if isinstance(module, PlaceholderModule))
            with pytest.raises(AttributeError, match=r"weight lies on another .*engine\.get\('[\w.]+\.weight'\)"):
                absent.weight.data.mul_(0.5)  # by a loop
            for one in (model, nn.Sequential(model), absent):
                with pytest.raises(StateError, match=r"more than this rank's pipeline stages. Call engine\.state_dict"):
                    one.state_dict()
                with pytest.raises(StateError, match=r"more than this rank's.* Call engine\.load_state_dict"):
                    one.load_state_dict(whole, strict=False)
            assert set(model.state_dict(keep_vars=True)) < set(whole)
            engine.forward_backward((x, y))
            for norm_type in (2.0, math.inf):
                with pytest.raises(StateError, match=r"of the whole model from.* engine\.clip_grad_norm_"):
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type)
            norm = engine.clip_grad_norm_(0.5)
            with pytest.raises(StateError, match="can get no more now"):
                engine.forward_backward((x, y))
            engine.step()
            assert float(norm) == pytest.approx(engine.gradient_norm)

    run_ranks(2, rank)


def test_a_live_model_cannot_be_split_into_stages() -> None:
    def rank(world: sw.World) -> None:
        with (
            sw.shard(Decoder(), {"preset": "zero1", "mesh": {"dp": 2}, "accumulate": 2}, world=world) as engine,
            pytest.raises(ConfigError, match="cannot split a live model into pipeline stages"),
        ):
            engine.reshard({"preset": "zero1", "mesh": {"pp": 2}, "accumulate": 2})

    run_ranks(2, rank)


@pytest.mark.parametrize(
    ("kind", "batch", "words"),
    [
        (OtherOrder, (torch.ones(4, 4),), "List the modules in the order"),
        (NothingComputed, (torch.ones(4, 4),), "is called with nothing that the modules before it computed"),
    ],
)
def test_forwards_that_no_pipeline_can_run_are_refused_in_the_first_step(kind: Any, batch: Any, words: str) -> None:

    def work(engine: sw.Engine) -> None:
        engine.forward_backward(batch)

    with pytest.raises((ModelError, FaultError), match=words):
        work_on_ranks(2, work, plan(), kind, None)


class Skipping(Decoder):
    """Says that it skips blocks at random, as models of transformers do."""

    layerdrop = 0.1


def test_layers_that_are_skipped_at_random_are_refused_in_training_alone() -> None:
    batch = batches(1, 4)[0]

    def work(engine: sw.Engine) -> None:
        model = engine.module
        with pytest.raises(ModelError, match=r"Skipping skips layers at random in training \(layerdrop 0.1\)"):
            engine.train_step(batch)
        model.eval()
        evaluated = float(engine.eval_step(batch))
        model.train().layerdrop = 0.0
        assert float(engine.train_step(batch)) == pytest.approx(evaluated)

    work_on_ranks(2, work, plan(), Skipping)


class Penalised(Decoder):
    """Adds to its loss what `penalty` computes from the model and the outputs of the embedding and the blocks."""

    def __init__(self, penalty: Any, *, from_call: int = 0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Keeping(WIDTH) for _ in range(4))
        self.penalty, self.from_call, self.num_calls = penalty, from_call, 0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.tokens(x)
        seen = [hidden]
        for block in self.blocks:
            hidden = block(hidden)
            seen.append(hidden)
        loss = F.cross_entropy(self.head(self.norm(hidden)).flatten(0, 1), y.flatten())
        self.num_calls += 1
        return loss if self.num_calls <= self.from_call else loss + 0.1 * self.penalty(self, seen)


class Keeping(Block):
    def forward(self, x: Tensor) -> Tensor:
        hidden = super().forward(x)
        self.kept = hidden * 2
        return hidden


def squares(tensors: Any) -> Tensor:
    return torch.stack([one.pow(2).mean() for one in tensors]).sum()


VALUES, KEPT = "uses the values of .* of another stage", "reads kept of blocks.0"
PENALTIES = {
    "of the embedding's weight": (lambda model, _: squares([model.tokens.weight]), VALUES),
    "of a weight by name": (lambda model, _: squares([model.get_parameter("blocks.0.up.weight")]), VALUES),
    "of all parameters": (lambda model, _: squares(model.parameters()), VALUES),
    "of named parameters": (lambda model, _: squares(p for n, p in model.named_parameters() if "norm" in n), VALUES),
    "of the blocks' parameters": (lambda model, _: squares(p for b in model.blocks for p in b.parameters()), VALUES),
    "of linear layers": (
        lambda model, _: squares(one.weight for one in model.modules() if isinstance(one, nn.Linear)),
        VALUES,
    ),
    "of tensors kept by a class": (
        lambda model, _: squares(one.kept for one in model.modules() if isinstance(one, Keeping)),
        KEPT,
    ),
    "of tensors kept by blocks": (lambda model, _: squares(one.kept for one in model.blocks), KEPT),
}


@pytest.mark.parametrize("what", PENALTIES)
def test_a_loss_with_terms_of_other_stages_is_refused_by_name_and_nothing_is_changed(what: str) -> None:
    penalty, words = PENALTIES[what]
    model = Penalised(penalty)
    models = [copy.deepcopy(model) for _ in range(2)]

    def rank(world: sw.World) -> None:
        mine = models[world.rank]
        with sw.shard(mine, plan(), optimizer=torch.optim.SGD(mine.parameters(), lr=0.1), world=world) as engine:
            engine.train_step(batches(1, 4)[0])

    with pytest.raises((ModelError, FaultError), match=words):
        run_ranks(2, rank)
    before = model.state_dict()
    for mine in models:
        for name, param in mine.named_parameters():
            assert torch.equal(param, before[name])


@pytest.mark.parametrize(
    "penalty", [lambda _, seen: squares(seen[:1]), PENALTIES["of all parameters"][0]], ids=["of a result", "of weights"]
)
def test_a_term_that_the_loss_gets_in_a_later_step_is_refused(penalty: Any) -> None:
    """Forwards of later steps are not watched, but gradients reveal the term."""
    finished: list[int] = []

    def work(engine: sw.Engine) -> None:
        for step in range(2):
            engine.train_step(batches(1, 4)[0])
            finished.append(step)

    with pytest.raises((ModelError, FaultError), match=r"uses (what modules of earlier stages|the values of)"):
        work_on_ranks(
            2,
            work,
            plan(),
            lambda: Penalised(penalty, from_call=4),
            lambda mine: torch.optim.SGD(mine.parameters(), lr=0.1),
        )
    assert finished == [0, 0]


def test_a_loss_function_over_all_parameters_is_refused() -> None:

    def work(engine: sw.Engine) -> None:
        mine = engine.module
        engine.forward_backward(batches(1, 4)[0], loss_fn=lambda loss: loss + squares(mine.parameters()))

    with pytest.raises((ModelError, FaultError), match=VALUES):
        work_on_ranks(2, work, plan(), Decoder, None)


@pytest.mark.parametrize("step_of_write", [0, 2], ids=["recorded", "followed"])
def test_a_loss_function_that_writes_to_a_parameter_is_refused(step_of_write: int) -> None:
    """Parameters that are whole anyway are plain tensors later, so that nothing intercepts the write. That to a bias
    autograd does not find, for it has saved none."""
    finished: list[int] = []

    def work(engine: sw.Engine) -> None:
        mine = engine.module

        def clips(loss: Tensor) -> Tensor:
            if len(finished) == 2 * step_of_write:
                with torch.no_grad():
                    mine.blocks[-1].down.bias.clamp_(-0.1, 0.1)
            return loss

        for step in range(3):
            engine.train_step(batches(1, 4)[0], loss_fn=clips)
            engine.world.barrier()
            finished.append(step)
            engine.world.barrier()

    with pytest.raises((ModelError, FaultError), match="was changed in place while the model computed"):
        work_on_ranks(2, work, plan(), Decoder, lambda mine: torch.optim.SGD(mine.parameters(), lr=0.1))
    assert len(finished) == 2 * step_of_write


def test_a_rehearsal_refuses_what_the_first_step_does() -> None:

    def work(engine: sw.Engine) -> None:
        with pytest.raises(ModelError, match=VALUES):
            engine.rehearse(tuple(one[:1] for one in batches(1, 4)[0]))

    work_on_ranks(2, work, plan(), lambda: Penalised(PENALTIES["of all parameters"][0]), None)


class Failing(nn.Linear):
    """Calls `what` in its third forward, or in another one."""

    def __init__(self, what: Any, first: int = 3) -> None:
        super().__init__(4, 4)
        self.what, self.num_calls, self.first = what, 0, first

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        if self.num_calls == self.first:
            self.what()
        return super().forward(x)


def fail() -> None:
    raise InjectedError("on purpose")


def sequential(what: Any, place: int) -> nn.Module:
    return nn.Sequential(*(Failing(what) if at == place else nn.Linear(4, 4) for at in range(3)))


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_stage_that_raises_is_named_on_every_rank(place: int, schedule: str) -> None:
    said: dict[int, BaseException] = {}
    models = [sequential(fail, place) for _ in range(3)]

    def rank(world: sw.World) -> None:
        try:
            with sw.shard(models[world.rank], plan(3, pipeline={"schedule": schedule}), world=world) as engine:
                engine.forward_backward(torch.ones(4, 4), torch.ones(4, 4), loss_fn=F.mse_loss)
        except BaseException as error:
            said[world.rank] = error
            raise

    with pytest.raises((InjectedError, FaultError)):
        run_ranks(3, rank)
    assert isinstance(said[place], InjectedError)
    for other in {0, 1, 2} - {place}:
        assert isinstance(said[other], FaultError), said[other]
        assert said[other].kind == "raised"
        assert said[other].ranks == (place,)
        assert "on purpose" in str(said[other])


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_step_that_follows_the_whole_schedule_and_is_cut_short(schedule: str) -> None:
    """A stage fails in the fifth step, with two stages of two ranks under ZeRO-3: gathers and reductions of other
    passes are in flight."""
    said: dict[int, BaseException] = {}
    firsts = [1000, 1000, 4 * 4 + 3, 1000]
    models = [nn.Sequential(nn.Linear(4, 4), nn.Tanh(), Failing(fail, first), nn.Tanh()) for first in firsts]
    mesh = {"preset": "zero3", "mesh": {"pp": 2, "dp": 2}, "accumulate": 4, "pipeline": {"schedule": schedule}}

    def rank(world: sw.World) -> None:
        mine = models[world.rank]
        try:
            with sw.shard(mine, mesh, optimizer=torch.optim.SGD(mine.parameters(), lr=0.1), world=world) as engine:
                for _ in range(5):
                    engine.train_step(torch.ones(4, 4), torch.ones(4, 4), loss_fn=F.mse_loss)
        except BaseException as error:
            said[world.rank] = error
            raise

    with pytest.raises((InjectedError, FaultError)):
        run_ranks(4, rank)
    assert isinstance(said[2], InjectedError)
    for other in (0, 1, 3):
        assert isinstance(said[other], FaultError), said[other]
        assert said[other].ranks == (2,)


def test_a_stage_that_stalls_ends_the_job_at_the_timeout_by_name() -> None:
    worlds: dict[int, sw.World] = {}
    models = [sequential(lambda: inside.stall(worlds[1], worlds.values(), 1), 1) for _ in range(3)]

    def rank(world: sw.World) -> None:
        worlds[world.rank] = world
        with sw.shard(models[world.rank], plan(3), world=world) as engine:
            engine.forward_backward(torch.ones(4, 4), torch.ones(4, 4), loss_fn=F.mse_loss)

    with pytest.raises(FaultError, match=r"Timeout of 1 s: rank 1 computes") as caught:
        run_ranks(3, rank)
    assert caught.value.ranks == (1,)


def test_stages_that_are_given_other_batches_are_told_so() -> None:

    def work(engine: sw.Engine) -> None:
        x, y = batches(1, 4)[0]
        if engine.world.rank:  # the same samples in another order
            x, y = x.flip(0), y.flip(0)
        engine.train_step((x, y))

    with pytest.raises(DataError, match=r"Ranks 0 and 1 share .* 'pp', .* micro-batch 0, argument 0, .* and \d more"):
        work_on_ranks(2, work, plan(), lambda: Decoder(num_blocks=2), None)


def test_stages_are_told_so_in_a_later_step_too() -> None:
    models = [Decoder(num_blocks=2) for _ in range(2)]
    losses = []

    def rank(world: sw.World) -> None:
        (first, second) = batches(2, 4)
        with sw.shard(models[world.rank], plan(), optimizer=adamw(models[world.rank]), world=world) as engine:
            losses.append(engine.train_step(first))
            engine.train_step(second if world.rank else first)

    with pytest.raises(DataError, match=r"Ranks 0 and 1 share .* 'pp', .* micro-batch 0, argument 0"):
        run_ranks(2, rank)
    assert len(losses) == 2


def test_after_a_fault_that_was_caught_the_next_step_is_right() -> None:
    """A batch that cannot be split is refused before anything is sent, and leaves nothing behind."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    plain = copy.deepcopy(model)
    x, y = torch.randn(4, 4), torch.randn(4, 4)

    def work(engine: sw.Engine) -> dict[str, Tensor]:
        with pytest.raises(ConfigError, match="cannot be split into 4"):
            engine.train_step(x[:3], y[:3], loss_fn=F.mse_loss)
        engine.train_step(x, y, loss_fn=F.mse_loss)
        return engine.state_dict()

    F.mse_loss(plain(x), y).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    for state in work_on_ranks(2, work, plan(), model, lambda mine: torch.optim.SGD(mine.parameters(), lr=0.1)):
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("by_call", [True, False])
def test_hooks_that_a_loop_adds_are_said_to_run_on_their_stage(
    *, by_call: bool, caplog: pytest.LogCaptureFixture
) -> None:
    models, data = [Decoder() for _ in range(2)], batches(1, 8)[0]

    def rank(world: sw.World) -> list[str]:
        model = models[world.rank]
        with sw.shard(model, plan(), optimizer=adamw(model), world=world) as engine:
            hooked = [name for name, module in model.named_modules() if isinstance(module, Block)]
            for name in hooked:
                model.get_submodule(name).register_full_backward_hook(lambda *_: None)
            for _ in range(2):
                engine.backward(model(*data)) if by_call else engine.forward_backward(data)
                engine.step()
            return hooked

    first, second = run_ranks(2, rank)
    said = sorted(message for message in caplog.messages if message.startswith("Hooks on "))
    assert len(said) == 2
    assert f"Hooks on {first[0]}" in said[0]
    assert "here on rank 0" in said[0]
    assert f"Hooks on {second[0]}" in said[1]
    assert "here on rank 1" in said[1]


def test_a_transform_of_the_model_is_refused() -> None:
    models, (x, y) = [Decoder() for _ in range(2)], batches(1, 8)[0]

    def rank(world: sw.World) -> None:
        model = models[world.rank]
        with (
            sw.shard(model, plan(), optimizer=adamw(model), world=world),
            pytest.raises(StateError, match=r"inside a torch\.func transform"),
        ):
            torch.func.vmap(lambda row, target: model(row[None], target[None]))(x, y)

    run_ranks(2, rank)


def test_hooks_on_modules_of_earlier_stages_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """What they collect on other ranks is unknown, and would be missing in a loss."""
    models = [Decoder() for _ in range(2)]

    def warnings(*names: str) -> list[str]:
        caplog.clear()
        replicas = [copy.deepcopy(model) for model in models]
        for replica in replicas:
            for name in names:
                replica.get_submodule(name).register_forward_hook(lambda *_: None)

        def rank(world: sw.World) -> None:
            sw.shard(replicas[world.rank], plan(), optimizer=adamw(replicas[world.rank]), world=world).close()

        with caplog.at_level(logging.WARNING, logger="shardwise"):
            run_ranks(2, rank)
        return [message for message in caplog.messages if message.startswith("Forward hooks on ")]

    blocks = [name for name, module in models[0].named_modules() if isinstance(module, Block)]
    assert not warnings()
    assert not warnings(blocks[-1])  # the loss is on its stage
    [found] = warnings(blocks[0], blocks[-1])
    assert blocks[0] in found
    assert blocks[-1] in found
