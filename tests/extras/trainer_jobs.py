"""Jobs for the tests of Trainer."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MixtralConfig,
    MixtralForCausalLM,
    TrainingArguments,
)

import shardwise as sw

VOCABULARY, LENGTH = 61, 12
Rows = list[dict[str, torch.Tensor]]


def rows(count: int, seed: int = 0) -> Rows:
    """Token ids, with a different number of counted labels in each row."""
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


def llama_config(**changes: Any) -> LlamaConfig:
    sizes = {
        "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "vocab_size": VOCABULARY, "max_position_embeddings": 32,
    }  # fmt: skip
    return LlamaConfig(**sizes | changes, bos_token_id=0, eos_token_id=0, pad_token_id=0)


def llama() -> nn.Module:
    torch.manual_seed(0)
    return LlamaForCausalLM(llama_config())


def deep() -> nn.Module:
    """For four stages."""
    torch.manual_seed(0)
    return LlamaForCausalLM(llama_config(num_hidden_layers=4))


def classifier() -> nn.Module:
    torch.manual_seed(0)
    return LlamaForSequenceClassification(llama_config(num_labels=3))


def mixtral() -> nn.Module:
    torch.manual_seed(0)
    config = MixtralConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=VOCABULARY, max_position_embeddings=32, bos_token_id=0, eos_token_id=0, pad_token_id=0,
        num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    return MixtralForCausalLM(config)


MODELS = {"gpt2": gpt2, "llama": llama, "deep": deep, "mixtral": mixtral, "classifier": classifier}
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


def make(plan: Any, model: str | nn.Module, folder: str | None = None, **settings: Any) -> Any:
    """A Trainer with `plan`; without one, Transformers' own."""
    from shardwise.integrations.transformers import Trainer

    extra = {name: settings.pop(name) for name in ("callbacks", "compute_metrics", "optimizers") if name in settings}
    arguments = TrainingArguments(folder or tempfile.mkdtemp(), **{**DEFAULTS, **settings})
    given = {"args": arguments, "train_dataset": rows(64), "eval_dataset": rows(7, seed=1), **extra}
    whole = MODELS[model]() if isinstance(model, str) else model
    if plan is None:
        return transformers.Trainer(whole, **given)
    return Trainer(whole, shardwise=plan, **given)


def race(plans: list[Any], model: str, **settings: Any) -> list[dict[str, Any]]:
    """The same run under each of the plans, one after the other; `None` is Transformers' own Trainer."""
    runs = []
    for plan in plans:
        trainer = make(plan, model, **settings)
        trainer.train()
        runs.append(told(trainer, getattr(trainer, "engine", None)))
        if plan is not None:
            trainer.accelerator.release()
    return runs


def over_split_sequences(plan: Any, length: int = LENGTH, average: bool = True, **settings: Any) -> dict[str, Any]:
    """Rows with padding, metrics of whole sequences, and counted tokens."""
    seen: list[list[Any]] = []

    def without_padding(logits: Any) -> list[Any]:
        return [row[: length - number % 3].tolist() for number, row in enumerate(logits)]

    def metrics(prediction: Any) -> dict[str, float]:
        is_kept = prediction.label_ids[..., 1:] != -100
        is_right = prediction.predictions[:, :-1].argmax(-1) == prediction.label_ids[:, 1:]
        seen.append([without_padding(prediction.predictions), prediction.label_ids.tolist()])
        return {"accuracy": float((is_right & is_kept).sum() / is_kept.sum())}

    def padded(found: Rows) -> Rows:
        made = []
        for number, row in enumerate(found):
            mask = torch.ones(length, dtype=torch.long)
            mask[length - number % 3 :] = 0
            ids, labels = row["input_ids"][:length] * mask, row["labels"][:length].masked_fill(mask == 0, -100)
            made.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
        return made

    settings = {"average_tokens_across_devices": average, "include_num_input_tokens_seen": "non_padding", **settings}
    trainer = make(plan, "llama", compute_metrics=metrics, **settings)
    trainer.train_dataset, trainer.eval_dataset = padded(rows(64)), padded(rows(7, seed=1))
    trainer.train()
    alone = trainer.evaluate()
    found = told(trainer, getattr(trainer, "engine", None))
    predicted = trainer.predict(padded(rows(3, seed=2)))
    return found | {
        "seen": seen, "accuracy": alone["eval_accuracy"], "tokens": trainer.state.num_input_tokens_seen,
        "predicted": without_padding(predicted.predictions),
    }  # fmt: skip


class Stepping(transformers.TrainerCallback):
    """Records which steps the engine has run as a whole."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.whole: list[bool] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.whole.append(getattr(self.trainer, "_in_stages", None) is not None)


def in_stages(plan: Any, kind: str = "", **settings: Any) -> dict[str, Any]:
    """Train on padded rows, in an epoch of fourteen batches or seven, evaluate with metrics, and predict."""
    is_classifier = kind == "classification"

    def metrics(prediction: Any) -> dict[str, float]:
        guesses, labels = prediction.predictions.argmax(-1), prediction.label_ids
        if not is_classifier:
            guesses, labels = guesses[:, :-1], labels[:, 1:]
        return {"accuracy": float(((guesses == labels) & (labels != -100)).sum() / (labels != -100).sum())}

    def padded(found: Rows) -> Rows:
        made = []
        for number, row in enumerate(found):
            mask = (torch.arange(LENGTH) < LENGTH - number % 3).long()
            ids, labels = row["input_ids"] * mask, row["labels"].masked_fill(mask == 0, -100)
            made.append(
                {"input_ids": ids, "attention_mask": mask, "labels": ids.sum() % 3 if is_classifier else labels}
            )
        return made

    trainer = make(plan, "classifier" if is_classifier else "llama", compute_metrics=metrics, **settings)
    trainer.train_dataset, trainer.eval_dataset = padded(rows(28)), padded(rows(7, seed=1))
    if kind == "ragged":
        trainer.data_collator = _padded_to_the_longest
    stepping = Stepping(trainer)
    trainer.add_callback(stepping)
    losses_of_each: list[float] = []
    train = trainer.training_step

    def training_step(*args: Any, **kwargs: Any) -> torch.Tensor:
        loss: torch.Tensor = train(*args, **kwargs)
        losses_of_each.append(loss.item())
        return loss

    trainer.training_step = training_step
    if kind == "own loss":
        trainer.compute_loss_func = smoothed
    if kind == "overridden":
        del trainer.training_step
        trainer.__class__ = type("Comparing", (type(trainer),), {"compute_loss": _compared})
    trainer.train()
    found = told(trainer, getattr(trainer, "engine", None))
    accuracy = trainer.evaluate()["eval_accuracy"]
    predicted = trainer.predict(padded(rows(3, seed=2))).predictions.tolist()
    return found | {"of each": losses_of_each, "whole": stepping.whole, "accuracy": accuracy, "predicted": predicted}


def _padded_to_the_longest(found: Rows) -> dict[str, torch.Tensor]:
    """Rows that are cut off at lengths of their own, padded to the longest of the batch, and no further."""
    lengths = [int(row["attention_mask"].sum()) - int(row["input_ids"][0]) % 5 for row in found]
    kept = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    batch = {name: torch.stack([row[name][: max(lengths)] for row in found]) for name in found[0]}
    return batch | {"attention_mask": kept.long(), "labels": batch["labels"].masked_fill(~kept, -100)}


def smoothed(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """For `compute_loss_func`."""
    logits, targets = outputs["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    total = nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum", label_smoothing=0.1)
    return total / num_items_in_batch


def _compared(self: Any, model: nn.Module, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
    """Calls the model twice."""
    outputs, others = model(**inputs), model(input_ids=inputs["input_ids"].flip(1))
    loss = outputs.loss + (others.logits.mean((1, 2)) - 1).pow(2).mean()
    return (loss, outputs) if return_outputs else loss


class Watching(transformers.TrainerCallback):
    """Records its calls, and ends the run early."""

    def __init__(self, stop_at: int) -> None:
        self.stop_at = stop_at
        self.seen: list[str] = []
        self.norms: list[float] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.seen.append("pre-step")
        self.norms.append(float(next(given["model"].parameters()).grad.norm()))

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seen.append("step")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step >= self.stop_at

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **_: Any) -> None:
        self.seen.append(f"evaluate {metrics['eval_loss']:.4f}")


def with_callbacks(plan: Any) -> dict[str, Any]:
    """Evaluate, train until a callback stops it, and train on, with the user's optimizer and scheduler."""
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    watching = Watching(stop_at=3)
    trainer = make(
        plan, model, callbacks=[watching], optimizers=(optimizer, scheduler), eval_strategy="steps", eval_steps=2,
        max_grad_norm=0.0, per_device_train_batch_size=3,
    )  # fmt: skip
    # Trainer's own leaves out DDP in a train() that comes after an evaluate(), and each rank trains alone
    before = (make(None, llama()) if plan is None else trainer).evaluate()["eval_loss"]
    trainer.train()
    watching.stop_at = 6
    trainer.train()
    after = trainer.predict(rows(5, seed=2))
    found = told(trainer, getattr(trainer, "engine", None))
    return found | {
        "seen": watching.seen, "gradients": watching.norms, "before": before, "predictions": after.predictions.tolist(),
        "test_loss": after.metrics["test_loss"],
    }  # fmt: skip


class Listening(transformers.TrainerCallback):
    """Records what is logged, and logs a value of its own on rank 0 only."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.told: list[dict[str, Any]] = []
        self.num_params = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.num_params = given["model"].num_parameters()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        if state.is_world_process_zero:
            self.told.append({**logs, "step": state.global_step})

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 3 and state.is_world_process_zero:
            self.trainer.log({"mine": 7.0})


def watched(plan: Any, folder: str, resumed: bool = False) -> dict[str, Any]:
    """Six steps logged to TensorBoard and a callback; or the last two of them, from a checkpoint."""
    listening = Listening()
    settings = {"report_to": ["tensorboard"], "logging_steps": 2, "eval_strategy": "steps", "eval_steps": 4}
    more = {"save_strategy": "no" if resumed else "steps", "save_steps": 4, "max_steps": 6}
    trainer = make(plan, "llama", folder, callbacks=[listening], **settings, **more)
    listening.trainer = trainer
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-4" if resumed else None)
    if plan is not None:
        trainer.accelerator.release()
    return {"told": listening.told, "num_params": listening.num_params}


SAVING: dict[str, Any] = {
    "gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps",
    "save_steps": 2, "load_best_model_at_end": True, "lr_scheduler_type": "cosine", "warmup_steps": 2, "max_steps": 6,
}  # fmt: skip


def saved(plan: Any, model: str, folder: str, **settings: Any) -> dict[str, Any]:
    """A whole run with checkpoints that loads its best model at the end."""
    trainer = make(plan, model, folder, **{**SAVING, **settings})
    trainer.train()
    trainer.save_model(f"{folder}/final")
    best = trainer.state.best_model_checkpoint
    return told(trainer, trainer.engine) | {"best": best, "bests_loss": trainer.evaluate()["eval_loss"]}


def resumed(plan: Any, model: str, folder: str, checkpoint: str, **settings: Any) -> dict[str, Any]:
    """The rest of that run from one of its checkpoints, with a model of other values, evaluated first."""
    other = MODELS[model]()
    with torch.no_grad():
        for param in other.parameters():
            param.add_(1.0)
    trainer = make(plan, other, folder, **{**SAVING, **settings})
    if settings.get("eval_on_start"):
        trainer.evaluate()
    trainer.train(resume_from_checkpoint=checkpoint)
    return told(trainer, trainer.engine)


def from_elsewhere(folder: str, optim: str) -> list[dict[str, Any]]:
    """Four steps of plain Trainer with a checkpoint after two; ours resumed from it; and a model that has no values
    before it is sharded."""
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "optim": optim}
    plain = make(None, "llama", folder, **settings)
    plain.train()
    ours = make("zero3", "llama", folder, max_steps=4, optim=optim)
    ours.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    resumed = told(ours, ours.engine)
    ours.accelerator.release()
    torch.manual_seed(0)
    with sw.deferred_init():
        model = llama()
    ours = make("zero3", model, max_steps=4, optim=optim)
    ours.train()
    return [told(plain, None), resumed, told(ours, ours.engine)]


def in_half(scale: float) -> dict[str, Any]:
    """Four steps in fp16."""
    plan = {"preset": "zero3", "loss_scale": {"initial": scale}}
    trainer = make(plan, "llama", fp16=True, max_steps=4)
    trainer.train()
    taken = trainer.engine.num_steps
    return told(trainer, trainer.engine) | {"taken": taken, "precision": trainer.engine.plan.precision}


def tuned(plan: Any, folder: str, is_resumed: bool = False) -> dict[str, Any]:
    """LoRA, saved and resumed; or only resumed."""
    from peft import LoraConfig, get_peft_model

    def adapted() -> nn.Module:
        base = llama()
        config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"], lora_dropout=0.0)
        return get_peft_model(base, config)

    settings = {**SAVING, "load_best_model_at_end": False, "save_steps": 3, "activation_checkpointing": True}
    found: dict[str, Any] = {}
    if not is_resumed:
        trainer = make(plan, adapted(), folder, **settings)
        trainer.train()
        trainer.save_model(f"{folder}/final")
        found = told(trainer, getattr(trainer, "engine", None))
    again = make(plan, adapted(), folder, **settings)
    again.train(resume_from_checkpoint=f"{folder}/checkpoint-3")
    return found | {"resumed": told(again, getattr(again, "engine", None))}


def prompted(plan: Any, folder: str, kind: str) -> dict[str, Any]:
    """Adapters that `peft` computes or truncates while it saves them, or of which it saves buffers."""
    import peft

    causal = {"task_type": "CAUSAL_LM"}
    base = llama()
    if kind == "adalora":
        config = peft.AdaLoraConfig(
            init_r=4, target_r=2, tinit=1, tfinal=1, total_step=6, target_modules=["q_proj", "v_proj"], **causal
        )  # fmt: skip
    elif kind == "vblora":
        config = peft.VBLoRAConfig(r=2, num_vectors=8, vector_length=4, target_modules=["q_proj"], **causal)
    elif kind == "vera":
        config = peft.VeraConfig(r=4, target_modules=["q_proj"], **causal)
    else:
        config = {"prefix": peft.PrefixTuningConfig, "prompt": peft.PromptTuningConfig}[kind](
            num_virtual_tokens=4, **causal
        )

    class Allocating(transformers.TrainerCallback):
        def on_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            if kind == "adalora":
                model.base_model.update_and_allocate(state.global_step)

    model = peft.get_peft_model(base, config)
    settings = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "load_best_model_at_end": False}
    trainer = make(plan, model, folder, callbacks=[Allocating()], **settings)
    trainer.train()
    trainer.save_model(f"{folder}/final")
    found = told(trainer, getattr(trainer, "engine", None))
    return {name: found[name] for name in ("losses", "norms")}


def generated(plan: Any) -> dict[str, Any]:
    """Train an encoder-decoder model and evaluate what it generates; ranks generate different lengths."""
    from transformers import BartConfig, BartForConditionalGeneration, Seq2SeqTrainer, Seq2SeqTrainingArguments

    from shardwise.integrations.transformers import ShardwiseTrainerMixin

    class Ours(ShardwiseTrainerMixin, Seq2SeqTrainer):
        pass

    torch.manual_seed(0)
    config = BartConfig(
        vocab_size=VOCABULARY, d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=32, dropout=0.0,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=None,
    )  # fmt: skip
    model = BartForConditionalGeneration(config)
    arguments = Seq2SeqTrainingArguments(
        tempfile.mkdtemp(), **{**DEFAULTS, "max_steps": 3, "eval_strategy": "steps", "eval_steps": 3},
        predict_with_generate=True, generation_max_length=9,
    )  # fmt: skip
    seen = []

    def metrics(prediction: Any) -> dict[str, float]:
        seen.append(prediction.predictions.tolist())
        return {"mean": float(prediction.predictions.mean())}

    given = {"args": arguments, "train_dataset": rows(24), "eval_dataset": rows(6, seed=1), "compute_metrics": metrics}
    trainer = Seq2SeqTrainer(model, **given) if plan is None else Ours(model, shardwise=plan, **given)
    trainer.train()
    return told(trainer, getattr(trainer, "engine", None)) | {"generated": seen}


class Unfreezing(transformers.TrainerCallback):
    """Lets another layer train after two steps, and again after four."""

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step in (2, 4):
            model.model.layers[1 if state.global_step == 2 else 0].requires_grad_(True)


def unfrozen(plan: Any, **settings: Any) -> dict[str, Any]:
    """A head that is trained alone, then with one layer more, then with both, by an optimizer that has all of them."""
    model = llama()
    model.model.layers.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    trainer = make(
        plan, model, callbacks=[Unfreezing()], optimizers=(optimizer, None), max_steps=6, gradient_accumulation_steps=2,
        max_grad_norm=0.5, **settings,
    )  # fmt: skip
    trainer.train()
    return told(trainer, getattr(trainer, "engine", None))


def one_after_another(plans: list[Any], model: str, **settings: Any) -> dict[str, Any]:
    """A Trainer trains a model, a second one trains it on with another learning rate, and a third one evaluates it."""
    first = make(plans[0], model, max_steps=4, **settings)
    first.train()
    second = make(plans[1], first.model, max_steps=3, learning_rate=1e-3, **settings)
    second.train()
    third = make(plans[2], first.model, **settings)
    evaluated = third.evaluate()["eval_loss"]
    run = told(third, getattr(third, "engine", None))
    for trainer in (first, second):
        for name, known in (("losses", "loss"), ("norms", "grad_norm"), ("rates", "learning_rate")):
            run[name] += [log[known] for log in trainer.state.log_history if known in log]
    return run | {"evaluations": [evaluated]}


def passed_on_in_bf16(plan: Any) -> dict[str, Any]:
    """A model that was built in bf16, after one Trainer and before the next, which has made it plain again."""
    first = make(plan, gpt2().bfloat16(), max_steps=6, bf16=True, learning_rate=1e-2)
    first.train()
    second = make(plan, first.model, max_steps=1, bf16=True)
    first.accelerator.hand_over(first.model)
    dtypes = sorted({str(param.dtype) for param in first.model.parameters()})
    second.train()
    logs = [*first.state.log_history, *second.state.log_history]
    return {"dtypes": dtypes, "losses": [log["loss"] for log in logs if "loss" in log]}


WAV2VEC2: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32, "conv_dim": [8, 8],
    "conv_stride": [4, 4], "conv_kernel": [8, 8], "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2, "vocab_size": VOCABULARY, "apply_spec_augment": False, "hidden_dropout": 0.0,
    "attention_dropout": 0.0, "activation_dropout": 0.0, "feat_proj_dropout": 0.0, "final_dropout": 0.0,
}  # fmt: skip
WHISPER: dict[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": 16, "encoder_layers": 3, "decoder_layers": 3, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "dropout": 0.0, "num_mel_bins": 8,
    "max_source_positions": 8, "max_target_positions": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1, "suppress_tokens": None, "begin_suppress_tokens": None,
}  # fmt: skip


OPT: dict[str, Any] = {
    "hidden_size": 16, "word_embed_proj_dim": 16, "ffn_dim": 32, "num_hidden_layers": 4, "num_attention_heads": 2,
    "vocab_size": VOCABULARY, "max_position_embeddings": 32, "dropout": 0.0, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip


class DrawsByRank(transformers.TrainerCallback):
    """Each rank draws other numbers in each step, the same in every run."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        torch.manual_seed(100 * state.global_step + args.process_index)


def skipping(plan: Any, kind: str) -> dict[str, Any]:
    """A model of speech that skips half of its layers, on each rank others."""
    torch.manual_seed(0)
    model: nn.Module
    if kind == "wav2vec2":
        model = transformers.Wav2Vec2ForCTC(transformers.Wav2Vec2Config(**WAV2VEC2, layerdrop=0.5))
        inputs = {"input_values": torch.randn(32, 400)}
    else:
        config = transformers.WhisperConfig(**WHISPER, encoder_layerdrop=0.5, decoder_layerdrop=0.5)
        model = transformers.WhisperForConditionalGeneration(config)
        inputs = {"input_features": torch.randn(32, 8, 16)}
    return _skipped(plan, model, inputs | {"labels": torch.randint(3, VOCABULARY, (32, 4))}, [DrawsByRank()])


def skipping_alike(plan: Any, called: list[list[int]] | None = None) -> dict[str, Any]:
    """One that skips half of its layers, or in each step those that are not `called`. Ranks share a batch."""
    torch.manual_seed(0)
    model = transformers.OPTForCausalLM(transformers.OPTConfig(**OPT, layerdrop=0.5 if called is None else 0.0))
    ids = torch.randint(3, VOCABULARY, (32, 6))
    seen: list[list[int]] = []
    model.model.decoder.register_forward_pre_hook(lambda *_: seen.append([]))
    for number, layer in enumerate(model.model.decoder.layers):
        layer.register_forward_pre_hook(lambda *_, number=number: seen[-1].append(number))
        if called is not None:
            layer.forward = _where(called, seen, number, layer.forward)
    return _skipped(plan, model, {"input_ids": ids, "labels": ids}, []) | {"called": seen}


def _where(called: list[list[int]], seen: list[list[int]], number: int, forward: Any) -> Any:
    def as_told(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return forward(hidden, *args, **kwargs) if number in called[len(seen) - 1] else hidden

    return as_told


def _skipped(plan: Any, model: nn.Module, columns: dict[str, torch.Tensor], callbacks: list[Any]) -> dict[str, Any]:
    from shardwise.integrations.transformers import Trainer

    data = [{name: rows[index] for name, rows in columns.items()} for index in range(32)]
    settings = {**DEFAULTS, "max_steps": 8, "optim": "sgd", "learning_rate": 1e-2}
    arguments = TrainingArguments(tempfile.mkdtemp(), ddp_find_unused_parameters=True, **settings)
    given = {"args": arguments, "train_dataset": data, "callbacks": callbacks}
    trainer = transformers.Trainer(model, **given) if plan is None else Trainer(model, shardwise=plan, **given)
    trainer.train()
    return told(trainer, getattr(trainer, "engine", None))


class OwnFiles(transformers.Trainer):
    """Writes the model that it has, in a layout of its own, as the trainer of sentence-transformers does."""

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        folder = Path(output_dir or self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        torch.save({name: value.clone() for name, value in self.model.state_dict().items()}, folder / "own.pt")


def written_in_its_own_way(plan: Any, folder: str) -> None:
    from shardwise.integrations.transformers import sharded

    arguments = TrainingArguments(folder, **{**DEFAULTS, "max_steps": 4, "save_strategy": "steps", "save_steps": 2})
    given, trainer = ({}, OwnFiles) if plan is None else ({"shardwise": plan}, sharded(OwnFiles))
    made = trainer(gpt2(), args=arguments, train_dataset=rows(64), **given)
    made.train()
    made.save_model(f"{folder}/final")


class OwnedHead(transformers.Trainer):
    """Its loss has parameters, which its optimizer gets with the model's, as the trainer of sentence-transformers
    does."""

    head: nn.Module

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        trained = dict.fromkeys([*self.model.parameters(), *self.head.parameters()])
        self.optimizer = torch.optim.AdamW(list(trained), lr=self.args.learning_rate, eps=1e-4)
        return self.optimizer

    def compute_loss(self, model: nn.Module, inputs: Any, *_: object, **__: object) -> torch.Tensor:
        features = model(input_ids=inputs["input_ids"]).logits.mean(1)
        return nn.functional.cross_entropy(self.head(features), inputs["input_ids"][:, 0] % 3)


def with_a_head_of_the_loss(plan: Any, *, in_model: bool, rows_of_a_rank: int = 2) -> dict[str, Any]:
    from shardwise.integrations.transformers import sharded

    model, head = gpt2(), nn.Linear(VOCABULARY, 3)
    if in_model:
        model.loss_head = head
    settings = {"max_steps": 6, "per_device_train_batch_size": rows_of_a_rank, "max_grad_norm": 0.5}
    arguments = TrainingArguments(tempfile.mkdtemp(), **DEFAULTS | settings)
    given, trainer = ({}, OwnedHead) if plan is None else ({"shardwise": plan}, sharded(OwnedHead))
    made = trainer(model, args=arguments, train_dataset=rows(64), **given)
    made.head = head
    made.train()
    return told(made, getattr(made, "engine", None))
