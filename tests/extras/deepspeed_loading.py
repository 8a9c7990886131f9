"""A script as people have it, which loads its models under a DeepSpeed config, or without any.

`deepspeed_loading.py FILE FOLDER [ds.json]`: FOLDER has a model, FILE gets what came of its training in several ways.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    Trainer,
    TrainingArguments,
    set_seed,
)

SIZES = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 61, "max_position_embeddings": 32, "bos_token_id": 0, "eos_token_id": 0,
    "pad_token_id": 0,
}  # fmt: skip


KINDS = []
"""What parameters are before they are trained."""


def rows(count, size=61):
    ids = torch.randint(1, size, (count, 8), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in ids]


def from_folder(folder, arguments):
    """With more tokens than the model had."""
    set_seed(1)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(67)
    return trained(model, arguments, rows(32, 67))


def from_config(folder, arguments):
    set_seed(2)
    return trained(AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)), arguments, rows(32))


def with_a_head(folder, arguments):
    """That the files lack, and that is drawn."""
    set_seed(3)
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3)
    data = [{"input_ids": row["input_ids"], "labels": int(row["input_ids"].sum()) % 3} for row in rows(32)]
    return trained(model, arguments, data)


def with_adapters(folder, arguments):
    from peft import LoraConfig, get_peft_model

    set_seed(4)
    base = AutoModelForCausalLM.from_pretrained(folder)
    tuned = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0))
    return trained(tuned, arguments, rows(32))


def beside_one_that_is_not_trained(folder, arguments):
    """Which is prepared, as trainers of TRL prepare their reference models."""
    set_seed(5)
    model, teacher = (AutoModelForCausalLM.from_pretrained(folder) for _ in range(2))
    trainer = Trainer(model, arguments, train_dataset=rows(32))
    teacher = trainer.accelerator.prepare_model(teacher.requires_grad_(False), evaluation_mode=True)
    with torch.no_grad():
        said = teacher(torch.arange(8)[None]).logits.sum().item()
    return [said, *losses_of(trainer)]


def trained(model, arguments, data):
    return losses_of(Trainer(model, arguments, train_dataset=data))


def losses_of(trainer):
    KINDS.append(type(next(trainer.model.parameters())).__name__)
    trainer.train()
    found = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    return found + [log["grad_norm"] for log in trainer.state.log_history if "grad_norm" in log]


def by_initialize(folder, config):
    """A loop of DeepSpeed, whose ranks have the same batches, and the same by plain PyTorch."""
    set_seed(6)
    if config is None:
        model = AutoModelForCausalLM.from_pretrained(folder)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
        backward, update = torch.Tensor.backward, lambda: (optimizer.step(), optimizer.zero_grad())
        call = model
    else:
        import deepspeed
        from transformers.integrations import HfDeepSpeedConfig, is_deepspeed_zero3_enabled

        whole = config | {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}, "gradient_clipping": 0.0}
        whole["train_micro_batch_size_per_gpu"] = 4
        alive = HfDeepSpeedConfig(whole)
        assert is_deepspeed_zero3_enabled()
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert alive.is_zero3()
        KINDS.append(type(next(model.parameters())).__name__)
        engine = deepspeed.initialize(model=model, config=whole)[0]
        call, backward, update = engine, engine.backward, engine.step
    losses = []
    for start in range(0, 32, 4):
        batch = torch.stack([row["input_ids"] for row in rows(32)[start : start + 4]])
        loss = call(input_ids=batch, labels=batch).loss
        backward(loss)
        update()
        losses.append(loss.item())
    return losses


def main():
    file, folder = Path(sys.argv[1]), sys.argv[2]
    config = json.loads(Path(sys.argv[3]).read_text()) if len(sys.argv) > 3 else None
    told = {"by_initialize": by_initialize(folder, config)}
    gc.collect()
    for way in (from_folder, from_config, with_a_head, with_adapters, beside_one_that_is_not_trained):
        arguments = TrainingArguments(
            tempfile.mkdtemp(), max_steps=4, logging_steps=1, report_to=[], disable_tqdm=True, save_strategy="no",
            per_device_train_batch_size=2, learning_rate=3e-3, deepspeed=config,
        )  # fmt: skip
        told[way.__name__] = way(folder, arguments)
    told["kinds"] = KINDS
    if arguments.process_index == 0:
        file.write_text(json.dumps(told))


if __name__ == "__main__":
    main()
