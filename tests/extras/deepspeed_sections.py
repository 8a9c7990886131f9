"""Further ways to ask for DeepSpeed, in one process: `deepspeed_sections.py FILE FOLDER`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from deepspeed.runtime.lr_schedules import WarmupDecayLR
from deepspeed_finetune import batches, build
from transformers import Trainer, TrainingArguments

SETTINGS = {
    "max_steps": 5, "logging_steps": 1, "report_to": [], "disable_tqdm": True, "save_strategy": "no",
    "per_device_train_batch_size": 4, "learning_rate": 3e-3, "warmup_steps": 2, "adam_beta2": 0.95,
}  # fmt: skip
ADAM = {"type": "Adam", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}}
WARMUP = {
    "type": "WarmupDecayLR",
    "params": {
        "warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto",
        "warmup_type": "linear",
    },
}  # fmt: skip


def logs(trainer):
    trainer.train()
    return [[log["loss"], log["learning_rate"]] for log in trainer.state.log_history if "loss" in log]


def by_config(folder):
    config = {"zero_optimization": {"stage": 2}, "optimizer": ADAM, "scheduler": WARMUP}
    arguments = TrainingArguments(folder, deepspeed=config, **SETTINGS)
    return logs(Trainer(build(), arguments, train_dataset=batches()))


def by_hand(folder):
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = WarmupDecayLR(optimizer, 5, warmup_max_lr=3e-3, warmup_num_steps=2, warmup_type="linear")
    arguments = TrainingArguments(folder, **SETTINGS)
    return logs(Trainer(model, arguments, train_dataset=batches(), optimizers=(optimizer, schedule)))


def refused(folder, **settings):
    try:
        Trainer(build(), TrainingArguments(folder, **{**SETTINGS, **settings}), train_dataset=batches())
    except ValueError as error:
        return str(error)
    return ""


def launched_by_accelerate(folder):
    from accelerate import Accelerator

    file = Path(folder) / "ds.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 1}, "gradient_accumulation_steps": 4}))
    os.environ |= {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(file)}
    accelerator = Accelerator()
    return [accelerator.plan.preset, accelerator.gradient_accumulation_steps, accelerator.deepspeed_plugin.zero_stage]


def main():
    file, folder = sys.argv[1:]
    told = {"by_config": by_config(folder), "by_hand": by_hand(folder)}
    told["contradiction"] = refused(folder, deepspeed={"optimizer": {"type": "Adam", "params": {"lr": 1.0}}})
    told["not had"] = refused(folder, deepspeed={"zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.1}}})
    told["launched"] = launched_by_accelerate(folder)
    Path(file).write_text(json.dumps(told))


if __name__ == "__main__":
    main()
