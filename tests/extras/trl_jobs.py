"""What ranks of TRL's tests do."""

from __future__ import annotations

import os
import tempfile
from dataclasses import fields
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from trainer_jobs import VOCABULARY, llama, llama_config, told
from transformers import AutoModelForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)

COMMON: dict[str, Any] = {
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "use_cpu": True, "report_to": [],
    "max_steps": 4, "logging_steps": 1, "disable_tqdm": True, "save_strategy": "no", "learning_rate": 3e-3,
    "seed": 3, "bf16": False, "max_length": 16, "dataset_num_proc": None,
}  # fmt: skip
LARGE_EPS = 1e-3
"""For AdamW. With its own, rounding decides on updates where gradients are nearly zero: a plain run of online DPO moves
by 2e-4 if it is repeated in fp64, and by 1.2e-7 with this one."""
REWARDED: dict[str, tuple[Any, Any]] = {"grpo": (GRPOTrainer, GRPOConfig), "rloo": (RLOOTrainer, RLOOConfig)}


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


def adapters() -> LoraConfig:
    return LoraConfig(r=2, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.0, task_type="CAUSAL_LM")


def supervised(plan: Any, peft_config: Any = None, **settings: Any) -> dict[str, Any]:
    made, given = ours(SFTTrainer, plan)
    data = Dataset.from_list([{"text": text} for text in texts(32, 0)])
    arguments = SFTConfig(tempfile.mkdtemp(), **{**COMMON, **settings})
    tests = Dataset.from_list([{"text": text} for text in texts(8, 3)]) if settings else None
    trainer = made(
        llama(), args=arguments, train_dataset=data, eval_dataset=tests, processing_class=tokenizer(),
        peft_config=peft_config, **given,
    )  # fmt: skip
    trainer.train()
    return told(trainer, getattr(trainer, "engine", None)) | {"by_token": by_token(trainer)}


def by_token(trainer: Any) -> list[float]:
    """What is worked out from each token: of single ones, and of whole completions."""
    names = ("mean_token_accuracy", "rewards/margins")
    return [log[name] for log in trainer.state.log_history for name in names if name in log]


def supervised_then_preferred(plan: Any) -> dict[str, Any]:
    """The model of one trainer is given to the next."""
    made, given = ours(SFTTrainer, plan)
    data = Dataset.from_list([{"text": text} for text in texts(32, 0)])
    arguments = SFTConfig(tempfile.mkdtemp(), **COMMON)
    first = made(llama(), args=arguments, train_dataset=data, processing_class=tokenizer(), **given)
    first.train()
    return preferred(plan, first.model)


def preferred(plan: Any, model: Any = None) -> dict[str, Any]:
    made, given = ours(DPOTrainer, plan)
    columns = {"prompt": texts(32, 0), "chosen": texts(32, 1), "rejected": texts(32, 2)}
    data = Dataset.from_dict({name: [f" {text}" for text in column] for name, column in columns.items()})
    arguments = DPOConfig(tempfile.mkdtemp(), **COMMON)
    trainer = made(
        llama() if model is None else model, ref_model=llama(), args=arguments, train_dataset=data,
        processing_class=tokenizer(), **given,
    )  # fmt: skip
    trainer.train()
    return told(trainer, getattr(trainer, "engine", None)) | {"by_token": by_token(trainer)}


def preferred_to_itself(plan: Any, folder: str) -> dict[str, Any]:
    """Adapters; the reference is the model with these switched off. Saved at the end."""
    made, given = ours(DPOTrainer, plan)
    columns = {"prompt": texts(32, 0), "chosen": texts(32, 1), "rejected": texts(32, 2)}
    data = Dataset.from_dict({name: [f" {text}" for text in column] for name, column in columns.items()})
    trainer = made(
        llama(), args=DPOConfig(folder, **COMMON), train_dataset=data, processing_class=tokenizer(),
        peft_config=adapters(), **given,
    )  # fmt: skip
    trainer.train()
    trainer.save_model(folder)
    return told(trainer, getattr(trainer, "engine", None)) | {"by_token": by_token(trainer)}


def compared(plan: Any, **_: Any) -> dict[str, Any]:
    """A reward model, of pairs."""
    made, given = ours(RewardTrainer, plan)
    columns = {"chosen": texts(32, 1), "rejected": texts(32, 2)}
    arguments = RewardConfig(tempfile.mkdtemp(), **COMMON, eval_strategy="steps", eval_steps=2)
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(llama_config(num_labels=1))
    data, tests = Dataset.from_dict(columns), Dataset.from_dict({name: some[:6] for name, some in columns.items()})
    trainer = made(model, args=arguments, train_dataset=data, eval_dataset=tests, processing_class=tokenizer(), **given)
    trainer.train()
    logs = trainer.state.log_history
    margins = [log[name] for log in logs for name in ("margin", "accuracy", "max_reward") if name in log]
    return told(trainer, getattr(trainer, "engine", None)) | {"by_token": margins}


def judged(plan: Any, name: str) -> dict[str, Any]:
    """Trainers of completions that are good or bad (KTO), or of pairs without a reference (ORPO, CPO)."""
    from trl.experimental.cpo import CPOConfig, CPOTrainer
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    kinds = {"kto": (KTOTrainer, KTOConfig), "orpo": (ORPOTrainer, ORPOConfig), "cpo": (CPOTrainer, CPOConfig)}
    trainer_class, config = kinds[name]
    made, given = ours(trainer_class, plan)
    columns: dict[str, Any] = {"prompt": texts(32, 0)}
    if name == "kto":
        columns |= {"completion": texts(32, 1), "label": [number % 3 != 0 for number in range(32)]}
        given["ref_model"] = llama()
    else:
        columns |= {"chosen": texts(32, 1), "rejected": texts(32, 2)}
    spaced = {
        column: [f" {value}" if isinstance(value, str) else value for value in some] for column, some in columns.items()
    }
    known = {field.name for field in fields(config)}
    settings = {setting: value for setting, value in COMMON.items() if setting in known}
    trainer = made(
        llama(), args=config(tempfile.mkdtemp(), **settings), train_dataset=Dataset.from_dict(spaced),
        processing_class=tokenizer(), **given,
    )  # fmt: skip
    trainer.train()
    return told(trainer, getattr(trainer, "engine", None)) | {"by_token": by_token(trainer)}


def rewarded(
    plan: Any, kind: str = "grpo", peft_config: Any = None, misled_from: int = 99, **more: Any
) -> dict[str, Any]:
    """Groups of completions that are generated by what is trained, with a reference model, two updates for each. Ranks
    from `misled_from` on get other rewards."""
    folder = tempfile.mkdtemp()
    llama().save_pretrained(folder)  # where the reference model comes from; once ranks have met, rank 0 saves alone
    of_trl, config = REWARDED[kind]
    made, given = ours(of_trl, plan)
    data = Dataset.from_dict({"prompt": texts(16, 0)})
    common = {name: value for name, value in COMMON.items() if name not in ("max_length", "dataset_num_proc")}
    settings = {
        "num_generations": 2, "max_completion_length": 8, "beta": 0.1, "num_iterations": 2, "temperature": 1.0,
        "gradient_accumulation_steps": 1, "learning_rate": 3e-2, "max_steps": 6, "max_grad_norm": 0.5,
        "sync_ref_model": True, "ref_model_sync_steps": 2, "adam_epsilon": LARGE_EPS,
    }  # fmt: skip
    arguments = config(tempfile.mkdtemp(), **{**common, **settings, **more})
    seen: list[Any] = []

    def reward(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        seen.append(completion_ids)
        sign = -1 if int(os.environ.get("RANK", 0)) >= misled_from else 1
        return [sign * float(sum(ids) % 7) - 0.1 * len(ids) for ids in completion_ids]

    model = AutoModelForCausalLM.from_pretrained(folder)
    trainer = made(
        model, args=arguments, train_dataset=data, eval_dataset=data.select(range(4)), reward_funcs=reward,
        processing_class=tokenizer(), peft_config=peft_config, **given,
    )  # fmt: skip
    trainer.train()
    logs = trainer.state.log_history
    names = "reward", "reward_std", "kl", "entropy", "num_tokens", "completions/mean_length", "eval_reward"
    kept = {name: [log[name] for log in logs if name in log] for name in names}
    return told(trainer, getattr(trainer, "engine", None)) | {"generated": seen, "logs": kept}
