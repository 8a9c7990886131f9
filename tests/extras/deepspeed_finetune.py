"""A script as people have it, for Trainer and Accelerate with or without DeepSpeed; it knows nothing of shardwise.

`deepspeed_finetune.py FILE --output_dir ... [--deepspeed ds.json] [arguments]`
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, HfArgumentParser, LlamaConfig, Trainer, TrainingArguments, set_seed
from transformers.integrations import is_deepspeed_zero3_enabled

RATE = 2e-3


def build():
    set_seed(0)
    config = LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=61, max_position_embeddings=32, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


def batches():
    ids = torch.randint(1, 61, (32, 8), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in ids]


def loop(config):
    """As in Accelerate's examples: real optimizers, or dummies where the DeepSpeed config has them."""
    plugin = None
    if config is not None:
        from accelerate import DeepSpeedPlugin

        plugin = DeepSpeedPlugin(hf_ds_config=config)
    accelerator = Accelerator(gradient_accumulation_steps=2, deepspeed_plugin=plugin)
    model = build()
    if accelerator.state.deepspeed_plugin is not None:
        from accelerate.utils import DummyOptim, DummyScheduler

        optimizer = DummyOptim(model.parameters(), lr=RATE, weight_decay=0.1)
        scheduler = DummyScheduler(optimizer, lr_scheduler_callable=halved)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1)
        scheduler = halved(optimizer)
    loader = DataLoader(batches(), 2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if plugin is not None:
        scheduler = accelerator.prepare(scheduler)
    losses, norms = [], []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            if plugin is not None or accelerator.sync_gradients:
                scheduler.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()[None]).mean().item())
    return {"losses": losses, "norms": norms, "rate": optimizer.param_groups[0]["lr"]}


def halved(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def trained(arguments, checkpoint=None):
    trainer = Trainer(build(), arguments, train_dataset=batches(), eval_dataset=batches()[:6])
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model()
    logs = trainer.state.log_history
    kept = {name: [log[name] for log in logs if name in log] for name in ("loss", "grad_norm", "learning_rate")}
    return kept | {"eval_loss": trainer.evaluate()["eval_loss"], "best": trainer.state.best_model_checkpoint}


def main():
    file, rest = Path(sys.argv[1]), sys.argv[2:]
    (arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(rest)
    told = {"whole": trained(arguments), "zero3": is_deepspeed_zero3_enabled(), "deepspeed": arguments.deepspeed}
    (arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(rest)
    told["resumed"] = trained(arguments, f"{arguments.output_dir}/checkpoint-2")
    config = None
    if arguments.deepspeed:
        given = json.loads(Path(arguments.deepspeed).read_text())
        config = {
            **{name: given[name] for name in ("sequence_parallel_size", "pipeline") if name in given},
            "train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto", "gradient_accumulation_steps": "auto",
            "gradient_clipping": 0.5, "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": "auto"},
            "bf16": {"enabled": "auto"}, "csv_monitor": {"enabled": True, "output_path": "nowhere"},
            "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
        }  # fmt: skip
    told["loop"] = loop(config)
    if arguments.process_index == 0:
        file.write_text(json.dumps(told))


if __name__ == "__main__":
    main()
