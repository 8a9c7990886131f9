"""DeepSpeed's MoE layer with its experts divided over ranks, compared with the same model in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import shardwise as sw
import shardwise.integrations.deepspeed as deepspeed
from shardwise.errors import ConfigError, DataError
from shardwise.integrations.deepspeed.moe import (
    MoE,
    configure_moe_param_groups,
    has_moe_layers,
    is_moe_param,
    is_moe_param_group,
)
from shardwise.testing import run_ranks
from tests.ranks.twins import normal_batches
from tests.thorough import sampled

Tensor = torch.Tensor
WIDTH, TOKENS, RANKS, STEPS = 8, 12, 2, 4
LAYERS: list[tuple[int, int, dict[str, Any]]] = [
    # stage, ep_size, arguments
    (2, 2, {"num_experts": 4, "k": 1, "use_rts": False, "capacity_factor": 0.7, "use_residual": True}),
    (3, 2, {"num_experts": 4, "k": 2, "capacity_factor": 0.8, "min_capacity": 1, "top2_2nd_expert_sampling": False}),
    (1, 1, {"num_experts": 3, "k": 2, "drop_tokens": False, "top2_2nd_expert_sampling": False}),
    (0, 2, {"num_experts": 6, "k": 3, "capacity_factor": 0.5, "min_capacity": 2}),
    (3, 1, {"num_experts": 2, "k": 1, "use_rts": False, "drop_tokens": False, "use_tutel": True}),
]


class Expert(nn.Module):
    """An expert with biases, a norm, and a second output that the layer ignores."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.first, self.last = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return self.last(functional.gelu(self.first(self.norm(x)))), None


class Model(nn.Module):
    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.inward, self.outward = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.moe = MoE(WIDTH, Expert(), **settings)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out, l_aux, counts = self.moe(torch.tanh(self.inward(x)))
        assert counts.sum() == x.shape[0] * x.shape[1] * self.moe.deepspeed_moe.gate.rules.k
        return (self.outward(out)[..., 0] - y).square().mean() + 0.1 * l_aux


def build(ep_size: int, settings: dict[str, Any]) -> Model:
    torch.manual_seed(0)
    model = Model(ep_size=ep_size, **settings)
    with torch.no_grad():  # copies of one expert are identical, so change them
        for param in model.moe.deepspeed_moe.experts.parameters():
            param.add_(torch.randn_like(param), alpha=0.3)
    return model


def data() -> list[tuple[Tensor, Tensor]]:
    return normal_batches(STEPS, (RANKS, 2, TOKENS, WIDTH), (RANKS, 2, TOKENS))


def alone(model: Model) -> tuple[list[float], list[float]]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses, norms = [], []
    for x, y in data():
        loss = torch.stack([model(x[rank], y[rank]) for rank in range(RANKS)]).mean()
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms


@sampled
@pytest.mark.parametrize(("stage", "ep_size", "settings"), LAYERS)
def test_trains_as_one_process(stage: int, ep_size: int, settings: dict[str, Any]) -> None:
    twin = build(ep_size, settings)
    models = [build(ep_size, settings) for _ in range(RANKS)]
    wanted = alone(twin)
    config = {"zero_optimization": {"stage": stage}, "gradient_clipping": 0.5}

    def rank_of(world: sw.World) -> tuple[list[float], list[float], dict[str, Tensor], int]:
        model = models[world.rank]
        groups = configure_moe_param_groups(list(model.parameters()))
        assert [is_moe_param_group(group) for group in groups] == [False, True]
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, world=world)
        losses, norms = [], []
        for x, y in data():
            loss = engine(x[world.rank], y[world.rank])
            engine.backward(loss)
            engine.step()
            losses.append(engine.shardwise.mean(loss.item()))
            norms.append(float(engine.get_global_grad_norm() or 0.0))
        held = model.moe.deepspeed_moe.experts.first_weight.shape[0]
        return losses, norms, engine.shardwise.state_dict(), held

    for losses, norms, state, held in run_ranks(RANKS, rank_of):
        assert losses == pytest.approx(wanted[0], abs=1e-5)
        assert norms == pytest.approx(wanted[1], abs=1e-5)
        assert held == settings["num_experts"] // ep_size
        for name, value in twin.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-5)


class InStages(nn.Module):
    """A layer of a `PipelineModule`: the loss is left out, as DeepSpeed's pipelines leave it out, or passed on."""

    def __init__(self, passes: bool) -> None:
        super().__init__()
        self.moe = MoE(WIDTH, Expert(), num_experts=2, k=1, use_rts=False, drop_tokens=False)
        self.passes = passes

    def forward(self, given: Any) -> Any:
        x, so_far = given if self.passes else (given, None)
        out, l_aux, _ = self.moe(x)
        return (x + out, so_far + l_aux) if self.passes else x + out


class Begin(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x.new_zeros(())


@pytest.mark.parametrize("passes", [False, True])
def test_in_stages_of_a_pipeline(passes: bool) -> None:
    def loss_of(out: Any, y: Tensor) -> Tensor:
        squares: Tensor = ((out[0] if passes else out).sum(-1) - y).square().mean()
        return squares + 0.1 * out[1] if passes else squares

    def build() -> Any:
        torch.manual_seed(0)
        begin = Begin(WIDTH, WIDTH) if passes else nn.Linear(WIDTH, WIDTH)
        layers = [begin, *[InStages(passes) for _ in range(3)]]
        return deepspeed.pipe.PipelineModule(layers, num_stages=2, loss_fn=loss_of, partition_method="uniform")

    twin, modules = build(), [build() for _ in range(2)]
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.01)
    expected = []
    for x, y in data():
        loss = torch.stack([loss_of(twin(x[part]), y[part]) for part in range(2)]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "gradient_clipping": 0.0}

    def rank(world: sw.World) -> list[float]:
        module = modules[world.rank]
        engine, *_ = deepspeed.initialize(
            model=module, config=config, optimizer=torch.optim.SGD(module.parameters(), lr=0.01), world=world
        )
        batches = ((x[part], y[part]) for x, y in data() for part in range(2))
        return [float(engine.train_batch(data_iter=batches)) for _ in range(STEPS)]

    for losses in run_ranks(2, rank):
        assert losses == pytest.approx(expected, rel=1e-5)


def test_what_scripts_ask_of_a_model() -> None:
    model = build(2, {"num_experts": 4})
    assert (has_moe_layers(model), has_moe_layers(model.inward)) == ((True, 4), (False, 0))
    own = {name for name, param in model.named_parameters() if is_moe_param(param)}
    assert own == {name for name, _ in model.named_parameters() if ".experts." in name}
    assert model.moe.deepspeed_moe.experts.first_weight.shape == (4, 12, WIDTH)


def test_refused_by_name() -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"num_experts": 3, "ep_size": 2}, "not a multiple of ep_size 2"),
        ({"num_experts": 2, "enable_expert_tensor_parallelism": True}, "enable_expert_tensor_parallelism"),
        ({"num_experts": 2, "k": 3}, "k is 3; with 2 experts it must be 1 to 2"),
        ({"num_experts": 2, "noisy_gate_policy": "Some"}, "noisy_gate_policy is 'Some'"),
    ]
    for settings, sentence in refused:
        with pytest.raises(ConfigError, match=sentence):
            MoE(WIDTH, Expert(), **settings)
    with pytest.raises(ConfigError, match=r"has buffers \(running_mean"):
        MoE(WIDTH, nn.BatchNorm1d(WIDTH))
    layer = MoE(WIDTH, Expert(), num_experts=2, k=2)
    with pytest.raises(ConfigError, match="used_token needs k = 1"):
        layer(torch.ones(8, WIDTH), torch.ones(8))
    with pytest.raises(DataError, match="3 tokens, fewer than min_capacity 4"):
        MoE(WIDTH, Expert(), num_experts=2)(torch.ones(3, WIDTH))
    different = nn.Sequential(MoE(WIDTH, Expert(), 2, 2), MoE(WIDTH, Expert(), 2, 1))
    with pytest.raises(ConfigError, match="need the same ep_size, but 0 has 2, 1 has 1"):
        run_ranks(1, lambda world: deepspeed.initialize(model=different, config={}, world=world))
