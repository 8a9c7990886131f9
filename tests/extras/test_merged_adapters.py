"""Adapters of peft in `engine.weights()`: merged unit by unit, they are bit for bit what `merge_and_unload` makes of
the whole model."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

import shardwise as sw
from shardwise.errors import ModelError
from shardwise.testing import run_ranks
from tests.thorough import sampled

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

VOCAB = 53
SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 16}
LINEAR = ["q_proj", "v_proj", "down_proj"]

ADAPTERS: dict[str, Any] = {
    "lora": lambda: peft.LoraConfig(r=4, target_modules=LINEAR),
    "rslora_of_embeddings": lambda: peft.LoraConfig(r=4, use_rslora=True, target_modules=["embed_tokens", "o_proj"]),
    "dora": lambda: peft.LoraConfig(r=4, use_dora=True, target_modules=LINEAR),
    "trained_head": lambda: peft.LoraConfig(r=4, target_modules=LINEAR, modules_to_save=["lm_head"]),
    "trained_tokens": lambda: peft.LoraConfig(r=4, target_modules=LINEAR, trainable_token_indices=[1, 5]),
    "loha": lambda: peft.LoHaConfig(r=4, target_modules=LINEAR),
    "ia3": lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("lora", {"preset": "zero3"}),
    ("dora", {"preset": "zero2"}),
    ("rslora_of_embeddings", {"preset": "zero3", "precision": "bf16"}),
    ("trained_head", {"preset": "zero3"}),
    ("trained_tokens", {"preset": "zero1"}),
    ("loha", {"preset": "zero3-offload"}),
    ("ia3", {"preset": "ddp"}),
    ("lora", {"preset": "zero3", "mesh": {"dp": 2, "tp": 2}}),
    ("lora", {"preset": "zero2", "mesh": {"pp": 2}}),
    ("trained_head", {"preset": "zero3", "mesh": {"pp": 2, "tp": 2}}),
]


def adapted(adapters: str) -> nn.Module:
    """No adapter is without effect."""
    torch.manual_seed(4)
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **HEADS))
    model: nn.Module = peft.get_peft_model(base, ADAPTERS[adapters]())
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param += 0.1 * torch.randn_like(param)
    return model


def on_ranks(model: nn.Module, plan: dict[str, Any], work: Any) -> list[Any]:
    num_ranks = math.prod(plan.get("mesh", {"dp": 2}).values())
    models = [copy.deepcopy(model) for _ in range(num_ranks)]

    def rank(world: sw.World) -> Any:
        mine = models[world.rank]
        optimizer = torch.optim.AdamW([one for one in mine.parameters() if one.requires_grad], lr=1e-2)
        with sw.shard(mine, plan, optimizer=optimizer, world=world) as engine:
            return work(engine)

    return run_ranks(num_ranks, rank)


@pytest.mark.parametrize(("adapters", "plan"), CASES)
@sampled
def test_merged_weights_are_those_of_peft(adapters: str, plan: dict[str, Any], tmp_path: Path) -> None:
    model = adapted(adapters)
    tokens = torch.randint(0, VOCAB, (4, 8))

    def work(engine: sw.Engine) -> Any:
        share, shares = engine.data_ranks
        rows = tokens.chunk(shares)[share]
        engine.train_step({"input_ids": rows, "labels": rows})
        stream = engine.weights()
        found = {name: tensor.clone() for name, tensor in stream}
        said = {one.name: (one.shape, one.dtype) for one in stream.metadata()}
        assert said == {name: (tuple(one.shape), one.dtype) for name, one in found.items()}
        engine.save_pretrained(tmp_path / "merged", merge_adapters=True)
        apart = {name: tensor.clone() for name, tensor in engine.weights(names="module", merge_adapters=False)}
        state = engine.state_dict()
        assert all(torch.equal(one, state[name]) for name, one in apart.items())
        return found, state

    results = on_ranks(model, plan, work)
    twin = copy.deepcopy(model)
    if plan.get("precision") == "bf16":  # the frozen base is kept in it
        for param in twin.parameters():
            param.data = param.data.to(torch.float32 if param.requires_grad else torch.bfloat16)
    twin.load_state_dict(results[0][1])
    merged = twin.merge_and_unload()
    merged.save_pretrained(tmp_path / "theirs")
    expected = load_file(tmp_path / "theirs" / "model.safetensors")
    for found, _ in results:
        assert found.keys() == expected.keys()
        for name, one in found.items():
            assert torch.equal(one, expected[name]), name
    loaded, info = type(merged).from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.equal(loaded.eval()(tokens).logits, type(merged).from_pretrained(tmp_path / "theirs")(tokens).logits)


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning")
@pytest.mark.parametrize("adapters", ADAPTERS)
@sampled
def test_adapters_of_all_stages_are_saved_by_peft(adapters: str, tmp_path: Path) -> None:
    """Also a head and tokens that are trained on one stage; and what is saved is loaded into a plain model."""
    model = adapted(adapters)
    tokens = torch.randint(0, VOCAB, (4, 8))

    def work(engine: sw.Engine) -> dict[str, torch.Tensor]:
        engine.train_step({"input_ids": tokens, "labels": tokens})
        mine: Any = engine.module
        with pytest.raises(ModelError, match="has the adapters of its own pipeline stages only"):
            mine.save_pretrained(tmp_path / "adapters")
        mine.save_pretrained(tmp_path / "adapters", state_dict=engine.state_dict(rank_0_only=True))
        return engine.state_dict()

    state = on_ranks(model, {"preset": "zero3", "mesh": {"pp": 2}}, work)[0]
    model.load_state_dict(state)
    written = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    expected = peft.get_peft_model_state_dict(model)
    assert written.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(written[name], value), name
    torch.manual_seed(4)
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **HEADS))
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapters")
    assert torch.equal(loaded.eval()(tokens).logits, model.eval()(tokens).logits)


def test_the_model_that_trains_is_not_changed() -> None:
    """To merge writes to copies: the next step is the one that would have been."""
    model = adapted("lora")
    tokens = torch.randint(0, VOCAB, (4, 8))

    def training(*, merges: bool) -> Any:
        def work(engine: sw.Engine) -> Any:
            losses = []
            for _ in range(3):
                if merges:
                    engine.weights().send(None)
                rows = tokens.chunk(2)[engine.world.rank]
                losses.append(engine.train_step({"input_ids": rows, "labels": rows}).item())
            return losses, engine.state_dict()

        return on_ranks(model, {"preset": "zero3"}, work)[0]

    (with_merging, state), (without, expected) = training(merges=True), training(merges=False)
    assert with_merging == without
    assert all(torch.equal(one, expected[name]) for name, one in state.items())


def test_what_cannot_be_merged_is_refused_with_the_way_out() -> None:
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **HEADS))
    model = peft.get_peft_model(base, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))

    def work(engine: sw.Engine) -> None:
        with pytest.raises(ModelError, match=r"is a prompt, which is no part.*Pass merge_adapters=False"):
            engine.weights()
        assert len(engine.weights(merge_adapters=False)) > 3
        with pytest.raises(ModelError, match="merge_adapters=True they are merged"):
            engine.save_pretrained("nowhere")

    on_ranks(model, {"preset": "zero3"}, work)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.parametrize("mesh", [{"dp": 2}, {"pp": 2}])
@pytest.mark.parametrize("more", [{"target_modules": ["embed_tokens", "q_proj"]}, {"modules_to_save": ["lm_head"]}])
def test_adapters_of_tied_weights_come_apart_or_not_at_all(more: dict[str, Any], mesh: dict[str, int]) -> None:
    """Merged, a head or an embedding would be missing, or be another than that which was trained."""
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **HEADS, tie_word_embeddings=True))
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, **{"target_modules": ["q_proj"], **more}))
    state = model.state_dict()

    def work(engine: sw.Engine) -> None:
        with pytest.raises(ModelError, match=r"is tied to .*merged, the two differ"):
            engine.weights()
        apart = dict(engine.weights(names="module", merge_adapters=False))
        assert all(torch.equal(one, state[name]) for name, one in apart.items())

    on_ranks(model, {"preset": "zero3", "mesh": mesh}, work)
