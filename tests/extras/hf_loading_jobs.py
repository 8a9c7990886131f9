"""What a process of the tests of loading does: models of transformers, built while a config lives, and as ever."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from trainer_jobs import gpt2, llama, mixtral

WIDTH = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


class Plugin:
    """Of accelerate's, what is asked of it."""

    zero3_init_flag = True


def bert() -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(**WIDTH, vocab_size=61))


def vit() -> nn.Module:
    return transformers.ViTForImageClassification(transformers.ViTConfig(**WIDTH, image_size=16, patch_size=4))


def t5() -> nn.Module:
    sizes = {"d_model": 16, "d_ff": 32, "num_layers": 2, "num_heads": 2, "d_kv": 8, "vocab_size": 61}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))


def saved(build: Any, *, in_parts: bool = True) -> str:
    folder = tempfile.mkdtemp()
    torch.manual_seed(7)
    model = build()
    model.save_pretrained(folder, max_shard_size="10KB")
    if not in_parts:
        for file in Path(folder).glob("model*"):
            file.unlink()
        torch.save(model.state_dict(), Path(folder) / "pytorch_model.bin")
    return folder


WAYS: dict[str, tuple[Any, Any, bool]] = {
    # what is saved, how it is built again, whether it waits
    "gpt2": (gpt2, lambda folder: transformers.AutoModelForCausalLM.from_pretrained(folder), True),
    "base of llama": (llama, lambda folder: transformers.AutoModel.from_pretrained(folder), True),
    "mixtral": (mixtral, lambda folder: transformers.MixtralForCausalLM.from_pretrained(folder), True),
    "vit": (vit, lambda folder: transformers.ViTForImageClassification.from_pretrained(folder), True),
    "in bf16": (llama, lambda folder: transformers.LlamaForCausalLM.from_pretrained(folder, dtype="bfloat16"), True),
    "new head": (bert, lambda folder: transformers.BertForTokenClassification.from_pretrained(folder), True),
    "config": (bert, lambda _: transformers.AutoModel.from_config(transformers.BertConfig(**WIDTH)), True),
    "kept in fp32": (
        t5,
        lambda folder: transformers.AutoModelForSeq2SeqLM.from_pretrained(folder, dtype="float16"),
        False,
    ),
    "device map": (llama, lambda folder: transformers.AutoModel.from_pretrained(folder, device_map={"": "cpu"}), False),
    "pickle": (llama, lambda folder: transformers.AutoModelForCausalLM.from_pretrained(folder), False),
    "pickle, new head": (bert, lambda folder: transformers.BertForTokenClassification.from_pretrained(folder), False),
}


def built_twice(way: str) -> list[Any]:
    """Plainly and while a config lives; whether parameters wait then, and where the two differ."""
    from shardwise.init import is_deferred, materialize
    from shardwise.integrations.hf_zero3 import LIVE, take_over_models

    model, build, _ = WAYS[way]
    folder = saved(model, in_parts=not way.startswith("pickle"))
    config = Plugin()
    made = []
    for is_alive in (False, True):
        if is_alive:
            take_over_models(transformers.modeling_utils)
            LIVE.note(config)
        torch.manual_seed(3)
        made.append(build(folder))
        made[-1].drawn = torch.rand(3)
    plain, ours = made
    waits = {is_deferred(param) for param in ours.parameters()}
    materialize(ours)
    differ = [name for name, value in plain.state_dict().items() if not torch.equal(value, ours.state_dict()[name])]
    differ += [name for name, value in plain.named_buffers() if not torch.equal(value, ours.get_buffer(name))]
    kinds = [{name: value.dtype for name, value in one.state_dict().items()} for one in made]
    trained = [{name: value.requires_grad for name, value in one.named_parameters()} for one in made]
    config.zero3_init_flag = False
    after = any(is_deferred(param) for param in build(folder).parameters())
    return [waits, differ, kinds[0] == kinds[1], trained[0] == trained[1], torch.equal(plain.drawn, ours.drawn), after]
