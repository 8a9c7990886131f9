"""DeepSpeed's hybrid engine: the model generates what the plain one would, with the weights that are trained."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from twins import batches

import shardwise as sw
import shardwise.integrations.deepspeed as deepspeed
from shardwise.errors import ConfigError, StateError
from shardwise.integrations.deepspeed.hybrid_engine import DeepSpeedHybridEngine
from shardwise.testing import run_ranks
from tests.models import VOCAB, Decoder, Transformer
from tests.thorough import sampled

Tensor = torch.Tensor
HYBRID = {
    "pinned": {"enabled": True},
    "unpinned": {"enabled": True, "pin_parameters": False},
    "in two parts": {"enabled": True, "inference_tp_size": 2, "tp_gather_partition_size": 4},
}


class Talker(Decoder):
    """Continues a text, always by the likeliest token."""

    def generate(self, tokens: Tensor, count: int, synced_gpus: bool | None = None) -> Tensor:
        assert not synced_gpus
        for _ in range(count):
            tokens = torch.cat([tokens, self(tokens)[:, -1:].argmax(-1)], 1)
        return tokens


def config(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        **more,
    }


def prompt(rank: int) -> Tensor:
    return torch.randint(VOCAB, (2, 3 + rank), generator=torch.Generator().manual_seed(rank))


@sampled
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("hybrid", HYBRID)
def test_generates_between_steps_what_the_plain_model_does(stage: int, hybrid: str) -> None:
    models = [Talker() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())

    def rank_of(world: sw.World) -> None:
        model = models[world.rank]
        settings = config(stage, hybrid_engine=HYBRID[hybrid])
        engine, optimizer, *_ = deepspeed.initialize(model=model, config=settings, world=world)
        assert isinstance(engine, DeepSpeedHybridEngine)
        seen = []
        for x, y in batches(2):
            plain = Talker()
            plain.load_state_dict(engine.module_state_dict())
            given, count = prompt(world.rank), 4 + 3 * world.rank
            expected = plain.generate(given, count)
            assert torch.equal(engine.generate(given, count), expected)
            assert torch.equal(model.generate(given, count=count, synced_gpus=True), expected)
            seen.append(expected)
            engine.backward(engine(x, y))
            engine.step()
            assert optimizer.overflow is False
        assert not torch.equal(*seen), "a step changes what comes"
        assert not vars(copy.deepcopy(Talker())).get("generate")
        engine.shardwise.rehearse(batches(1)[0])  # a copy of the model generates by itself
        again, *_ = deepspeed.initialize(model=model, config=config(stage), world=world)
        assert not isinstance(again, DeepSpeedHybridEngine)
        assert "generate" not in vars(model)

    run_ranks(2, rank_of)


def test_the_optimizer_says_whether_a_step_overflowed() -> None:
    def rank_of(world: sw.World) -> None:
        settings = config(2, fp16={"enabled": True, "initial_scale_power": 40, "hysteresis": 1})
        engine, optimizer, *_ = deepspeed.initialize(model=Talker(), config=settings, world=world)
        x, y = batches(1)[0]
        engine.backward(engine(x, y))
        engine.step()
        assert engine.overflow
        assert optimizer.overflow is True

    run_ranks(1, rank_of)


def test_a_model_that_cannot_generate_is_named() -> None:
    def rank_of(world: sw.World) -> None:
        settings = config(0, hybrid_engine={"enabled": True})
        engine, *_ = deepspeed.initialize(model=Transformer(), config=settings, world=world)
        with pytest.raises(StateError, match=r"Transformer has no generate\(\). Call the model inside"):
            engine.generate(prompt(0))
        engine.destroy()

    run_ranks(1, rank_of)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"enabled": "yes"}, "hybrid_engine.enabled is 'yes'; it must be true or false"),
        ({"enabled": True, "pin_parameters": 1}, "hybrid_engine.pin_parameters is 1"),
        ({"enabled": True, "inference_tp_size": 0}, "hybrid_engine.inference_tp_size is 0"),
    ],
)
def test_values_that_are_none_are_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        deepspeed.read_config(config(3, hybrid_engine=section), world_size=2)


def test_a_plan_says_how_it_generates() -> None:
    reading = deepspeed.read_config(config(3, hybrid_engine={"enabled": True}), world_size=2)
    assert "generate inside `with engine.inference():`" in reading.report(monitors_by="")
    assert "inference" not in reading.report()
