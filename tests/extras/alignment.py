"""A script as people have it: it knows nothing of shardwise. `alignment.py FILE METHOD`, where METHOD is one of TRL's,
`sft`, `sft-lora`, `dpo`, `grpo`, `grpo-colocated` (with vLLM in each rank, of which there is a stand-in), `rloo`,
`online-dpo`, or `experts`: transformers' own Trainer."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import colocated_vllm
from datasets import Dataset
from peft import LoraConfig
from trainer_jobs import llama, mixtral, rows
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer, SFTConfig, SFTTrainer
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer
from trl_jobs import texts, tokenizer

SETTINGS = {
    "per_device_train_batch_size": 2, "use_cpu": True, "report_to": [], "max_steps": 3, "logging_steps": 1,
    "disable_tqdm": True, "save_strategy": "no", "learning_rate": 3e-3, "seed": 3, "bf16": False,
}  # fmt: skip


def sft(peft_config=None):
    data = Dataset.from_list([{"text": text} for text in texts(32, 0)])
    config = SFTConfig(tempfile.mkdtemp(), max_length=16, **SETTINGS)
    return SFTTrainer(llama(), config, train_dataset=data, processing_class=tokenizer(), peft_config=peft_config)


def dpo():
    columns = {"prompt": texts(32, 0), "chosen": texts(32, 1), "rejected": texts(32, 2)}
    data = Dataset.from_dict({name: [f" {text}" for text in column] for name, column in columns.items()})
    config = DPOConfig(tempfile.mkdtemp(), max_length=16, **SETTINGS)
    return DPOTrainer(llama(), llama(), config, train_dataset=data, processing_class=tokenizer())


def reward(completion_ids, **_):
    return [float(sum(ids) % 7) for ids in completion_ids]


def grpo(model=None, **vllm):
    data = Dataset.from_dict({"prompt": texts(16, 0)})
    config = GRPOConfig(tempfile.mkdtemp(), num_generations=2, max_completion_length=6, beta=0.0, **SETTINGS, **vllm)
    return GRPOTrainer(model or llama(), reward, config, train_dataset=data, processing_class=tokenizer())


def grpo_colocated():
    colocated_vllm.install()
    folder = tempfile.mkdtemp()
    llama().save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    return grpo(model, use_vllm=True, vllm_mode="colocate")


def online_dpo():
    data = Dataset.from_dict({"prompt": texts(16, 0)})
    config = OnlineDPOConfig(tempfile.mkdtemp(), max_length=24, max_new_tokens=6, **SETTINGS)
    return OnlineDPOTrainer(llama(), reward_funcs=reward, args=config, train_dataset=data, processing_class=tokenizer())


def rloo():
    data = Dataset.from_dict({"prompt": texts(16, 0)})
    config = RLOOConfig(tempfile.mkdtemp(), num_generations=2, max_completion_length=6, beta=0.0, **SETTINGS)
    return RLOOTrainer(llama(), reward, config, train_dataset=data, processing_class=tokenizer())


def experts():
    config = TrainingArguments(tempfile.mkdtemp(), gradient_accumulation_steps=2, **SETTINGS)
    return Trainer(mixtral(), config, train_dataset=rows(64))


def main():
    file, method = Path(sys.argv[1]), sys.argv[2]
    made = {
        "sft": sft, "sft-lora": lambda: sft(LoraConfig(r=4, target_modules=["q_proj"])), "dpo": dpo, "grpo": grpo,
        "grpo-colocated": grpo_colocated, "rloo": rloo, "online-dpo": online_dpo, "experts": experts,
    }  # fmt: skip
    trainer = made[method]()
    trainer.train()
    kinds = [kind.__module__ for kind in type(trainer).__mro__]
    told = {"by_us": any("shardwise" in kind for kind in kinds)}
    for name in ("loss", "grad_norm"):
        told[name] = [log[name] for log in trainer.state.log_history if name in log]
    if trainer.args.process_index == 0:
        file.write_text(json.dumps(told))


if __name__ == "__main__":
    main()
