"""Jobs for the tests of scripts whose models are in pipeline stages: tasks, collators and arguments in which scripts of
Trainer and TRL differ. Each runs under a plan, or without one as it is."""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
import transformers
from datasets import Dataset
from lightning_jobs import trainer_of, values
from torch import nn
from torch.utils.data import DataLoader
from trainer_jobs import DEFAULTS, LENGTH, MODELS, VOCABULARY, Rows, llama, make, mixtral, rows, smoothed, told
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
from trl_jobs import COMMON, adapters, by_token, ours, texts, tokenizer

SETTINGS = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5, "eval_strategy": "steps", "eval_steps": 2}
SETTINGS |= {"max_steps": 4}


def trained(plan: Any, model: nn.Module, data: tuple[Any, Any], collator: Any = None, **settings: Any) -> Any:
    """A Trainer that has trained on the first of `data` and been evaluated on the second."""
    loss_func = settings.pop("compute_loss_func", None)
    trainer = make(plan, model, **{**SETTINGS, **settings})
    trainer.train_dataset, trainer.eval_dataset = data
    trainer.compute_loss_func = loss_func
    if collator is not None:
        trainer.data_collator = collator
    trainer.train()
    return trainer


def result(trainer: Any) -> dict[str, Any]:
    return told(trainer, getattr(trainer, "engine", None)) | {"by_token": by_token(trainer)}


def padded(count: int, seed: int = 0, length: int = LENGTH) -> Rows:
    """Rows that end at lengths of their own, filled up."""
    found = []
    for number, row in enumerate(rows(count, seed)):
        mask = (torch.arange(length) < length - number % 4).long()
        ids = row["input_ids"][:length] * mask
        found.append({"input_ids": ids, "attention_mask": mask, "labels": row["labels"].masked_fill(mask == 0, -100)})
    return found


def documents(count: int, seed: int = 0) -> list[dict[str, Any]]:
    return [{"input_ids": row["input_ids"][: 4 + number % 7].tolist()} for number, row in enumerate(rows(count, seed))]


def packed(plan: Any, **settings: Any) -> dict[str, Any]:
    """Documents one behind the other in a single row, told apart by their positions."""
    collator = transformers.DataCollatorWithFlattening()
    return result(trained(plan, llama(), (documents(48), documents(8, 1)), collator, **settings))


def language(plan: Any, **settings: Any) -> dict[str, Any]:
    return result(trained(plan, llama(), (padded(48), padded(7, 1)), **settings))


def of_experts(plan: Any, **settings: Any) -> dict[str, Any]:
    return result(trained(plan, mixtral(), (padded(48), padded(7, 1)), **settings))


def own_loss(plan: Any, **settings: Any) -> dict[str, Any]:
    return language(plan, compute_loss_func=smoothed, **settings)


BERT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2,
    "intermediate_size": 32, "max_position_embeddings": 32, "pad_token_id": 0, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


def tokens_labelled(plan: Any, **settings: Any) -> dict[str, Any]:
    """Token classification."""

    def labelled(found: Rows) -> Rows:
        for row in found:
            row["labels"] = (row["input_ids"] % 3).masked_fill(row["attention_mask"] == 0, -100)
        return found

    torch.manual_seed(0)
    model = transformers.BertForTokenClassification(transformers.BertConfig(**BERT, num_labels=3))
    return result(trained(plan, model, (labelled(padded(48)), labelled(padded(7, 1))), **settings))


def chosen(plan: Any, **settings: Any) -> dict[str, Any]:
    """Multiple choice: each sample has several rows of tokens."""

    def grouped(found: Rows) -> Rows:
        groups = [found[start : start + 3] for start in range(0, len(found) - 2, 3)]
        names = ("input_ids", "attention_mask")
        return [
            {**{name: torch.stack([row[name] for row in group]) for name in names}, "labels": torch.tensor(number % 3)}
            for number, group in enumerate(groups)
        ]

    torch.manual_seed(0)
    model = transformers.BertForMultipleChoice(transformers.BertConfig(**BERT))
    return result(trained(plan, model, (grouped(padded(96)), grouped(padded(21, 1))), **settings))


def answered(plan: Any, **settings: Any) -> dict[str, Any]:
    """Question answering."""

    def marked(found: Rows) -> Rows:
        for number, row in enumerate(found):
            del row["labels"]
            row["start_positions"], row["end_positions"] = torch.tensor(number % 5), torch.tensor(number % 5 + 2)
        return found

    torch.manual_seed(0)
    model = transformers.BertForQuestionAnswering(transformers.BertConfig(**BERT))
    return result(trained(plan, model, (marked(padded(48)), marked(padded(7, 1))), **settings))


def images_labelled(plan: Any, **settings: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32, image_size=16, patch_size=4,
        num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    data, tests = (
        [{"pixel_values": torch.randn(3, 16, 16), "labels": torch.tensor(number % 3)} for number in range(count)]
        for count in (48, 7)
    )
    return result(trained(plan, transformers.ViTForImageClassification(config), (data, tests), **settings))


TOWER = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
WORDS = {**TOWER, "vocab_size": VOCABULARY, "max_position_embeddings": 32, "pad_token_id": 0, "eos_token_id": 2}


def in_pairs(found: Rows) -> dict[str, Any]:
    """Images with their texts, whose model computes a loss if it is asked to."""
    return {**{name: torch.stack([row[name] for row in found]) for name in found[0]}, "return_loss": True}


def matched(plan: Any, kind: str, **settings: Any) -> dict[str, Any]:
    """Two towers, of images and of texts, whose results are compared within a batch: CLIP and SigLIP."""
    torch.manual_seed(0)
    seeing = {**TOWER, "image_size": 16, "patch_size": 8}
    config = transformers.AutoConfig.for_model(kind, text_config=WORDS, vision_config=seeing)
    model = transformers.AutoModel.from_config(config)
    data, tests = (
        [
            {"input_ids": row["input_ids"].index_fill(0, torch.tensor([-1]), 2), "pixel_values": torch.randn(3, 16, 16)}
            for row in rows(*one)
        ]
        for one in ((48,), (8, 1))
    )
    return result(trained(plan, model, (data, tests), in_pairs, **settings))


def seen_in_text(plan: Any, **settings: Any) -> dict[str, Any]:
    """Idefics3, with one image or none in each sample."""
    torch.manual_seed(0)
    text = transformers.LlamaConfig(**{**WORDS, "num_hidden_layers": 3}, num_key_value_heads=2, use_cache=False)
    seeing = {**TOWER, "image_size": 16, "patch_size": 4, "num_channels": 3}
    config = transformers.Idefics3Config(
        vision_config=seeing, text_config=text, image_token_id=VOCABULARY - 1, scale_factor=2
    )
    model = transformers.Idefics3ForConditionalGeneration(config)

    def illustrated(found: Rows) -> Rows:
        for number, row in enumerate(found):
            has_image, ids = number % 3 != 1, row["input_ids"] % (VOCABULARY - 1)
            ids[2:6] = VOCABULARY - 1 if has_image else 3  # as many tokens as its connector makes of an image
            row["input_ids"], row["labels"] = ids, ids.masked_fill(ids == VOCABULARY - 1, -100)
            row["pixel_values"] = torch.randn(1, 3, 16, 16) * has_image
        return found

    return result(trained(plan, model, (illustrated(padded(48)), illustrated(padded(8, 1))), **settings))


def sequences_labelled(plan: Any, model: str = "llama", **settings: Any) -> dict[str, Any]:
    """Sequence classification."""

    def labelled(found: Rows) -> Rows:
        for row in found:
            row["labels"] = row["input_ids"].sum() % 3
        return found

    torch.manual_seed(0)
    config = MODELS[model]().config
    config.num_labels = 3
    classifier = transformers.AutoModelForSequenceClassification.from_config(config)
    return result(trained(plan, classifier, (labelled(padded(48)), labelled(padded(7, 1))), **settings))


def masked(plan: Any, dropout: float = 0.0, **settings: Any) -> dict[str, Any]:
    """Masked language modelling, whose collator draws the masks on each rank."""
    torch.manual_seed(0)
    drops = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    model = transformers.BertForMaskedLM(transformers.BertConfig(**{**BERT, **drops}))
    words = tokenizer()
    words.add_special_tokens({"mask_token": "w60"})
    collator = transformers.DataCollatorForLanguageModeling(words, mlm_probability=0.3)
    given = [[{name: row[name].tolist() for name in ("input_ids", "attention_mask")} for row in padded(*one)]
             for one in ((48,), (7, 1))]  # fmt: skip
    return result(trained(plan, model, (given[0], given[1]), collator, **settings))


def supervised(plan: Any, *, is_adapted: bool = False, model: str = "llama", **settings: Any) -> dict[str, Any]:
    """SFT, with LoRA if it is adapted."""
    made, given = ours(SFTTrainer, plan)
    data, tests = (Dataset.from_list([{"text": text} for text in texts(*one)]) for one in ((48, 0), (8, 3)))
    changes = {"eval_strategy": "steps", "eval_steps": 2, **settings}
    trainer = made(
        MODELS[model](), args=SFTConfig(tempfile.mkdtemp(), **{**COMMON, **changes}), train_dataset=data,
        eval_dataset=tests, processing_class=tokenizer(), peft_config=adapters() if is_adapted else None,
        **given,
    )  # fmt: skip
    trainer.train()
    return result(trainer)


def keep_preferences(folder: str) -> None:
    """What `preferred` reads."""
    columns = {"prompt": texts(48, 0), "chosen": texts(48, 1), "rejected": texts(48, 2)}
    data = Dataset.from_dict({name: [f" {text}" for text in column] for name, column in columns.items()})
    data.save_to_disk(folder)


def preferred(plan: Any, folder: str, model: str = "llama", **settings: Any) -> dict[str, Any]:
    """DPO, on a dataset beside which all ranks read what one of them computes."""
    made, given = ours(DPOTrainer, plan)
    data = Dataset.load_from_disk(folder)
    trainer = made(
        MODELS[model](), None if settings.get("precompute_ref_log_probs") else MODELS[model](), train_dataset=data,
        args=DPOConfig(tempfile.mkdtemp(), **{**COMMON, **settings}), processing_class=tokenizer(), **given,
    )  # fmt: skip
    trainer.train()
    return result(trainer) | {"reference": 0 if trainer.ref_model is None else trainer.ref_model.num_parameters()}


def saved(plan: Any, folder: str, **settings: Any) -> dict[str, Any]:
    """Loads its best checkpoint at the end, and evaluates it."""
    changes = {"save_strategy": "steps", "save_steps": 2, "load_best_model_at_end": True, "max_steps": 6}
    changes |= {"learning_rate": 0.1, "gradient_accumulation_steps": 2, **settings}
    trainer = make(plan, "deep", folder, eval_strategy="steps", eval_steps=2, **changes)
    trainer.train()
    best = trainer.state.best_model_checkpoint
    return result(trainer) | {"best": best.rpartition("/")[2], "bests_loss": trainer.evaluate()["eval_loss"]}


def resumed(plan: Any, folder: str, **settings: Any) -> dict[str, Any]:
    """The rest of that run from its first checkpoint."""
    changes = {"max_steps": 6, "learning_rate": 0.1, "gradient_accumulation_steps": 2, **settings}
    trainer = make(plan, "deep", folder, eval_strategy="steps", eval_steps=2, **changes)
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    return result(trainer)


T5 = {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
T5 |= {"dropout_rate": 0.0, "pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0}
WHISPER = {
    "vocab_size": VOCABULARY, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "dropout": 0.0, "num_mel_bins": 8,
    "max_source_positions": 8, "max_target_positions": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1, "suppress_tokens": None, "begin_suppress_tokens": None,
}  # fmt: skip


def encoder_decoder(kind: str) -> tuple[nn.Module, Rows, Rows]:
    """A model, and what it is trained and evaluated on."""
    torch.manual_seed(0)
    data, tests = padded(48), padded(7, 1)
    if kind == "t5":
        return transformers.T5ForConditionalGeneration(transformers.T5Config(**T5)), data, tests
    for row in (*data, *tests):
        del row["attention_mask"]
        row["input_features"] = torch.randn(8, 16)
        row["labels"] = row["labels"].where(row["labels"] > 2, 3)
        del row["input_ids"]
    return transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**WHISPER)), data, tests


def translated(plan: Any, kind: str, **settings: Any) -> dict[str, Any]:
    """Encoder-decoder models, evaluated by what they generate, with beams and without."""
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

    model, data, tests = encoder_decoder(kind)
    made, given = ours(Seq2SeqTrainer, plan)
    changes = {**DEFAULTS, **SETTINGS, "predict_with_generate": True, "generation_max_length": 9, **settings}
    seen: list[Any] = []

    def metrics(prediction: Any) -> dict[str, float]:
        seen.append([row[row >= 0].tolist() for row in prediction.predictions])
        return {"mean": float(prediction.predictions.mean())}

    arguments = Seq2SeqTrainingArguments(tempfile.mkdtemp(), **changes)
    trainer = made(
        model, args=arguments, train_dataset=data, eval_dataset=tests, compute_metrics=metrics, **given
    )  # fmt: skip
    trainer.train()
    predicted = trainer.predict(tests[:3], num_beams=2).predictions
    return result(trainer) | {"generated": seen, "predicted": [row[row >= 0].tolist() for row in predicted]}


class OwnLoss(pl.LightningModule):
    """A model that computes its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch).loss
        self.losses.append(self.all_gather(loss.detach()).mean().item())
        return loss


class Translator(OwnLoss):
    """An encoder-decoder model in a module, which generates to predict."""

    def __init__(self) -> None:
        model, data, tests = encoder_decoder("t5")
        super().__init__(model)
        self.data, self.tests = data, tests

    def predict_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> list[list[int]]:
        engine = getattr(self.trainer.strategy, "engine", None)
        with nullcontext() if engine is None else engine.inference():
            rows: torch.Tensor = self.model.generate(batch["input_ids"], max_new_tokens=6)
        return rows.tolist()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


class ByHand(pl.LightningModule):
    """Manual optimization, of a module that is called by position; the head is its own."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.model = llama().model
        self.head = nn.Linear(16, VOCABULARY)
        self.losses: list[float] = []

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.model(input_ids=ids, attention_mask=mask).last_hidden_state)
        return logits

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        logits = self(batch["input_ids"], batch["attention_mask"])[:, :-1]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)
        self.manual_backward(loss / 2)
        optimizer = self.optimizers()
        if batch_idx % 2:
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()
        self.losses.append(loss.item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3, eps=1e-4)


def by_hand(plan: Any, folder: str) -> dict[str, Any]:
    torch.manual_seed(0)
    module = ByHand()
    trainer = trainer_of(plan, folder, max_epochs=1, enable_checkpointing=False)
    trainer.fit(module, DataLoader(padded(32), batch_size=4))
    return {"losses": module.losses, "state": values(module)}


def of_lightning(plan: Any, folder: str) -> dict[str, Any]:
    module = Translator()
    trainer = trainer_of(plan, folder, max_epochs=1, gradient_clip_val=0.5, enable_checkpointing=False)
    trainer.fit(module, DataLoader(module.data, batch_size=2))
    generated = trainer.predict(module, DataLoader(module.tests[:4], batch_size=2))
    return {"losses": module.losses, "generated": generated, "state": values(module)}
