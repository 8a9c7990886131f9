"""`deepspeed.init_inference`: what a model generates is what the plain one does, whatever arguments a script gives."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_transformers import VOCAB, library, llama
from torch import nn

import shardwise as sw
import shardwise.integrations.deepspeed as deepspeed
from shardwise.errors import ConfigError, StateError
from shardwise.init.quantized import QuantizedWeight
from shardwise.integrations.deepspeed import fields, zero
from shardwise.integrations.deepspeed.inference import InferenceEngine
from shardwise.integrations.deepspeed.inference_config import read_inference_config
from shardwise.testing import run_ranks
from tests.thorough import sampled

Tensor = torch.Tensor
TEXT = {"vocab_size": VOCAB, "hidden_size": 32, "bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
HEADS = {"num_hidden_layers": 2, "num_attention_heads": 4}


def made(name: str, **settings: Any) -> nn.Module:
    """A model of transformers of this name, whose answers do not repeat one token."""
    torch.manual_seed(0)
    parts = library()
    kind = "ForConditionalGeneration" if name in ("T5",) else "LMHeadModel" if name == "GPT2" else "ForCausalLM"
    model = getattr(parts, f"{name}{kind}")(getattr(parts, f"{name}Config")(**settings))
    for param in model.parameters():
        if param.dim() > 1:
            nn.init.normal_(param, std=0.3)
    return model.eval()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "GPT2": lambda: made("GPT2", vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=1),
    "OPT": lambda: made("OPT", **TEXT, **HEADS, ffn_dim=48, word_embed_proj_dim=32),
    "Bloom": lambda: made("Bloom", **TEXT, n_layer=2, n_head=4),
    "GPTNeoX": lambda: made("GPTNeoX", **TEXT, **HEADS, intermediate_size=48),
    "Falcon": lambda: made("Falcon", **TEXT, **HEADS, new_decoder_architecture=True, num_kv_heads=2),
    "Llama with one key head": lambda: made("Llama", **TEXT, **HEADS, intermediate_size=48, num_key_value_heads=1),
    "Mistral with a window": lambda: made(
        "Mistral", **TEXT, **HEADS, intermediate_size=48, num_key_value_heads=2, sliding_window=4
    ),
    "Qwen2": lambda: made("Qwen2", **TEXT, **HEADS, intermediate_size=48, num_key_value_heads=2),
    "Phi3": lambda: made("Phi3", **TEXT, **HEADS, intermediate_size=48, num_key_value_heads=2),
    "Mixtral": lambda: made(
        "Mixtral", **TEXT, **HEADS, intermediate_size=48, num_key_value_heads=2, num_local_experts=4
    ),
    "T5": lambda: made(
        "T5", vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0,
        pad_token_id=0, eos_token_id=1,
    ),
}  # fmt: skip
PROMPTS = torch.randint(2, VOCAB, (3, 7), generator=torch.Generator().manual_seed(4))
PADDED = PROMPTS.masked_fill(torch.arange(7) < torch.tensor([[0], [2], [4]]), 0)
"""Of different lengths, padded on the left."""


def said(model: Any, **how: Any) -> Tensor:
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, **how}
    return model.generate(input_ids=PADDED, attention_mask=PADDED.ne(0).long(), **settings)


@sampled
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("beams", [1, 2])
def test_models_say_what_they_say_plainly(name: str, beams: int) -> None:
    """With the arguments of DeepSpeed's own examples, of which some let theirs fail for these models."""
    plain = MODELS[name]()
    expected = said(plain, num_beams=beams)
    assert len({tuple(answer) for answer in expected[:, -6:].tolist()}) == 3

    def rank_of(world: sw.World) -> None:
        engine = deepspeed.init_inference(
            copy.deepcopy(plain), dtype=torch.float, mp_size=2, replace_with_kernel_inject=True, max_tokens=4,
            enable_cuda_graph=True, world=world,
        )  # fmt: skip
        assert isinstance(engine, InferenceEngine)
        assert torch.equal(said(engine, num_beams=beams), expected)
        assert engine.config is engine.module.config
        assert sum(param.numel() for param in engine.parameters()) < sum(param.numel() for param in plain.parameters())

    run_ranks(2, rank_of)


def test_ranks_beside_those_that_split_it_have_it_whole(capsys: pytest.CaptureFixture[str]) -> None:
    plain = llama().eval()

    def rank_of(world: sw.World) -> None:
        engine = deepspeed.init_inference(copy.deepcopy(plain), {"dtype": "fp32", "kernel_inject": True}, world=world)
        engine.profile_model_time(use_cuda_events=False)
        for _ in range(world.rank):
            assert torch.equal(engine(PADDED).logits, plain(PADDED).logits)
        assert len(engine.model_times()) == world.rank
        assert engine.model_times() == []
        engine.destroy()

    run_ranks(2, rank_of)
    assert capsys.readouterr().out.count("replace_with_kernel_inject: not needed; the model's own code computes") == 1
    with pytest.raises(StateError, match="needs profile_model_time"):
        InferenceEngine(plain, read_inference_config(None, {})).model_times()


@sampled
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", ["int8", "fp16", "bf16", ""])
def test_precisions(dtype: str, bits: int) -> None:
    plain = llama().eval()

    def rank_of(world: sw.World) -> None:
        given = {"dtype": dtype} if dtype else {}
        quant = {"enabled": True, "weight": {"num_bits": bits}}
        engine = deepspeed.init_inference(copy.deepcopy(plain), {"quant": quant}, **given, world=world)
        expected = torch.bfloat16 if dtype == "bf16" else torch.float16
        assert {param.dtype for param in engine.parameters()} == {expected}
        narrow = [one for one in engine.parameters() if isinstance(one, QuantizedWeight)]
        assert len(narrow) == (7 * 3 if dtype == "int8" else 0)
        assert all((one.lows is None) == (bits == 8) for one in narrow)
        assert torch.isfinite(engine(PADDED).logits).all()

    run_ranks(1, rank_of)


@sampled
@pytest.mark.parametrize("form", ["json", "dict", "list", "folder", "base_dir"])
@pytest.mark.parametrize("tp", [1, 2])
def test_a_model_without_values_is_filled_from_files(form: str, tp: int, tmp_path: Path) -> None:
    """As DeepSpeed's example does for models that are too large for a host."""
    plain = made("Bloom", **TEXT, n_layer=2, n_head=4)
    state = list(plain.transformer.state_dict().items())  # BigScience's files have no prefix, and no tied head
    files = []
    for number in range(2):
        files.append(f"pytorch_model-{number}.bin")
        torch.save(dict(state[number::2]), tmp_path / files[-1])
    listed = {"type": "BLOOM", "checkpoints": files, "version": 1.0}
    (tmp_path / "checkpoints.json").write_text(json.dumps(listed))
    plain.save_pretrained(tmp_path / "whole")
    given: dict[str, Any] = {
        "json": {"checkpoint": str(tmp_path / "checkpoints.json"), "base_dir": str(tmp_path)},
        "dict": {"checkpoint": {**listed, "base_dir": str(tmp_path)}},
        "list": {"checkpoint": files, "base_dir": str(tmp_path)},
        "folder": {"checkpoint": str(tmp_path / "whole")},
        "base_dir": {"ckpt_config": {"checkpoint_dir": "whole", "base_dir": str(tmp_path)}},
    }[form]

    def rank_of(world: sw.World) -> None:
        with zero.OnDevice(dtype=torch.float32, device="meta"):
            model = library().BloomForCausalLM(plain.config)
        engine = deepspeed.init_inference(model, dtype="fp32", tp={"tp_size": tp}, **given, world=world)
        assert torch.equal(said(engine), said(plain))

    run_ranks(tp, rank_of)


def test_arguments_may_be_in_a_file_and_under_older_names(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"mp_size": 2, "dtype": "half", "moe": False, "quant": None}))
    found = read_inference_config(tmp_path / "ds.json", {"tensor_parallel": {"tp_size": 2}, "max_tokens": 7})
    assert (found.tp_size, found.precision, found.weights) == (2, "fp16", None)
    assert found.value("max_out_tokens") == 7
    assert "max_out_tokens: not needed" in found.report()
    assert read_inference_config({"tp": {"enabled": False, "tp_size": 2}}, {}).tp_size == 1
    default = deepspeed.default_inference_config()
    assert (default["dtype"], default["tensor_parallel"]["tp_size"], default["max_out_tokens"]) == ("fp16", 1, 1024)
    assert read_inference_config(default, {}).weights is None
    assert all(field.why or field.status is fields.FieldStatus.HONOURED for field in fields.INFERENCE.values())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dtype": "int7"}, "dtype is 'int7'"),
        ({"tp_sise": 2}, "init_inference\\(\\) has no argument tp_sise"),
        ({"tensor_parallel": {"size": 2}}, "has no argument tensor_parallel.size"),
        ({"tensor_parallel": 2}, "tensor_parallel is 2; it must be an object"),
        ({"mp_size": 0}, "tensor_parallel.tp_size is 0"),
        ({"mp_size": 2, "tp": {"tp_size": 1}}, "tensor_parallel.tp_size is given twice, as 2 and as 1"),
        ({"mpu": object()}, "tensor_parallel.mpu: groups follow from tp_size"),
        ({"save_mp_checkpoint_path": "x"}, "save_mp_checkpoint_path: nothing is written"),
        ({"moe": {"ep_size": 2}}, "moe.ep_size: every rank has all experts"),
        ({"quant": {"weight": {"num_bits": 3}}}, "quant.weight.num_bits is 3; it must be 8 or 4"),
        ({"quant": {"weight": {"post_init_quant": {"fc": {}}}}}, "post_init_quant: set dtype to int8"),
        ({"checkpoint": {"type": "Megatron", "checkpoints": ["a"]}}, 'files of the type "Megatron"'),
        ({"checkpoint": {"type": "ds_model", "checkpoints": {"tp": []}}}, "for a fixed number of ranks"),
        ({"checkpoint": {"type": "ds_model", "checkpoints": "a"}}, "it must be a list of files"),
        ({"checkpoint": [1]}, "it must be a list of files"),
        ({"checkpoint": 5}, "checkpoint is 5; it must be a folder, a file, a list of files, or an object"),
        ({"checkpoint": {"type": "ds_model", "checkpoints": ["a"], "base_dir": 5}}, "base_dir 5; it must be a folder"),
        ({"checkpoint": "a", "base_dir": 5}, "base_dir is 5; it must be a folder"),
        ({"injection_policy": {"Block": ("out",)}}, "it must map classes of modules"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, Any], message: str) -> None:
    def rank_of(world: sw.World) -> None:
        with pytest.raises(ConfigError, match=message):
            deepspeed.init_inference(nn.Linear(2, 2), **given, world=world)

    run_ranks(1, rank_of)
