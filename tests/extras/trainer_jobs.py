"""What ranks of the Trainer's tests do."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

import torch
import torchvision_operators  # noqa: F401  # what is imported later may import torchvision
import transformers
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, TrainingArguments

VOCABULARY, LENGTH = 61, 12
Rows = list[dict[str, torch.Tensor]]


def rows(count: int, seed: int = 0) -> Rows:
    """Token ids; of each row another number of labels counts."""
    draw = torch.Generator().manual_seed(seed)
    found = []
    for index in range(count):
        ids = torch.randint(1, VOCABULARY, (LENGTH,), generator=draw)
        labels = ids.clone()
        labels[: (index * 5) % (LENGTH - 2)] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def gpt2() -> nn.Module:
    """Embedding and head are tied."""
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2, n_embd=16, n_head=2, vocab_size=VOCABULARY, n_positions=32, bos_token_id=0, eos_token_id=0,
        pad_token_id=0, attn_pdrop=0, resid_pdrop=0, embd_pdrop=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def llama() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=VOCABULARY, max_position_embeddings=32, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config)


MODELS = {"gpt2": gpt2, "llama": llama}
DEFAULTS: dict[str, Any] = {
    "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "use_cpu": True, "report_to": [],
    "logging_steps": 1, "disable_tqdm": True, "save_strategy": "no", "learning_rate": 3e-3, "max_steps": 12, "seed": 3,
}  # fmt: skip


def told(trainer: Any, engine: Any) -> dict[str, Any]:
    """Losses, norms and evaluations of a run, and the model at its end."""
    logs = trainer.state.log_history
    state = trainer.model.state_dict() if engine is None else engine.state_dict()
    return {
        "losses": [log["loss"] for log in logs if "loss" in log],
        "norms": [log["grad_norm"] for log in logs if "grad_norm" in log],
        "rates": [log["learning_rate"] for log in logs if "learning_rate" in log],
        "evaluations": [log["eval_loss"] for log in logs if "eval_loss" in log],
        "state": {name: value.tolist() for name, value in state.items()},
    }


def make(plan: Any, model: str | nn.Module, folder: str | None = None, *, kind: str = "", **settings: Any) -> Any:
    """A Trainer by `plan`, or Transformers' own without one."""
    from shardwise.integrations.transformers import Trainer

    random.seed(0)
    extra = {name: settings.pop(name) for name in ("callbacks", "compute_metrics", "optimizers") if name in settings}
    arguments = TrainingArguments(folder or tempfile.mkdtemp(), **{**DEFAULTS, **settings})
    given = {"args": arguments, "train_dataset": rows(64), "eval_dataset": rows(7, seed=1), **extra}
    whole = MODELS[model]() if isinstance(model, str) else model
    if plan is None:
        return transformers.Trainer(whole, **given)
    return Trainer(whole, shardwise=plan, **given)


def train(plan: Any, model: str, folder: str | None = None, *, resume: Any = None, **settings: Any) -> dict[str, Any]:
    trainer = make(plan, model, folder, **settings)
    trainer.train(resume_from_checkpoint=resume)
    return told(trainer, getattr(trainer, "engine", None))
