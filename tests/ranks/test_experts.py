"""Models with experts distributed along `ep`, also with other axes, compared with the whole model in one process."""

from __future__ import annotations

import copy
import math
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pipelined
import pytest
import sequences
import split_models
import torch
from experts_models import dealt_run, mixture, whole_run
from fake_devices import WHENS, Devices, FakeGroups, FakeWork, When
from hypothesis import given, settings
from hypothesis import strategies as st
from test_pipeline import CLIP
from test_pipeline import assert_same as assert_same_in_stages
from test_pipeline import pipelined as pipelined_run
from torch import nn
from torch.nn import functional
from twins import Run, adamw, assert_alike, batches, chunked, work_on_ranks

import shardwise as sw
from shardwise.errors import ConfigError, ModelError
from shardwise.parallel.experts import MoE, auxiliary_loss, update_biases
from shardwise.testing import run_ranks
from tests.drawing import drawing
from tests.models import VOCAB, WIDTH, Decoder, ExpertBlock, Mixture
from tests.thorough import drawn, sampled, thorough_only, varies

Tensor = torch.Tensor
NUM_STEPS = drawn(2, 10)
BALANCED = {"balance_loss": 0.1, "z_loss": 0.01, "shared_size": 16}
BIASED = {"scores": "sigmoid", "bias_rate": 0.01, "scale": 1.5}
MESHES: list[tuple[str, dict[str, int], dict[str, Any], bool]] = [
    # preset, mesh, settings of the experts, shares memory
    ("ddp", {"ep": 4}, BALANCED, True),
    ("zero1", {"dp": 2, "ep": 2}, {}, True),
    ("zero2", {"dp": 2, "ep": 2}, BIASED, False),
    ("zero3", {"dp": 2, "ep": 2}, BALANCED, True),
    ("zero3", {"ep": 2, "dp": 2}, {}, False),
    ("zero3", {"ep": 4}, BIASED, True),
    ("zero3-kept", {"dp": 2, "ep": 2}, {"num_experts": 5}, True),
    ("zero3-kept", {"ep": 2}, {"num_experts": 2, "top_k": 1, "normalize": False}, False),
    ("hsdp", {"node": 1, "local": 2, "ep": 2}, {"gated": False, "activation": "gelu"}, True),
    ("hpz", {"node": 2, "local": 1, "ep": 2}, {"num_experts": 3, "top_k": 3}, True),
    ("zero2", {"ep": 3}, {"num_experts": 7}, True),
    ("zero3", {"dp": 4}, BALANCED, True),
]


def lamb(model: nn.Module) -> torch.optim.Optimizer:
    return sw.optim.Lamb(model.parameters(), lr=0.01)


IDS = ["-".join([preset, *(f"{axis}{size}" for axis, size in mesh.items())]) for preset, mesh, *_ in MESHES]


@sampled
@pytest.mark.parametrize(("preset", "mesh", "of_experts", "shares_memory"), MESHES, ids=IDS)
def test_every_preset_trains_as_the_whole_model(
    preset: str, mesh: dict[str, int], of_experts: dict[str, Any], shares_memory: bool
) -> None:
    """Losses (with those of routers), norms, all gradients and parameters, and router biases are equal."""
    model, data = mixture(**of_experts), batches(NUM_STEPS, 12)
    twin = whole_run(model, data, clip=0.5, after_step=update_biases)
    run = dealt_run(
        model, data, preset, mesh, clip_grad_norm=0.5, after_step=update_biases, shares_memory=shares_memory
    )
    assert_alike(run, twin)


@thorough_only("slow; smaller tests beside it cover the same code")
@sampled
@pytest.mark.parametrize("when", WHENS)
@pytest.mark.parametrize(("preset", "mesh", "of_experts"), [case[:3] for case in MESHES], ids=IDS)
def test_on_devices_whenever_collectives_act(
    preset: str, mesh: dict[str, int], of_experts: dict[str, Any], when: When
) -> None:
    """The counts of rows, the rows and their gradients are used once they have come, and not changed on their way."""
    model, data, devices = mixture(**of_experts), batches(2, 12), Devices(when)
    run = dealt_run(model, data, preset, mesh, clip_grad_norm=0.5, after_step=update_biases, devices=devices)
    assert_alike(run, whole_run(model, data, clip=0.5, after_step=update_biases))
    assert devices.num_works == devices.num_waited


@thorough_only("slow; smaller tests beside it cover the same code")
@pytest.mark.parametrize("when", WHENS)
@sampled
def test_on_devices_recomputed_and_accumulated(when: When) -> None:
    devices = Devices(when)
    race(mixture(recomputes=True, balance_loss=0.05), "zero3", {"dp": 2, "ep": 2}, accumulate=2, devices=devices)
    assert devices.num_works == devices.num_waited


def test_counts_of_rows_that_are_read_too_early_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are integers, by which the rows that follow are split."""
    honest = FakeGroups.all_to_all

    def hasty(self: FakeGroups, arrived: Any, sent: Any, group: Any) -> FakeWork:
        work = honest(self, arrived, sent, group)
        if not arrived[0].is_floating_point():
            work.wait = lambda: None  # type: ignore[method-assign]
        return work

    monkeypatch.setattr(FakeGroups, "all_to_all", hasty)
    with pytest.raises(RuntimeError, match=r"non-negative entries, but got split_sizes=\[.*-2"):
        dealt_run(mixture(), batches(1, 8), "zero3", {"ep": 2}, devices=Devices("late"))


def race(model: nn.Module, preset: str, mesh: dict[str, int], **wishes: Any) -> Run:
    """Train three steps, compare with the whole model, and return the results of the ranks."""
    data = batches(3, 8)
    known = {"make_optimizer": "make_optimizer", "accumulate": "shares", "clip_grad_norm": "clip"}
    run = dealt_run(model, data, preset, mesh, **wishes)
    assert_alike(run, whole_run(model, data, **{known[key]: wishes[key] for key in wishes if key in known}))
    return run


@sampled
@pytest.mark.parametrize("preset", ["zero1", "zero3"])
@pytest.mark.parametrize("kind", ["accumulated", "recomputed", "frozen", "lamb"])
def test_loops(kind: str, preset: str) -> None:
    model, wishes = mixture(recomputes=kind == "recomputed", balance_loss=0.05), {}
    if kind == "accumulated":
        wishes = {"accumulate": 2, "clip_grad_norm": 0.5}
    if kind == "lamb":
        wishes = {"make_optimizer": lamb}
    if kind == "frozen":
        frozen = (
            model.tokens,
            model.positions,
            model.blocks[0],
            model.blocks[1].moe.experts,
            model.blocks[2].moe.router,
        )
        for module in frozen:
            module.requires_grad_(False)
    race(model, preset, {"dp": 2, "ep": 2}, **wishes)


def test_a_penalty_of_the_loops_own_counts_once_for_experts() -> None:
    """Each rank along `ep` has that of its own experts, whose gradients are divided by the number of ranks."""
    data = batches(2, 8)

    def train(model: Any, engine: sw.Engine | None) -> dict[str, torch.Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with nullcontext() if engine is None else engine:
            for x, y in data:
                place, num = (0, 1) if engine is None else engine.data_ranks
                loss = model(x.chunk(num)[place], y.chunk(num)[place])
                (loss + 0.1 * torch.stack([param.square().sum() for param in model.parameters()]).sum()).backward()
                optimizer.step()
                optimizer.zero_grad()
            return {name: value.clone() for name, value in model.state_dict().items()}

    model = mixture()
    models = [copy.deepcopy(model) for _ in range(4)]
    plan = {"preset": "zero3", "mesh": {"dp": 2, "ep": 2}}

    def rank(world: sw.World) -> dict[str, torch.Tensor]:
        mine = models[world.rank]
        return train(mine, sw.shard(mine, plan, world=world))

    expected = train(model, None)
    for state in run_ranks(4, rank):
        torch.testing.assert_close(state, expected, rtol=1e-5, atol=1e-6)


OFFLOADED = {"param": {"tier": "host"}, "grad": {"tier": "host"}, "optim": {"tier": "host"}}


@thorough_only("slow; smaller tests beside it cover the same code")
@sampled
@pytest.mark.parametrize(("preset", "rows"), [("zero3", OFFLOADED), ("zero1", {"optim": {"tier": "host"}})])
def test_experts_rest_on_the_host_too(preset: str, rows: dict[str, Any]) -> None:
    race(mixture(balance_loss=0.05), preset, {"dp": 2, "ep": 2}, rows=rows)


@thorough_only("slow; smaller tests beside it cover the same code")
@sampled
@pytest.mark.parametrize("preset", ["zero1", "zero3"])
def test_muon_updates_the_matrices_beside_experts(preset: str) -> None:
    def muon(model: nn.Module) -> torch.optim.Optimizer:
        matrices = [param for name, param in model.named_parameters() if name.endswith(("qkv.weight", "out.weight"))]
        others = [param for param in model.parameters() if not any(param is one for one in matrices)]
        return sw.optim.Muon(
            [{"params": matrices}, {"params": others, "use_muon": False}], lr=0.01, iterate_in="fp32", adamw_eps=1e-4
        )

    race(mixture(), preset, {"dp": 2, "ep": 2}, make_optimizer=muon)


def test_ranks_with_one_expert_more_plan_the_order_of_the_others() -> None:
    """What ranks along `ep` gather together, they gather in one order, whatever their experts take; also where only
    some of it stays whole in inference."""
    model, data = mixture(num_experts=7), batches(3, 8)
    model.blocks[0].norm1.requires_grad_(False)

    def after(engine: sw.Engine) -> str:
        for keep_bytes in range(10_000, 100_000, 10_000):
            with torch.no_grad(), engine.inference(keep_bytes):
                engine.module(*(tensor[:2] for tensor in data[0]))
        return re.sub(r" +\d* B?", " ", str(engine.program()))

    run = dealt_run(model, data, "zero3", {"dp": 2, "ep": 2}, after=after)
    assert len(set(run.extra)) == 1
    assert_alike(run, whole_run(model, data), 1e-5)


def test_bytes_are_as_promised() -> None:
    def promised_and_measured(engine: sw.Engine) -> tuple[int, int]:
        memory = engine.memory()
        return memory.promised_total, memory.measured_total

    run = dealt_run(mixture(num_experts=5), batches(2, 8), "zero3", {"dp": 2, "ep": 2}, after=promised_and_measured)
    for promised, measured in run.extra:
        assert 0 < measured <= promised
    promises = [promised for promised, _ in run.extra]
    assert promises[0] == promises[2] > promises[1] == promises[3]  # three experts, and two


@varies
@settings(max_examples=drawn(1, 10), deadline=None, database=None)
@given(st.data())
def test_random_mixtures_on_random_meshes(data: st.DataObject) -> None:
    preset = data.draw(st.sampled_from(["ddp", "zero1", "zero2", "zero3", "zero3-kept"]))
    mesh = data.draw(st.sampled_from([{"ep": 2}, {"ep": 4}, {"dp": 2, "ep": 2}, {"ep": 2, "dp": 2}, {"ep": 3}]))
    num_experts = data.draw(st.integers(mesh["ep"], 6))
    drawn_settings = {
        "num_experts": num_experts,
        "top_k": data.draw(st.integers(1, num_experts)),
        "gated": data.draw(st.booleans()),
        "normalize": data.draw(st.booleans()),
        "scores": data.draw(st.sampled_from(["softmax", "sigmoid"])),
        "shared_size": data.draw(st.sampled_from([0, 5])),
        "balance_loss": data.draw(st.sampled_from([0.0, 0.1])),
        "z_loss": data.draw(st.sampled_from([0.0, 0.01])),
        "recomputes": data.draw(st.booleans()),
        "num_blocks": data.draw(st.integers(2, 3)),
    }
    model, rows = mixture(**drawn_settings), batches(2, 12)
    for module in data.draw(st.lists(st.sampled_from(list(model.modules())[1:]), max_size=2)):
        module.requires_grad_(False)
    accumulate = data.draw(st.sampled_from([1, 2] if math.prod(mesh.values()) < 4 else [1]))
    shares_memory = data.draw(st.booleans())
    run = dealt_run(model, rows, preset, mesh, accumulate=accumulate, shares_memory=shares_memory)
    assert_alike(run, whole_run(model, rows, shares=accumulate))


def test_experts_without_tokens_and_ranks_without_them() -> None:
    """First all tokens choose the experts of one rank, and the others get no gradient. Then one rank has no tokens."""
    model = mixture(num_blocks=2)
    router = model.blocks[1].moe.router
    router.weight.data[:2], router.weight.data[2:] = 0.01 * router.weight.data[:2], -1.0
    model.blocks[1].norm2.weight.data.fill_(0.01)
    model.blocks[1].norm2.bias.data.fill_(1.0)
    run = race(model, "zero3", {"ep": 2})
    own = run.grads[0]["blocks.1.moe.experts.down_proj"]
    assert own[:2].abs().sum(dim=(1, 2)).min() > 0
    assert torch.count_nonzero(own[2:]) == 0

    twin = mixture(num_blocks=2)
    x, y = batches(1, 2)[0]
    (2 * _summed(twin, x, y) / 2).backward()

    def work(engine: sw.Engine) -> dict[str, Tensor | None]:
        mine = engine.module
        rows = slice(0, 2) if engine.world.rank else slice(0, 0)
        engine.backward(2 * _summed(mine, x[rows], y[rows]))
        grads = {name: engine.get(name, "grad") for name, _ in mine.named_parameters()}
        engine.step()
        return grads

    for grads in work_on_ranks(2, work, {"preset": "zero2", "mesh": {"ep": 2}}, twin):
        for name, param in twin.named_parameters():
            torch.testing.assert_close(grads[name], param.grad, rtol=1e-5, atol=1e-5, msg=name)


def _summed(model: Mixture, x: Tensor, y: Tensor) -> Tensor:
    hidden = model.tokens(x) + model.positions.weight[: x.shape[1]]
    for block in model.blocks:
        hidden = block(hidden)
    return functional.cross_entropy(model.head(model.norm(hidden)).flatten(0, 1), y.flatten(), reduction="sum")


@thorough_only("slow; smaller tests beside it cover the same code")
@sampled
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_lower_precision_is_near(precision: str) -> None:
    model, data = mixture(balance_loss=0.05), batches(3, 8)
    twin = whole_run(model, data)
    run = dealt_run(model, data, "zero2", {"dp": 2, "ep": 2}, precision=precision)
    assert run.losses == pytest.approx(twin.losses, rel=2e-2)
    assert run.norms == pytest.approx(twin.norms, rel=5e-2)


def test_autocast_computes_experts_in_its_dtype() -> None:
    model = MoE(16, 8, 4)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(torch.randn(5, 16)).dtype == torch.bfloat16


# -- with other axes --------------------------------------------------------------------------------------


def expert_decoder(**settings: Any) -> Decoder:
    """With experts in every block."""
    return Decoder(tied=True, block=lambda _, width: ExpertBlock(width, **settings))


@thorough_only("slow; smaller tests beside it cover the same code")
@sampled
@pytest.mark.parametrize(
    ("preset", "schedule", "mesh"),
    [
        ("zero1", "1f1b", {"pp": 2, "ep": 2}),
        ("zero3", "interleaved", {"pp": 2, "ep": 2}),
        ("zero2", "zb-h1", {"pp": 2, "dp": 2, "ep": 2}),
    ],
)
def test_beside_stages(preset: str, schedule: str, mesh: dict[str, int]) -> None:
    model, data = expert_decoder(), pipelined.batches(2, 16)
    twin = pipelined.unsplit(model, data, clip=CLIP)
    assert_same_in_stages(pipelined_run(model, mesh, data, preset=preset, pipeline={"schedule": schedule}), twin)


class CutBlock(split_models.Block):
    def __init__(self, width: int, num_heads: int, balance_loss: float = 0.05) -> None:
        super().__init__(width, num_heads)
        del self.up, self.down
        self.moe = MoE(width, 20, 5, balance_loss=balance_loss)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.moe(self.norm2(x))


class CutTransformer(split_models.Transformer):
    def __init__(self) -> None:
        super().__init__(num_blocks=0)
        self.blocks.extend(CutBlock(24, 4) for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x) + auxiliary_loss(self)


CUT_EXPERTS = ("blocks.*.up", "blocks.*.down")
TENSOR = {**split_models.TENSOR, "plan": {k: v for k, v in split_models.TENSOR["plan"].items() if k not in CUT_EXPERTS}}


@thorough_only("slow; smaller tests beside it cover the same code")
@sampled
@pytest.mark.parametrize(
    ("preset", "mesh"),
    [("zero1", {"dp": 2, "ep": 2, "tp": 2}), ("zero3", {"ep": 2, "tp": 2}), ("ddp", {"tp": 2, "ep": 2})],
)
def test_with_split_attention(preset: str, mesh: dict[str, int]) -> None:
    model = CutTransformer()
    data = [(split_models.tokens(step, 8),) * 2 for step in range(3)]
    run = dealt_run(model, data, preset, mesh, tensor=TENSOR, clip_grad_norm=0.5)
    assert_alike(run, whole_run(model, data, clip=0.5))


class SplitMixture(nn.Module):
    """A mixture that takes position ids, like models with split sequences."""

    def __init__(self, *, has_cut_blocks: bool = False) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(sequences.TOKENS, WIDTH)
        self.blocks = nn.ModuleList(
            CutBlock(WIDTH, 4) if has_cut_blocks else ExpertBlock(WIDTH, balance_loss=0.05) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, input_ids: Tensor, position_ids: Tensor, labels: Tensor) -> Tensor:
        hidden = 0.1 * (self.tokens(input_ids) + self.positions(position_ids))
        for block in self.blocks:
            hidden = block(hidden)
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten()) + auxiliary_loss(self)


@thorough_only("slow; smaller tests beside it cover the same code")
@sampled
@pytest.mark.parametrize(
    ("preset", "mesh"),
    [("zero3", {"ep": 2, "sp": 2}), ("zero1", {"dp": 2, "ep": 2, "sp": 2}), ("ddp", {"sp": 2, "ep": 2})],
)
def test_beside_split_sequences(preset: str, mesh: dict[str, int]) -> None:
    model, data = SplitMixture(), sequences.batches(3)
    sequences.assert_trains_as_whole(model, data, preset, mesh, loss_of=own_loss, grads_of=None)


def own_loss(called: Any, batch: sequences.Batch) -> Tensor:
    loss: Tensor = called(**batch)
    return loss


ATTENTION = {**TENSOR, "plan": {name: rule for name, rule in TENSOR["plan"].items() if ".attn." in name}}


@thorough_only("slow; smaller tests beside it cover the same code")
@sampled
@pytest.mark.parametrize(
    ("preset", "mesh"), [("zero1", {"tp": 2, "sp": 2, "ep": 2}), ("zero3", {"ep": 2, "sp": 2, "tp": 2})]
)
def test_beside_split_sequences_and_split_attention(preset: str, mesh: dict[str, int]) -> None:
    model, data = SplitMixture(has_cut_blocks=True), sequences.batches(2)
    sequences.assert_trains_as_whole(model, data, preset, mesh, loss_of=own_loss, grads_of=None, tensor=ATTENTION)


@thorough_only("slow; smaller tests beside it cover the same code")
@sampled
@pytest.mark.parametrize(
    ("preset", "schedule", "mesh"),
    [("zero1", "1f1b", {"pp": 2, "tp": 2, "ep": 2}), ("zero3", "zb-h1", {"pp": 2, "ep": 2, "tp": 2})],
)
def test_beside_stages_and_split_attention(preset: str, schedule: str, mesh: dict[str, int]) -> None:
    """Every block has attention that can be split, and experts without a loss of their router."""
    model = Decoder(num_blocks=2, block=lambda _, width: CutBlock(width, 4, balance_loss=0.0))
    data = pipelined.batches(2, 16)
    twin = pipelined.unsplit(model, data, clip=CLIP)
    runs = pipelined_run(model, mesh, data, preset=preset, tensor=ATTENTION, pipeline={"schedule": schedule})
    assert_same_in_stages(runs, twin)


# -- whole tensors ----------------------------------------------------------------------------------------


@thorough_only("slow; smaller tests beside it cover the same code")
def test_a_checkpoint_goes_between_numbers_of_ranks(tmp_path: Path) -> None:
    """Each job resumes from the previous one, takes a step, and saves. Together they train like the whole model."""
    jobs = [
        ("zero1", {"dp": 2, "ep": 2}),
        ("zero3", {"dp": 1}),
        ("zero3", {"ep": 3}),
        ("ddp", {"dp": 2}),
        ("zero2", {"ep": 2}),
    ]
    model, data = mixture(num_experts=5, bias_rate=0.01), batches(len(jobs), 12)
    twin = whole_run(model, data, after_step=update_biases)
    losses: list[float] = []
    for batch, (preset, mesh) in zip(data, jobs, strict=True):
        models = [mixture(num_experts=5, bias_rate=0.01) for _ in range(math.prod(mesh.values()))]
        plan = {"preset": preset, "mesh": mesh}

        def rank(
            world: sw.World, models: list[Mixture] = models, plan: dict[str, Any] = plan, batch: Any = batch
        ) -> tuple[float, dict[str, Tensor]]:
            mine = models[world.rank]
            with sw.shard(mine, plan, optimizer=adamw(mine), world=world) as engine:
                if losses:
                    assert engine.resume(tmp_path) is not None
                share, num_shares = engine.data_ranks
                loss = engine(*chunked(batch, num_shares)[share])
                engine.backward(loss)
                engine.step()
                update_biases(mine)
                engine.save(tmp_path, wait=False)
                return engine.mean(loss.item()), engine.state_dict()

        told = run_ranks(len(models), rank)
        losses.append(told[0][0])
    assert losses == pytest.approx(twin.losses, rel=1e-5)
    for _, params in told:
        for name, expected in twin.params.items():
            torch.testing.assert_close(params[name], expected, rtol=1e-5, atol=1e-5, msg=name)


@thorough_only("slow; smaller tests beside it cover the same code")
def test_whole_tensors_are_read_and_written() -> None:
    model = mixture(num_experts=5)
    data = batches(4, 8)
    name = "blocks.1.moe.experts.down_proj"
    twin = copy.deepcopy(model)
    twin.load_state_dict({key: value + 0.01 for key, value in model.state_dict().items()})
    twin.get_parameter(name).data.mul_(2)
    changed = twin.state_dict()
    expected = whole_run(twin, data)
    models = [copy.deepcopy(model) for _ in range(4)]

    def rank(world: sw.World) -> tuple[list[float], dict[str, Tensor]]:
        mine = models[world.rank]
        optimizer, losses = adamw(mine), []
        with sw.shard(
            mine, {"preset": "zero1", "mesh": {"dp": 2, "ep": 2}}, optimizer=optimizer, world=world
        ) as engine:
            for key, param in model.named_parameters():
                assert torch.equal(engine.get(key), param), key
            engine.load_state_dict({key: value + 0.01 for key, value in model.state_dict().items()})
            engine.set(name, (model.get_parameter(name) + 0.01) * 2)
            assert all(torch.equal(engine.get(key), changed[key]) for key, _ in model.named_parameters())
            assert all(torch.equal(value.clone(), changed[key]) for key, value in mine.state_dict().items())
            mine.load_state_dict({key: value.clone() for key, value in mine.state_dict().items()})
            assert all(torch.equal(engine.get(key), changed[key]) for key, _ in model.named_parameters())
            part = r"this rank has the part \[.*:.*, :, :\] of \[5, 32, 24\]"
            with pytest.raises(ModelError, match=part), engine.gathered(name):
                pass
            for batch in data:
                share, num_shares = engine.data_ranks
                loss = engine(*chunked(batch, num_shares)[share])
                engine.backward(loss)
                engine.step()
                losses.append(engine.mean(loss.item()))
            at = [key for key, _ in mine.named_parameters()].index(name)
            assert optimizer.state_dict()["state"][at]["exp_avg"].shape == (5, 32, 24)
            return losses, engine.state_dict()

    for losses, params in run_ranks(4, rank):
        assert losses == pytest.approx(expected.losses, rel=1e-5)
        for key, value in expected.params.items():
            torch.testing.assert_close(params[key], value, rtol=1e-5, atol=1e-5, msg=key)


def test_a_model_that_never_is_whole_has_the_first_values_of_its_constructor() -> None:
    expected = mixture(num_experts=5).state_dict()

    def rank(world: sw.World) -> dict[str, Tensor]:
        with drawing(), sw.deferred_init():
            mine = mixture(num_experts=5)
        with sw.shard(mine, {"preset": "zero3", "mesh": {"ep": 2}}, world=world) as engine:
            return engine.state_dict()

    for state in run_ranks(2, rank):
        assert all(torch.equal(state[name], value) for name, value in expected.items())


def test_ranks_evaluate_and_generate_together() -> None:
    model, (x, y) = mixture().eval(), batches(1, 8)[0]
    expected = model(x, y)

    def work(engine: sw.Engine) -> list[Tensor]:
        mine = engine.module
        with torch.no_grad():
            found = [mine(x, y)]
            for keep_bytes in (None, 0):
                with engine.inference(keep_bytes):
                    found.append(mine(x, y))
            return found

    for found in work_on_ranks(2, work, {"preset": "zero3", "mesh": {"ep": 2}}, model, None):
        for loss in found:
            torch.testing.assert_close(loss, expected)


def test_each_rank_says_which_experts_it_has() -> None:

    def work(engine: sw.Engine) -> str:
        return str(engine)

    for said in work_on_ranks(2, work, {"mesh": {"ep": 2}}, lambda: mixture(num_experts=5), None):
        assert "  ep 0: experts 0-2 of 5 in blocks.1.moe.experts and 1 more\n" in said
        assert "  ep 1: experts 3-4 of 5 in blocks.1.moe.experts and 1 more" in said


# -- refusals ---------------------------------------------------------------------------------------------


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (
        {"num_experts": 3},
        {"mesh": {"ep": 4}},
        r"moe.experts has 3 experts for 4 ranks along ep. Choose a size of ep of",
    ),
    ({}, {"mesh": {"ep": 4}, "compile": "eager"}, "Leave it out of a plan with ep"),
    (
        {"bias_rate": 0.1},
        {"mesh": {"dp": 4}, "compile": "eager"},
        "moe.router has a balance_loss, z_loss or bias_rate, for",
    ),
    (
        {"balance_loss": 0.1},
        {"mesh": {"pp": 2, "ep": 2}, "accumulate": 2},
        r"moe.router has a balance_loss or z_loss, which the last stage",
    ),
    (
        {},
        {"mesh": {"ep": 2, "tp": 2}, "tensor": {"sequence": True}},
        "the ranks along tp have different tokens",
    ),
]


@pytest.mark.parametrize(
    ("settings", "plan", "said"), REFUSED, ids=["few", "compile", "bias", "stages", "tensor.sequence"]
)
def test_what_cannot_be_is_refused_before_anything_changes(
    settings: dict[str, Any], plan: dict[str, Any], said: str
) -> None:
    models = [mixture(**settings) for _ in range(4)]
    before = copy.deepcopy(models[0].state_dict())
    with pytest.raises((ConfigError, ModelError), match=said):
        run_ranks(4, lambda world: sw.shard(models[world.rank], plan, world=world))
    assert all(torch.equal(value, before[name]) for name, value in models[0].state_dict().items())


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(ModelError, match="Linear has none that are known"):
        run_ranks(2, lambda world: sw.shard(nn.Linear(4, 4), {"mesh": {"ep": 2}}, world=world))


class Listed(nn.Module):
    """A mixture as commonly written: one module per expert, called with its tokens in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 3, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 8)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.gate(x).argmax(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            out[chosen == number] = expert(x[chosen == number])
        return out


def test_experts_that_are_modules_of_their_own_are_refused_with_what_takes_their_place() -> None:
    models = [nn.Sequential(Listed(), Listed()) for _ in range(2)]
    said = r"0.experts has 3 experts as modules of their own, which 0 calls .* shardwise.experts.MoE\(.*num_experts=3"
    with pytest.raises(ModelError, match=said):
        run_ranks(2, lambda world: sw.shard(models[world.rank], {"mesh": {"ep": 2}}, world=world))
