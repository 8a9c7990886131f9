"""What ranks of TRL's tests do."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from trainer_jobs import VOCABULARY, llama, told
from transformers import PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

COMMON: dict[str, Any] = {
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "use_cpu": True, "report_to": [],
    "max_steps": 4, "logging_steps": 1, "disable_tqdm": True, "save_strategy": "no", "learning_rate": 3e-3,
    "seed": 3, "bf16": False, "max_length": 16, "dataset_num_proc": None,
}  # fmt: skip


def tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{number}": number for number in range(3, VOCABULARY)}}
    made = Tokenizer(WordLevel(words, unk_token="<s>"))
    made.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def texts(count: int, seed: int) -> list[str]:
    draw = torch.Generator().manual_seed(seed)
    lengths = [3 + index % 5 for index in range(count)]
    return [
        " ".join(f"w{word}" for word in torch.randint(3, VOCABULARY, (n,), generator=draw).tolist()) for n in lengths
    ]


def ours(trainer: type, plan: Any) -> tuple[type, dict[str, Any]]:
    """The same trainer with our mixin in front, and what it is given besides."""
    from shardwise.integrations.transformers import ShardwiseTrainerMixin

    if plan is None:
        return trainer, {}
    return type("Ours", (ShardwiseTrainerMixin, trainer), {}), {"shardwise": plan}


def supervised(plan: Any, **settings: Any) -> dict[str, Any]:
    made, given = ours(SFTTrainer, plan)
    data = Dataset.from_list([{"text": text} for text in texts(32, 0)])
    arguments = SFTConfig(tempfile.mkdtemp(), **{**COMMON, **settings})
    trainer = made(llama(), args=arguments, train_dataset=data, processing_class=tokenizer(), **given)
    trainer.train()
    return told(trainer, getattr(trainer, "engine", None))


def preferred(plan: Any) -> dict[str, Any]:
    made, given = ours(DPOTrainer, plan)
    columns = {"prompt": texts(32, 0), "chosen": texts(32, 1), "rejected": texts(32, 2)}
    data = Dataset.from_dict({name: [f" {text}" for text in column] for name, column in columns.items()})
    arguments = DPOConfig(tempfile.mkdtemp(), **COMMON)
    trainer = made(
        llama(), ref_model=llama(), args=arguments, train_dataset=data, processing_class=tokenizer(), **given
    )
    trainer.train()
    return told(trainer, getattr(trainer, "engine", None))
