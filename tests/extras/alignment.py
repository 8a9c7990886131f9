"""A script of TRL as people have it: it knows nothing of shardwise. `alignment.py FILE METHOD`, where METHOD is `sft`,
`sft-lora`, `dpo` or `grpo`."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from datasets import Dataset
from peft import LoraConfig
from trainer_jobs import llama
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
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


def grpo():
    data = Dataset.from_dict({"prompt": texts(16, 0)})
    config = GRPOConfig(tempfile.mkdtemp(), num_generations=2, max_completion_length=6, beta=0.0, **SETTINGS)
    return GRPOTrainer(llama(), reward, config, train_dataset=data, processing_class=tokenizer())


def main():
    file, method = Path(sys.argv[1]), sys.argv[2]
    made = {"sft": sft, "sft-lora": lambda: sft(LoraConfig(r=4, target_modules=["q_proj"])), "dpo": dpo, "grpo": grpo}
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
