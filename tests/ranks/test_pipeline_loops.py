"""Loops that call the model itself, in pipeline stages: losses, norms and parameters are the unsplit model's."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pipelined import batches, rows_of, unsplit
from test_pipeline_transformers import build, padded
from torch import nn
from torch.autograd.forward_ad import dual_level, make_dual
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm
from twins import Run, adamw, assert_alike, work_on_ranks

import shardwise as sw
from shardwise.errors import ConfigError, DataError, FaultError, ModelError, ShardwiseError, StateError
from shardwise.memory.at_rest import ParamGuard
from shardwise.parallel.pipeline import staged_model
from shardwise.parallel.pipeline.loop_calls import most_parts
from shardwise.runtime.micro_batches import MicroBatch, parts_of
from shardwise.testing import run_ranks
from tests import inside
from tests.models import VOCAB, WIDTH, Decoder
from tests.thorough import sampled

Tensor = torch.Tensor
Loss = Callable[[Any, Tensor, Tensor], Tensor]
NUM_STEPS = 4


def own(model: Any, x: Tensor, y: Tensor) -> Tensor:
    loss: Tensor = model(x, y)
    return loss


def outside(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """A loss over a changed view of the logits, with another factor for each sample."""
    logits = model(x)
    logits /= 2.0
    each = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none").view_as(y).mean(1)
    return (each * torch.linspace(0.5, 1.5, len(x))).mean()


def of_pairs(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """Compares samples with each other, so that it is no mean over parts of the batch."""
    each = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="none").view_as(y).mean(1)
    return F.softplus(each[:, None] - each[None, :] + 0.1).mean()


def of_several_calls(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """Two calls that train, of other lengths, two that do not, the last between forward and backward, and one whose
    result is dropped."""
    with torch.no_grad():
        teacher = model(x)
    model(x[:3])
    student = model(x[:, :-1])
    loss = 3 * model(x, y) + (student - teacher[:, :-1] + 1.0).pow(2).mean()
    with torch.no_grad():
        factor = model(x[:2], y[:2])
    return loss * factor


LOSSES: dict[str, Loss] = {"own": own, "outside": outside, "of pairs": of_pairs, "of several calls": of_several_calls}


def looped(model: nn.Module, plan: dict[str, Any], data: list[tuple[Tensor, Tensor]], loss_of: Loss = own) -> list[Run]:
    """Train with a loop of one's own on `data`, divided along data axes; returns the results of every rank."""
    num_ranks = math.prod(plan["mesh"].values())
    accumulate = plan.get("accumulate", 1)

    def work(engine: sw.Engine) -> Run:
        told = Run()
        for x, y in data:
            losses, norm = [], None
            for part_x, part_y in zip(x.chunk(accumulate), y.chunk(accumulate), strict=True):
                loss = loss_of(engine, rows_of(engine, part_x), rows_of(engine, part_y))
                losses.append(loss.item())
                engine.backward(loss)
                norm = engine.step()
            assert norm is not None
            told.losses.append(engine.mean(sum(losses) / accumulate))
            told.norms.append(float(norm))
            told.extra.setdefault("recordings", []).append(inside.programs(engine).num_recordings)
        told.params = engine.state_dict()
        return told

    return work_on_ranks(num_ranks, work, plan, model)


def assert_loops_train_like(
    twin: Run, model: nn.Module, plan: dict[str, Any], data: list[tuple[Tensor, Tensor]], loss_of: Loss = own
) -> None:
    for told in looped(model, plan, data, loss_of):
        assert_alike(told, twin, rtol=1e-4, of_all=False)


def plainly(model: nn.Module, data: list[tuple[Tensor, Tensor]], loss_of: Loss) -> Run:
    """The same in one process, on whole batches."""

    class Losing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = copy.deepcopy(model)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return loss_of(self.model, x, y)

    told = unsplit(Losing(), data)
    told.params = {name.removeprefix("model."): value for name, value in told.params.items()}
    return told


@sampled
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("preset", ["ddp", "zero1", "zero2", "zero3", "zero3-kept"])
@pytest.mark.parametrize("mesh", [{"pp": 2}, {"pp": 2, "dp": 2}, {"dp": 2, "pp": 2}, {"pp": 4}], ids=str)
def test_a_plain_loop(mesh: dict[str, int], preset: str, accumulate: int) -> None:
    model, data = Decoder(), batches(NUM_STEPS, 24)
    twin = unsplit(model, data)
    for told in looped(model, {"preset": preset, "mesh": mesh, "accumulate": accumulate}, data):
        assert_alike(told, twin, rtol=1e-4, of_all=False)
        assert told.extra["recordings"][-1] == told.extra["recordings"][-2]


@sampled
@pytest.mark.parametrize("preset", ["ddp", "zero3", "zero3-kept"])
@pytest.mark.parametrize("mesh", [{"pp": 2}, {"pp": 3}], ids=str)
@pytest.mark.parametrize("kind", LOSSES)
def test_losses_that_loops_compute(kind: str, mesh: dict[str, int], preset: str) -> None:
    model, data = Decoder(), batches(NUM_STEPS, 10, lengths=(6, 5))
    twin = plainly(model, data, LOSSES[kind])
    assert_loops_train_like(twin, model, {"preset": preset, "mesh": mesh}, data, LOSSES[kind])


PLANS: list[dict[str, Any]] = [
    {"pipeline": {"schedule": "gpipe"}},
    {"pipeline": {"schedule": "zb-h1"}},
    {"pipeline": {"schedule": "interleaved"}},
    {"pipeline": {"stages": [["tokens", "blocks.*", "norm"], ["head"]]}},
    {"activations": "recompute"},
    {"mesh": {"pp": 2, "tp": 2}, "tensor": {"plan": {"blocks.*.up": "column", "blocks.*.down": "row"}}},
    {"mesh": {"pp": 2, "dp": 2}, "rows": {"grad": {"shard": [], "partial": ["dp"]}}},
]
OF_ALL_ROWS = [changes for changes in PLANS if "dp" not in changes.get("mesh", {})]


@sampled
@pytest.mark.parametrize(
    ("kind", "changes"), [*(("own", one) for one in PLANS), *(("outside", one) for one in OF_ALL_ROWS)], ids=str
)
def test_plans_of_loops_that_call_the_model(kind: str, changes: dict[str, Any]) -> None:
    loss_of = LOSSES[kind]
    torch.manual_seed(0)
    model, data = Decoder(tied="pipeline" not in changes), batches(NUM_STEPS, 8)
    twin = plainly(model, data, loss_of)
    assert_loops_train_like(twin, model, {"preset": "zero1", "mesh": {"pp": 2}, **changes}, data, loss_of)


def squares(model: Any) -> Tensor:
    module = model.module if isinstance(model, sw.Engine) else model
    return 0.05 * torch.stack([param.square().sum() for param in module.parameters()]).sum()


@pytest.mark.parametrize("preset", ["ddp", "zero3"])
def test_a_penalty_of_the_loops_own_counts_once_for_what_stages_share(preset: str) -> None:
    """Embedding and head are one matrix, on two stages, each of which adds the penalty's gradient. The value of the
    loss is that of a rank's own stages."""
    model, data = Scaled(tied=True), batches(NUM_STEPS, 8)

    def penalized(model: Any, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = model(x, y) + squares(model)
        return loss

    twin = plainly(model, data, penalized)
    for told in looped(model, {"preset": preset, "mesh": {"pp": 2}}, data, penalized):
        torch.testing.assert_close(told.norms, twin.norms, rtol=1e-5, atol=1e-5)
        for name, value in twin.params.items():
            torch.testing.assert_close(told.params[name], value, rtol=1e-4, atol=1e-5)


class Scaled(Decoder):
    """Multiplies what each block returns by a parameter from a list, and what it is given by one from a dict."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(WIDTH)) for _ in self.blocks)
        self.gains = nn.ParameterDict({str(place): torch.ones(1) for place in range(len(self.blocks))})

    def logits_of(self, hidden: Tensor) -> Tensor:
        for place, (block, scale) in enumerate(zip(self.blocks, self.scales, strict=True)):
            hidden = block(hidden * self.gains[str(place)]) * scale
        return self.head(self.norm(hidden))


LISTED = [["tokens", "blocks.0", "scales"], ["blocks.1", "blocks.2", "blocks.3", "norm", "head"]]


@pytest.mark.parametrize("stages", ["auto", LISTED], ids=["auto", "listed"])
def test_parameters_in_lists_and_dicts_are_used_between_stages(stages: Any) -> None:
    model, data = Scaled(), batches(NUM_STEPS, 8)
    plan = {"preset": "zero3", "mesh": {"pp": 2}, "pipeline": {"stages": stages}}
    assert_loops_train_like(unsplit(model, data), model, plan, data)


@sampled
@pytest.mark.parametrize("rows", [1, 2, 3, 7])
def test_batches_of_any_number_of_samples(rows: int) -> None:
    model, data = Decoder(), batches(NUM_STEPS, rows)
    assert_loops_train_like(unsplit(model, data), model, {"preset": "zero2", "mesh": {"pp": 2}}, data)


@sampled
@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
def test_a_model_of_transformers_with_padding(kind: str) -> None:
    """The loss is over tokens of which the parts of a batch have different numbers; evaluation has all logits."""
    model, data = build(kind), padded()
    twin, optimizer = copy.deepcopy(model), None
    expected: list[Tensor] = []
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for batch in data:
        loss = twin(**batch).loss
        (loss / 3).backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.detach())
    with torch.no_grad():
        logits = twin.eval()(**data[0]).logits
    models = [copy.deepcopy(model) for _ in range(2)]

    def rank(world: sw.World) -> list[Tensor]:
        mine = models[world.rank]
        ours = torch.optim.SGD(mine.parameters(), lr=0.1)
        found = []
        with sw.shard(mine, {"preset": "zero3", "mesh": {"pp": 2}}, optimizer=ours, world=world):
            for batch in data:
                loss = mine(**batch).loss
                (loss / 3).backward()
                ours.step()
                ours.zero_grad()
                found.append(loss.detach())
            mine.eval()
            with torch.no_grad():
                output = mine(**data[0])
            torch.testing.assert_close(output.logits, logits, rtol=1e-5, atol=1e-5)
            assert type(output).__name__ == type(twin(**data[0])).__name__
        return found

    for found in run_ranks(2, rank):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@sampled
@pytest.mark.parametrize("preset", ["ddp", "zero3"])
def test_each_micro_batch_has_a_shape_of_its_own(preset: str) -> None:
    """Padded, packed and plain, of other lengths in every step: one program serves all."""
    model, draw = build("llama"), torch.Generator().manual_seed(1)

    def drawn(step: int) -> list[dict[str, Tensor]]:
        found = []
        for kind in range(3):
            rows, length = 4, 5 + (2 * step + 3 * kind) % 7
            tokens = torch.randint(1, 50, (rows, length), generator=draw)
            batch = {"input_ids": tokens, "labels": tokens.clone()}
            if kind == 1:
                batch["attention_mask"] = (torch.arange(length) < length - 1 - torch.arange(rows)[:, None] % 2).long()
                batch["labels"][batch["attention_mask"] == 0] = -100
            if kind == 2:
                batch["position_ids"] = (torch.arange(length) % 3)[None].expand(rows, -1)
            found.append(batch)
        return found

    data = [drawn(step) for step in range(5)]
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    expected = []
    for step in data:
        losses = [twin(**batch, use_cache=False).loss for batch in step]  # with a cache no packing is looked for
        (sum(losses) / 3).backward()
        expected.append([loss.item() for loss in losses])
        optimizer.step()
        optimizer.zero_grad()
    models = [copy.deepcopy(model) for _ in range(2)]

    def rank(world: sw.World) -> None:
        mine = models[world.rank]
        plan = {"preset": preset, "mesh": {"pp": 2}, "accumulate": 3}
        recordings = []
        with sw.shard(mine, plan, optimizer=torch.optim.SGD(mine.parameters(), lr=0.1), world=world) as engine:
            for step, losses in zip(data, expected, strict=True):
                for batch, loss in zip(step, losses, strict=True):
                    found = mine(**batch).loss
                    engine.backward(found)
                    assert found.item() == pytest.approx(loss, rel=1e-5)
                    engine.step()
                recordings.append(inside.programs(engine).num_recordings)
        assert recordings[-1] == recordings[-3]

    run_ranks(2, rank)


def in_stages(use: Callable[[sw.Engine, nn.Module], object], **changes: Any) -> None:
    """Call `use` on two ranks that have a stage each."""
    torch.manual_seed(0)
    model = Decoder()
    plan = {"preset": "zero1", "mesh": {"pp": 2}, **changes}
    work_on_ranks(2, lambda engine: use(engine, engine.module), plan, model)


def test_what_a_loop_cannot_do_is_refused_and_it_goes_on() -> None:
    [(x, y)] = batches(1, 8)

    def use(engine: sw.Engine, model: nn.Module) -> None:
        loss = model(x, y)
        loss.backward(retain_graph=True)
        with pytest.raises(StateError, match="was sent back before, or a step was taken since"):
            loss.backward()
        engine.step()
        old = model(x, y)
        model(x, y).backward()
        engine.step()
        with pytest.raises(StateError, match="was sent back before, or a step was taken since"):
            old.backward()
        with pytest.raises(StateError, match=r"Call the whole model as model\(batch\)"):
            model.forward(x, y)
        (graph,) = torch.autograd.grad(model(x, y) * 2, [loss], allow_unused=True)
        assert graph is None
        engine.zero_grad()
        engine.train_step([(x, y)])
        engine.backward(model(x, y))
        engine.clip_grad_norm_(1.0)
        late = model(x, y)
        with pytest.raises(StateError, match="can get no more now"):
            late.backward()
        engine.step()
        with pytest.raises(StateError, match="was sent back before, or a step was taken since"):
            late.backward()
        assert engine.num_steps == 4

    in_stages(use)


@sampled
@pytest.mark.parametrize("preset", ["ddp", "zero2"])
def test_a_loop_without_sums_until_the_last_micro_batch(preset: str) -> None:
    model, data = Decoder(), batches(2, 8)
    twin = unsplit(model, data)
    models = [copy.deepcopy(model) for _ in range(4)]

    def rank(world: sw.World) -> None:
        mine = models[world.rank]
        optimizer = adamw(mine)
        plan = {"preset": preset, "mesh": {"pp": 2, "dp": 2}}
        with sw.shard(mine, plan, optimizer=optimizer, world=world) as engine:
            for (x, y), norm in zip(data, twin.norms, strict=True):
                (first, second) = zip(rows_of(engine, x).chunk(2), rows_of(engine, y).chunk(2), strict=True)
                with engine.no_sync():
                    (mine(*first) / 2).backward()
                (mine(*second) / 2).backward()
                assert float(engine.clip_grad_norm_(math.inf)) == pytest.approx(norm, rel=1e-5)
                optimizer.step()
                mine.zero_grad()

    run_ranks(4, rank)


@sampled
@pytest.mark.parametrize("preset", ["ddp", "zero3"])
@pytest.mark.parametrize("call", ["inside", "whole", "both"])
def test_gradients_are_dropped_between_forward_and_backward(preset: str, call: str) -> None:
    """As Lightning does; and what is called may be a model inside of the one that is sharded, with its hooks."""
    data = batches(NUM_STEPS, 8)

    class Holding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = Decoder()

        def forward(self, x: Tensor, y: Tensor) -> Any:
            return {"loss": self.inside(x, y) * 2}

    def loss_of(model: Any, x: Tensor, y: Tensor) -> Tensor:
        parts = {"inside": [lambda: model.inside(x, y)], "whole": [lambda: model(x, y)["loss"]]}
        parts["both"] = parts["inside"] + parts["whole"]
        loss: Tensor = sum(one() for one in parts[call])
        return loss

    def train(model: Any, optimizer: torch.optim.Optimizer, norm_of: Callable[[], Any]) -> list[float]:
        found = []
        for x, y in data:
            for part_x, part_y, is_first in zip(x.chunk(2), y.chunk(2), (True, False), strict=True):
                loss = loss_of(model, part_x, part_y) / 2
                if is_first:
                    optimizer.zero_grad()
                loss.backward()
                found.append(loss.item())
            found.append(float(norm_of()))
            optimizer.step()
        return found

    models = [Holding()]
    models += [copy.deepcopy(models[0]) for _ in range(2)]
    twin = models.pop()
    expected = train(twin, adamw(twin), lambda: nn.utils.clip_grad_norm_(twin.parameters(), math.inf))

    def rank(world: sw.World) -> None:
        mine = models[world.rank]
        optimizer, hooked = adamw(mine), []
        mine.inside.register_forward_hook(lambda *_: hooked.append(True))
        with sw.shard(mine, {"preset": preset, "mesh": {"pp": 2}}, optimizer=optimizer, world=world) as engine:
            found = train(mine, optimizer, lambda: engine.clip_grad_norm_(math.inf))
            state = engine.state_dict()
        assert found == pytest.approx(expected, rel=1e-5)
        assert hooked or call == "whole"  # an inner one is cut short, as everywhere but on the last stage
        for name, value in twin.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5)

    run_ranks(2, rank)


@sampled
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-h1"])
def test_losses_that_call_the_model_run_in_the_schedule(schedule: str) -> None:
    """The loss of each micro-batch is computed by a function of the loop, which goes on after the last stage only."""
    model, data = Decoder(), batches(NUM_STEPS, 8)
    ended: list[int] = []

    def rank(world: sw.World, mine: nn.Module, plan: dict[str, Any]) -> list[float]:
        def compute(micro_batch: tuple[Tensor, Tensor]) -> Tensor:
            loss = outside(mine, *micro_batch)
            ended.append(world.rank)
            return loss

        norms = []
        with sw.shard(mine, {**plan, "accumulate": 4}, optimizer=adamw(mine), world=world) as engine:
            for x, y in data:
                parts = list(zip(x.chunk(4), y.chunk(4), strict=True))
                norms.append(float(engine.forward_backward(parts, compute_loss=compute)))
                norms += [float(loss) for loss in engine.losses]
                norms.append(float(engine.step() or 0.0))
            with pytest.raises(ConfigError, match="takes compute_loss, or loss_fn and target"):
                engine.forward_backward(parts, compute_loss=compute, loss_fn=len)
        return norms

    [expected] = run_ranks(1, lambda world: rank(world, copy.deepcopy(model), {"preset": "ddp"}))
    ended.clear()
    models = [copy.deepcopy(model) for _ in range(2)]
    plan = {"preset": "zero2", "mesh": {"pp": 2}, "pipeline": {"schedule": schedule}}
    for norms in run_ranks(2, lambda world: rank(world, models[world.rank], plan)):
        assert norms == pytest.approx(expected, rel=1e-5)
    assert ended == [1] * 4 * NUM_STEPS


@pytest.mark.parametrize(
    ("compute", "words"),
    [
        (lambda model, batch: torch.ones(()), "compute_loss has returned on a rank without the last"),
        (lambda model, batch: model(*batch) + model(*batch), "more than once"),
    ],
)
def test_losses_that_do_not_call_the_model_once_are_refused(compute: Any, words: str) -> None:
    def use(engine: sw.Engine, model: nn.Module) -> None:
        engine.forward_backward(batches(1, 4), compute_loss=lambda batch: compute(model, batch))

    with pytest.raises((ModelError, FaultError), match=words):
        in_stages(use)


def test_logits_beside_a_loss_stay_on_the_last_stage() -> None:
    class Both(Decoder):
        def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
            logits = Decoder.forward(self, x)
            loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
            return {"loss": loss, "logits": logits, "per_sample": logits.mean((1, 2))}

    [(x, y)] = batches(1, 300)

    def work(engine: sw.Engine) -> None:
        found = engine(x, y)
        assert found["logits"].shape == (300, 6, VOCAB)
        assert "size=(300, 6, 67)" in repr(found["logits"])
        assert found["per_sample"].shape == (300,)
        for use in (lambda: found["logits"].sum(), lambda: torch.cat([found["logits"]])):
            with pytest.raises(StateError, match="call the model without labels"):
                use()
        (found["loss"] + found["per_sample"].sum()).backward()
        engine.step()
        with torch.no_grad():
            assert engine(x, y)["logits"].sum().isfinite()

    work_on_ranks(2, work, {"preset": "zero1", "mesh": {"pp": 2}}, Both)


@pytest.mark.parametrize("what", ["sp", "disk"])
def test_plans_under_which_less_can_be_called(what: str, tmp_path: Path) -> None:
    """Over split sequences no model inside of the one that is sharded; with activations on a disk, none."""
    plan = {"mesh": {"pp": 2, "sp": 2}} if what == "sp" else {"activations": "disk", "disk": str(tmp_path)}
    words = (
        r"part of the Holding that is sharded" if what == "sp" else r"cannot be called by itself.* engine\.train_step"
    )

    class Holding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = build("llama")

        def forward(self, **batch: Any) -> Any:
            return self.inside(**batch)

    num_ranks = 4 if what == "sp" else 2
    models = [Holding() for _ in range(num_ranks)]
    batch = padded(1)[0]

    def rank(world: sw.World) -> None:
        mine = models[world.rank]
        called = mine.inside if what == "sp" else mine
        with sw.shard(mine, {"preset": "zero1", "mesh": {"pp": 2}, **plan}, world=world):
            for call in (lambda: called(**batch), torch.no_grad()(lambda: called(**batch))):
                with pytest.raises(StateError, match=words):
                    call()

    run_ranks(num_ranks, rank)


def test_caches_of_generation_are_refused_outside_of_inference() -> None:
    tokens = torch.ones(2, 3, dtype=torch.long)

    def work(engine: sw.Engine) -> None:
        model: Any = engine.module
        with pytest.raises(StateError, match=r"outside of engine\.inference"):
            model.generate(tokens, max_new_tokens=2)
        with pytest.raises(ModelError, match="output_hidden_states collects something of all layers"):
            model(tokens, output_hidden_states=True)
        with torch.no_grad():
            assert model(tokens).past_key_values is None

    work_on_ranks(2, work, {"preset": "zero1", "mesh": {"pp": 2}}, lambda: build("llama"), None)


def test_logits_in_chunks_are_those_of_the_models_own_loss() -> None:
    model, batch = build("llama"), padded(1)[0]
    expected = model(**batch).loss.item()
    plan = {"preset": "zero3", "mesh": {"pp": 2}, "loss": {"logits": "chunked", "chunk": 4096}}

    def work(engine: sw.Engine) -> None:
        loss = engine.module(**batch).loss
        assert loss.item() == pytest.approx(expected, rel=1e-5)
        engine.backward(loss)
        engine.step()
        with pytest.raises(ModelError, match="Let the model compute its loss"):
            engine.module(batch["input_ids"])

    work_on_ranks(2, work, plan, model)


def test_losses_are_scaled_in_fp16() -> None:
    [(x, y)] = batches(1, 8)

    def use(engine: sw.Engine, model: nn.Module) -> None:
        expected = engine.forward_backward((x, y))
        norm = engine.clip_grad_norm_(math.inf)
        engine.zero_grad()
        model(x, y).backward()
        with pytest.raises(StateError, match=r"precision fp16 needs a scaled loss"):
            engine.step()
        engine.zero_grad()
        loss = model(x, y)
        engine.backward(loss)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-3)
        assert float(engine.step() or math.nan) == pytest.approx(float(norm), rel=1e-2)

    in_stages(use, precision="fp16")


def test_a_batch_that_differs_between_stages_is_refused() -> None:
    def use(engine: sw.Engine, model: nn.Module) -> None:
        x, y = batches(1, 4)[0]
        engine(x + engine.world.rank, y)

    with pytest.raises((DataError, FaultError), match="were given different batches"):
        in_stages(use)


def test_an_error_in_a_stage_is_told_to_all_and_names_it() -> None:
    def use(engine: sw.Engine, model: nn.Module) -> None:
        x, y = batches(1, 4)[0]

        def fail(*_: object) -> None:
            raise ZeroDivisionError("in the first block")

        if engine.world.rank == 0:
            model.blocks[0].register_full_backward_hook(fail)
        engine(x, y).backward()

    with pytest.raises((ZeroDivisionError, ShardwiseError)) as raised:
        in_stages(use)
    assert "in the first block" in str(raised.value) or "rank 0" in str(raised.value)


def test_unequal_shares_are_weighed_by_the_engine_only() -> None:
    [(x, y)] = batches(1, 8)

    def use(engine: sw.Engine, model: nn.Module) -> None:
        engine.weigh(3, of=4)
        with pytest.raises(StateError, match=r"Call engine\.backward\(loss\)"):
            model(x, y).backward()
        engine.zero_grad()
        engine.backward(model(x, y))
        assert math.isfinite(float(engine.step() or math.nan))

    in_stages(use)


class Encoding(nn.Module):
    """As in a `LightningModule`: what is called by position has a model of transformers, without a head, and is copied
    with all of its attributes. The last stage is one block."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = build("bert", is_decoder=False).bert

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        hidden: Tensor = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        return hidden

    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)


def masked_squares(hidden: Tensor, mask: Tensor) -> Tensor:
    return hidden.square().mul(mask[..., None]).mean()


@sampled
@pytest.mark.parametrize("schedule", [False, True], ids=["called", "in the schedule"])
def test_masks_that_hide_nothing_in_some_samples_are_dropped_there(schedule: bool) -> None:
    """Models of transformers do that, so some parts of a batch have masks, and others have none."""
    plain = Encoding()
    models = [copy.deepcopy(plain) for _ in range(2)]
    lengths = torch.tensor([[9, 9, 9, 9], [9, 9, 6, 9], [5, 9, 9, 9], [9, 9, 9, 9]])
    data = [(torch.randint(3, VOCAB, (4, 9)), (torch.arange(9) < ends[:, None]).long()) for ends in lengths]

    def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        found = []
        for ids, mask in data:
            loss = masked_squares(model(ids, mask), mask)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
        return found

    def rank(world: sw.World) -> list[Tensor]:
        mine = models[world.rank]
        ours = torch.optim.SGD(mine.parameters(), lr=0.1)
        plan = {"preset": "zero1", "mesh": {"pp": 2}, "accumulate": 4 if schedule else 1}
        with sw.shard(mine, plan, optimizer=ours, world=world) as engine:
            if not schedule:
                return trained(mine, ours)
            return [engine.train_step((ids, mask), mask, loss_fn=masked_squares) for ids, mask in data]

    expected = trained(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    for found in run_ranks(2, rank):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def in_fp32(forward: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*args: Any) -> Any:
        output = forward(*args)
        return [one.float() for one in output] if isinstance(output, list | tuple) else output.float()

    return wrapped


def test_wrappers_of_the_forward_see_outputs_of_the_model_alone() -> None:
    """accelerate's makes outputs fp32; what stages send to each other stays as it is."""
    seen: list[list[float]] = []

    def use(engine: sw.Engine, model: nn.Module) -> None:
        losses = []
        for is_wrapped in (False, True):
            if is_wrapped:
                model.forward = in_fp32(model.forward)  # type: ignore[method-assign]
            loss = engine(*batches(1, 8)[0])
            engine.backward(loss)
            engine.zero_grad()
            losses.append(loss.item())
        seen.append(losses)

    in_stages(use, precision="bf16")
    for losses in seen:
        assert losses[0] == pytest.approx(losses[1], rel=2**-8)  # a loss in bf16, and in fp32


class Sideways(Decoder):
    """Its blocks have samples in the second dimension."""

    def logits_of(self, hidden: Tensor) -> Tensor:
        return super().logits_of(hidden.transpose(0, 1)).transpose(0, 1)


class SidewaysByChance(Sideways):
    """Cannot run on fake tensors, so that this is not seen before."""

    def logits_of(self, hidden: Tensor) -> Tensor:
        return super().logits_of(hidden * (1.0 + 0.0 * float(torch.rand(()))))


def test_a_batch_of_a_model_that_puts_samples_elsewhere_stays_whole(caplog: pytest.LogCaptureFixture) -> None:
    model, data = Sideways(), batches(NUM_STEPS, 24)  # parts of 6 samples would look like the 6 tokens
    assert_loops_train_like(unsplit(model, data), model, {"preset": "zero1", "mesh": {"pp": 2}}, data)
    assert "begins with another dimension: [6, " in caplog.text


def test_a_model_that_puts_samples_elsewhere_unseen_is_refused() -> None:
    def work(engine: sw.Engine) -> None:
        engine(*batches(1, 24)[0])

    with pytest.raises((ModelError, FaultError), match="has to be the samples'"):
        work_on_ranks(2, work, {"preset": "zero1", "mesh": {"pp": 2}}, SidewaysByChance)


def test_tensors_that_need_a_gradient_are_refused() -> None:
    """Rank 0 would have the gradient, or part of it, and others none."""

    def use(engine: sw.Engine, model: nn.Module) -> None:
        x, y = batches(1, 4)[0]
        engine(torch.ones(x.shape, requires_grad=True), y)

    with pytest.raises((StateError, FaultError), match="was called with a tensor that needs a gradient"):
        in_stages(use)


def test_parametrized_weights_that_a_loop_caches() -> None:
    """A rehearsal before the first call computes them without values, and parts of a call have backwards of their
    own."""
    model, data = Decoder(num_blocks=2), batches(NUM_STEPS, 8)
    for block in model.blocks:
        weight_norm(block.up)
    weight_norm(model.head)

    def loss_of(model: Any, x: Tensor, y: Tensor) -> Tensor:
        with parametrize.cached():
            loss: Tensor = model(x, y) + model(y, x)
        return loss

    twin = plainly(model, data, loss_of)
    assert_loops_train_like(twin, model, {"preset": "zero1", "mesh": {"pp": 2}}, data, loss_of)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # make_dual calls it
def test_tensors_with_a_tangent_are_refused() -> None:
    """What the last stage returned had none."""

    def use(engine: sw.Engine, model: nn.Module) -> None:
        x, y = batches(1, 4)[0]
        ones = torch.ones(x.shape)
        engine(make_dual(ones, ones), y)

    with dual_level(), pytest.raises((StateError, FaultError), match="has a tangent, of forward-mode"):
        in_stages(use)


def frozen_below(model: nn.Module, step: int) -> None:
    """Unfreezes block after block, from the last, and freezes all but the head at the end."""
    model.tokens.requires_grad_(step == 3)
    for place, block in enumerate(model.blocks):
        block.requires_grad_(place >= 3 - step and step < 4)


def alternating(model: nn.Module, step: int) -> None:
    model.tokens.requires_grad_(step % 2 == 0)
    for place, block in enumerate(model.blocks):
        block.requires_grad_((place < 2) == (step % 2 == 0))


@sampled
@pytest.mark.parametrize("preset", ["zero1", "zero3"])
@pytest.mark.parametrize("freeze", [frozen_below, alternating], ids=lambda one: one.__name__)
@pytest.mark.parametrize("whole_steps", [False, True])
def test_freezing_in_training_may_change_what_is_sent(
    freeze: Callable[[nn.Module, int], None], preset: str, whole_steps: bool
) -> None:
    """Whether a stage's outputs need gradients; also back to what it was before."""
    torch.manual_seed(0)
    plain, data = Decoder(), batches(5, 8)
    models = [copy.deepcopy(plain) for _ in range(2)]
    accumulate = 2 if whole_steps else 1

    def train(model: nn.Module, step: Callable[[Any], float]) -> list[float]:
        losses = []
        for number, batch in enumerate(data):
            freeze(model, number)
            losses.append(step(batch))
        return losses

    optimizer = adamw(plain)

    def plain_step(batch: Any) -> float:
        loss = plain(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    losses = train(plain, plain_step)

    def rank(world: sw.World) -> tuple[list[float], dict[str, Tensor]]:
        model = models[world.rank]
        optimizer = adamw(model)
        plan = {"preset": preset, "mesh": {"pp": 2}, "accumulate": accumulate}

        def step(batch: Any) -> float:
            if whole_steps:
                return engine.train_step(batch).item()
            loss = model(*batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.item()

        with sw.shard(model, plan, optimizer=optimizer, world=world) as engine:
            return train(model, step), engine.state_dict()

    for ours, state in run_ranks(2, rank):
        assert ours == pytest.approx(losses, rel=1e-5)
        torch.testing.assert_close(state, dict(plain.state_dict()), rtol=1e-4, atol=1e-5)


def test_batch_norms_see_whole_batches() -> None:
    """In training; evaluated batches are split."""
    plain = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.BatchNorm1d(8))
    models = [copy.deepcopy(plain) for _ in range(2)]
    data = [torch.randn(4, 6) for _ in range(3)]
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for x in data:
        optimizer.zero_grad()
        (plain(x) - 1).square().sum().backward()
        optimizer.step()
    evaluated = plain.eval()(data[0])

    def rank(world: sw.World) -> tuple[dict[str, Tensor], Tensor]:
        mine = models[world.rank]
        optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
        with sw.shard(mine, {"preset": "zero1", "mesh": {"pp": 2}}, optimizer=optimizer, world=world) as engine:
            for x in data:
                engine.backward((mine(x) - 1).square().sum())
                engine.step()
            mine.eval()
            with torch.no_grad():
                return engine.state_dict(), mine(data[0])

    for state, found in run_ranks(2, rank):
        torch.testing.assert_close(found, evaluated, rtol=1e-5, atol=1e-5)
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-5)


def test_what_is_set_on_a_module_is_deleted_on_all_ranks() -> None:
    """As by code that switches something on before training, and off after it: NEFTune of transformers."""

    def rank(world: sw.World) -> None:
        model = Decoder()
        model.tokens.alpha = 5.0  # type: ignore[assignment]  # as transformers does
        with sw.shard(model, {"preset": "zero1", "mesh": {"pp": 2}, "accumulate": 2}, world=world):
            assert model.tokens.alpha == 5.0
            if world.rank == 1:
                model.tokens.alpha = 6.0  # type: ignore[assignment]
            del model.tokens.alpha
            assert not hasattr(model.tokens, "alpha")
            with pytest.raises(AttributeError):
                del model.tokens.alpha

    run_ranks(2, rank)


def test_parameters_that_are_whole_wake_once_for_all_parts_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """For its forwards, and again for its backwards: between the two, and after them, they are at rest. What blocks
    have returned is described once."""
    woken, described = list[ParamGuard](), list[object]()
    wake, describe = ParamGuard.wake, staged_model.described

    def counted(guard: ParamGuard) -> None:
        woken.extend([guard] * guard.is_resting)
        wake(guard)

    def noted(output: Any, tensors: list[Tensor]) -> Any:
        described.append(output)
        return describe(output, tensors)

    x, y = batches(1, 16)[0]

    def work(engine: sw.Engine) -> int:
        params = inside.flats(engine)

        def step() -> None:
            loss = engine(x, y)
            assert all(flat.guard.is_resting for flat in params)
            engine.backward(loss)
            assert all(flat.guard.is_resting for flat in params)
            engine.step()

        for _ in range(3):
            step()
        engine.world.barrier()
        monkeypatch.setattr(ParamGuard, "wake", counted)
        monkeypatch.setattr(staged_model, "described", noted)
        engine.world.barrier()
        step()
        return len(params)

    num_flats = work_on_ranks(2, work, {"preset": "zero1", "mesh": {"pp": 2}}, Decoder)
    assert len(woken) == 3 * sum(num_flats)  # and for the update
    assert len(described) <= 4  # the last stage's blocks, in the first of eight parts


def test_most_parts_of_a_call() -> None:
    assert [most_parts(samples, 2) for samples in (1, 8, 9, 12, 16, 100)] == [4, 4, 4, 6, 8, 8]
    assert [most_parts(samples, 4) for samples in (8, 16, 32, 64)] == [8, 8, 16, 16]


def test_how_a_batch_is_split() -> None:
    def sizes(*args: Any, most: int = 4, **kwargs: Any) -> list[int]:
        parts, rows = parts_of(MicroBatch(args, kwargs), lambda _: most)
        assert len(parts) == len(rows)
        return rows

    ids = torch.zeros(8, 12)
    assert sizes(ids) == [2, 2, 2, 2]
    assert sizes(input_ids=ids, labels=torch.zeros(8), num_items_in_batch=torch.tensor(5)) == [2, 2, 2, 2]
    assert sizes(ids, torch.zeros(1, 12)) == [2, 2, 2, 2]
    assert sizes(ids, most=3) == [3, 3, 2]
    assert sizes(torch.zeros(3, 12)) == [1, 1, 1]
    assert sizes(ids, most=1) == [8]
    assert sizes(torch.zeros(2, 1)) == [2]
    assert sizes(torch.zeros(8, 2)) == [4, 4]  # which cannot be taken for the second dimension
    assert sizes(ids, torch.zeros(5)) == [1]
    assert sizes(input_ids=torch.zeros(8, 3, 12), labels=torch.zeros(8)) == [1]  # three choices
    assert sizes(input_ids=ids[:1], cu_seq_lens_q=torch.tensor([0, 3, 7, 12])) == [1]
    assert sizes(ids[:1], torch.arange(4)) == sizes(ids[:1]) == [1]
    assert sizes(torch.arange(4)) == [1, 1, 1, 1]
    assert sizes(ids, lengths=[1] * 8) == [1]
    assert sizes(3, "x") == [1]
    both = MicroBatch((ids[:2],), {"scale": torch.ones(()), "pair": [torch.arange(2)] * 2})
    (first, _), _ = parts_of(both, lambda samples: samples)
    assert (len(first.args[0]), first.kwargs["scale"].item(), first.kwargs["pair"][1].tolist()) == (1, 1.0, [0])
