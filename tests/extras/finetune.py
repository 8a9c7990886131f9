"""A script as people have it: it knows nothing of shardwise. `finetune.py FILE --output_dir ... [arguments]`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    HfArgumentParser,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    set_seed,
)


class MyTrainer(Seq2SeqTrainer):
    """With a loss of its own."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        loss = torch.nn.functional.cross_entropy(
            outputs.logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten()
        )
        return (loss, outputs) if return_outputs else loss


def build():
    set_seed(0)
    config = GPT2Config(
        n_layer=2, n_embd=16, n_head=2, vocab_size=61, n_positions=16, bos_token_id=0, eos_token_id=0,
        attn_pdrop=0, resid_pdrop=0, embd_pdrop=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def batches():
    ids = torch.randint(1, 61, (32, 8), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in ids]


def main():
    file, rest = Path(sys.argv[1]), sys.argv[2:]
    (arguments,) = HfArgumentParser(Seq2SeqTrainingArguments).parse_args_into_dataclasses(rest)
    trainer = MyTrainer(build(), arguments, train_dataset=batches(), eval_dataset=batches()[:6])
    trainer.train()
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    trainer.save_model()

    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(batches(), 2))
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()[None]).mean().item())
    if accelerator.is_main_process:
        names = [[one.__module__ for one in kind.__mro__] for kind in (type(trainer), type(accelerator))]
        file.write_text(json.dumps({"losses": losses, "from": names, "arguments": rest}))


if __name__ == "__main__":
    main()
