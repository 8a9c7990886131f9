"""A model wrapped by peft generates the plain model's tokens inside `engine.inference()`, also in pipeline stages."""

from __future__ import annotations

import copy
import math
from typing import Any

import peft
import pytest
import torch
import transformers
from rank_processes import on_ranks
from torch import nn

import shardwise as sw
from shardwise.testing import run_ranks
from tests import inside
from tests.thorough import sampled, thorough_only

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

VOCAB, NEW = 53, 6
SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 5}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 24, "pad_token_id": 0}
CASES: list[tuple[str, dict[str, int], dict[str, Any], int | None]] = [
    # preset, mesh, more of the plan, keep_bytes
    ("zero1", {"pp": 2}, {}, None),
    ("zero1", {"pp": 2}, {"pipeline": {"schedule": "interleaved"}}, None),
    ("zero3", {"pp": 2, "dp": 2}, {}, None),
    ("zero3", {"pp": 2, "dp": 2}, {}, 0),
    ("zero1", {"pp": 2, "tp": 2}, {}, None),
    ("zero2", {"pp": 2, "sp": 2}, {}, None),
]


def llama(task: str | None = "CAUSAL_LM") -> nn.Module:
    """With adapters that change the output. Without a `task`, peft has another class of wrapper."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **HEADS))
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type=task, lora_dropout=0.5)
    made: nn.Module = peft.get_peft_model(model, lora)
    for name, param in made.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(param, std=0.2)
    return made.eval()


def prompt(rows: int) -> dict[str, torch.Tensor]:
    """Prompts of several lengths, which end together."""
    tokens = torch.randint(1, VOCAB, (rows, 5), generator=torch.Generator().manual_seed(2))
    mask = torch.arange(5) >= torch.arange(rows)[:, None]
    return {"input_ids": tokens.masked_fill(~mask, 0), "attention_mask": mask.long()}


@torch.no_grad()
def uses(model: Any, place: int) -> list[torch.Tensor]:
    """What a data rank asks of the model: tokens, and logits of calls of the wrapper itself."""
    asked = prompt(2 + place)
    first = model(**asked)
    second = model(first.logits[:, -1:].argmax(-1), past_key_values=first.past_key_values)
    ways: list[dict[str, Any]] = [{}, {"use_cache": False}, {"num_beams": 3}]
    tokens = [model.generate(**asked, max_new_tokens=NEW - place, do_sample=False, **way) for way in ways]
    return [first.logits, second.logits, *tokens, model(**asked, use_cache=False).logits]


@sampled
@pytest.mark.parametrize("task", ["CAUSAL_LM", None], ids=["causal", "no task"])
@pytest.mark.parametrize(("preset", "mesh", "changes", "keep_bytes"), CASES, ids=str)
def test_greedy_tokens_and_logits(
    preset: str, mesh: dict[str, int], changes: dict[str, Any], keep_bytes: int | None, task: str | None
) -> None:
    model, num_ranks = llama(task), math.prod(mesh.values())
    models = [copy.deepcopy(model) for _ in range(num_ranks)]
    expected = [uses(model, place) for place in range(mesh.get("dp", 1))]

    def rank(world: sw.World) -> tuple[int, list[torch.Tensor]]:
        plan = {"preset": preset, "mesh": mesh, "accumulate": 4, **changes}
        with sw.shard(models[world.rank], plan, world=world) as engine, engine.inference(keep_bytes):
            return engine.data_ranks[0], uses(engine.module, engine.data_ranks[0])

    for place, found in run_ranks(num_ranks, rank):
        torch.testing.assert_close(found, expected[place], rtol=1e-5, atol=1e-5)


def with_and_without(model: Any, place: int) -> list[torch.Tensor]:
    """Greedy tokens with adapters, without, and with them again."""
    asked = prompt(1 + place)
    settings = {"max_new_tokens": NEW - place, "do_sample": False}
    found = [model.generate(**asked, **settings)]
    with model.disable_adapter():
        found += [model.generate(**asked, **settings) for _ in range(1 + place)]
    return [*found, model.generate(**asked, **settings)]


@pytest.mark.parametrize("keep_bytes", [0, pytest.param(None, marks=thorough_only("the other has all of its code"))])
def test_adapters_on_and_off_between_steps(keep_bytes: int | None) -> None:
    """The base is frozen, and generates without the adapters that are trained. peft calls the model that it wraps, and
    a token still takes one message."""
    model = llama().train()
    models = [copy.deepcopy(model) for _ in range(2)]
    tokens = prompt(2)["input_ids"]

    def rank(world: sw.World) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        own = models[world.rank]
        trained = [param for param in own.parameters() if param.requires_grad]
        with sw.shard(own, "zero3", optimizer=torch.optim.SGD(trained, lr=0.1), world=world) as engine:
            for _ in range(2):
                engine.backward(own(input_ids=tokens, labels=tokens).loss)
                engine.step()
            plain = copy.deepcopy(model)
            plain.load_state_dict(engine.state_dict())
            with engine.inference(keep_bytes):
                own.eval()
                found = with_and_without(own, world.rank)
                for length in (3, 3, 9):
                    inside.ledger(engine).clear()
                    own.generate(**prompt(1), max_new_tokens=length, do_sample=False, eos_token_id=None)
                messages = inside.ledger(engine).sent_bytes["exchange", "world"]
            assert messages == (0 if keep_bytes is None else 64 * 9)
            assert own.training
            return found, with_and_without(plain.eval(), world.rank)

    for found, expected in run_ranks(2, rank):
        assert all(map(torch.equal, found, expected))
        assert not torch.equal(found[0], found[1])


def sampled(model: Any) -> list[list[int]]:
    tokens: list[list[int]] = model.generate(**prompt(2), max_new_tokens=NEW, do_sample=True, top_k=20).tolist()
    return tokens


def rank_that_samples(mesh: dict[str, int]) -> tuple[list[list[int]], list[list[int]]]:
    """In evaluation mode, and in training mode, in which stages draw their own masks of dropout."""
    with sw.World.join() as world, sw.shard(llama(), {"mesh": mesh, "accumulate": 2}, world=world) as engine:
        torch.manual_seed(world.rank)
        with engine.inference():
            first = sampled(engine.module)
            engine.module.train()
            return first, sampled(engine.module)


@pytest.mark.parametrize("mesh", [{"pp": 2}], ids=str)
def test_sampled_tokens(mesh: dict[str, int]) -> None:
    expected = llama()
    torch.manual_seed(0)
    (first, dropped), *others = on_ranks(math.prod(mesh.values()), rank_that_samples, mesh)
    assert first == sampled(expected)
    assert all(other == (first, dropped) for other in others)
