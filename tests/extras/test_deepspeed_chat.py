"""PPO in the form of DeepSpeed-Chat's third step, with its hybrid engine, against the same in plain PyTorch in one
process: the same answers token for token, the same losses, the same weights."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ppo import actor_loss_of, advantages_and_returns, critic_loss_of, end_scores, log_probs_of
from test_deepspeed_sft import Lora
from torch import nn
from torch.utils.data import DistributedSampler
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    BloomConfig,
    GPTNeoXConfig,
    LlamaConfig,
    OPTConfig,
    PreTrainedConfig,
    get_scheduler,
)

from tests.thorough import thorough_only

Tensor = torch.Tensor
pytestmark = pytest.mark.timeout(300)
SCRIPT = Path(__file__).with_name("deepspeed_chat.py")
PAD, EPOCHS, RANKS, BATCH, ANSWER = 0, 2, 2, 2, 6
RATE = 1e-2
KEYS = ("k_proj.bias", "query_key_value.bias")
"""The gradient of the keys' bias is only rounding, which Adam turns into full-size updates."""
SIZES = {"vocab_size": 61, "hidden_size": 16, "bos_token_id": 1, "eos_token_id": 1, "pad_token_id": PAD}
HEADS = {"num_hidden_layers": 2, "num_attention_heads": 2}


def config_of(kind: str) -> PreTrainedConfig:
    if kind == "llama":
        return LlamaConfig(**SIZES, **HEADS, intermediate_size=32, num_key_value_heads=1)
    if kind == "opt":
        return OPTConfig(**SIZES, **HEADS, ffn_dim=32, word_embed_proj_dim=16, dropout=0.0, max_position_embeddings=32)
    if kind == "neox":
        return GPTNeoXConfig(**SIZES, **HEADS, intermediate_size=32, max_position_embeddings=32)
    return BloomConfig(**SIZES, n_layer=2, n_head=2, hidden_dropout=0.0, attention_dropout=0.0)


class Valued(nn.Module):
    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.v_head = nn.Linear(16, 1, bias=False)
        self.rwtransformer = base

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.v_head(self.rwtransformer(ids, attention_mask=mask, use_cache=False)[0]).squeeze(-1)


def written(folder: Path, kind: str) -> tuple[nn.Module, nn.Module]:
    """An actor and a critic in their folders, with embeddings for 64 words as the script has them."""
    torch.manual_seed(0)
    actor = AutoModelForCausalLM.from_config(config_of(kind))
    for param in actor.parameters():  # of random models as they are, all answers repeat one token
        if param.dim() > 1:
            nn.init.normal_(param, std=0.5)
    actor.resize_token_embeddings(64)
    critic = Valued(AutoModel.from_config(config_of(kind)))
    critic.rwtransformer.resize_token_embeddings(64)
    for name, model, inner in (("actor", actor, actor), ("critic", critic, critic.rwtransformer)):
        inner.config.save_pretrained(folder / name)
        torch.save(model.state_dict(), folder / name / "pytorch_model.bin")
    actor.save_pretrained(folder / "actor")
    return actor, critic


def optimizer_of(model: nn.Module, rate: float, steps: int) -> tuple[torch.optim.Optimizer, Any]:
    named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    groups = [
        {"params": [one for name, one in named if "norm" not in name and "bias" not in name], "weight_decay": 0.1},
        {"params": [one for name, one in named if "norm" in name or "bias" in name], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95))
    return optimizer, get_scheduler("cosine", optimizer, num_warmup_steps=1, num_training_steps=steps)


def stepped(model: nn.Module, losses: list[Tensor], optimizer: torch.optim.Optimizer, schedule: Any) -> None:
    torch.stack(losses).mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()


def adapted(model: nn.Module) -> None:
    """Give the layers of blocks adapters, as the script does."""
    torch.manual_seed(3)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and "layers." in name:
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, Lora(module, 4))


def plain(actor: nn.Module, critic: nn.Module, prompts: Tensor) -> tuple[list[dict[str, Any]], nn.Module]:
    """What each rank tells; and the actor's moving average. Both models are trained."""
    reference, reward, average = (copy.deepcopy(one).eval() for one in (actor, critic, actor))
    orders = [list(DistributedSampler(range(len(prompts)), num_replicas=RANKS, rank=rank)) for rank in range(RANKS)]
    steps = len(orders[0]) // BATCH
    actors, critics = optimizer_of(actor, RATE, EPOCHS * steps), optimizer_of(critic, 5e-3, EPOCHS * steps)
    told: list[dict[str, Any]] = [{"answers": [], "actor": [], "critic": [], "rewards": []} for _ in orders]
    for step in [*range(steps)] * EPOCHS:
        experiences, actor_losses, critic_losses = [], [], []
        for order in orders:
            rows = prompts[order[step * BATCH : (step + 1) * BATCH]]
            with torch.no_grad():
                ids = actor.eval().generate(
                    rows, attention_mask=rows.ne(PAD).long(), max_length=ANSWER + rows.shape[1], pad_token_id=PAD,
                    do_sample=False,
                )  # fmt: skip
                mask = ids.ne(PAD).long()
                experiences.append(
                    {
                        "prompts": rows,
                        "input_ids": ids,
                        "attention_mask": mask,
                        "log_probs": log_probs_of(actor(ids, attention_mask=mask).logits, ids),
                        "reference_log_probs": log_probs_of(reference(ids, attention_mask=mask).logits, ids),
                        "values": critic(ids, mask)[:, :-1],
                        "rewards": end_scores(reward(ids, mask), ids, rows.shape[1], PAD),
                    }
                )
        actor.train()
        for experience in experiences:
            ids, mask = experience["input_ids"], experience["attention_mask"]
            start = experience["prompts"].shape[1] - 1
            advantages, returns, old = advantages_and_returns(experience, start)
            counted = mask[:, 1:][:, start:]
            new = log_probs_of(actor(ids, attention_mask=mask).logits, ids)
            before = experience["log_probs"][:, start:]
            actor_losses.append(actor_loss_of(new[:, start:], before, advantages, counted))
            values = critic(ids, mask)[:, :-1]
            critic_losses.append(critic_loss_of(values[:, start:], old[:, start:], returns, counted))
        stepped(actor, actor_losses, *actors)
        stepped(critic, critic_losses, *critics)
        with torch.no_grad():
            for mean, param in zip(average.parameters(), actor.parameters(), strict=True):
                mean.copy_(torch.lerp(param, mean, 0.5))
        for own, experience, one, other in zip(told, experiences, actor_losses, critic_losses, strict=True):
            own["answers"].append(experience["input_ids"].tolist())
            own["rewards"].append(experience["rewards"].tolist())
            own["actor"].append(one.item())
            own["critic"].append(other.item())
    return told, average


HYBRID = "--enable_hybrid_engine"
SLOW = thorough_only("four models in two processes, for one more kind of model or stage")


@pytest.mark.parametrize(
    ("kind", "stages", "options"),
    [
        ("llama", (3, 3), [HYBRID]),
        pytest.param("opt", (2, 2), [HYBRID, "--offload", "--enable_ema"], marks=SLOW),
        pytest.param("opt", (3, 2), [HYBRID, "--unpin_actor_parameters", "--offload_reference_model"], marks=SLOW),
        pytest.param("bloom", (3, 3), [HYBRID, "--inference_tp_size", "2", "--release_inference_cache"], marks=SLOW),
        pytest.param("neox", (3, 0), [HYBRID, "--enable_ema", "--actor_gradient_checkpointing"], marks=SLOW),
        pytest.param("llama", (3, 3), [HYBRID, "--actor_lora_dim", "4"], marks=SLOW),
        pytest.param("llama", (3, 3), [], marks=SLOW),
    ],
)
def test_a_script_of_four_models_trains_as_in_one_process(
    kind: str, stages: tuple[int, int], options: list[str], tmp_path: Path
) -> None:
    actor, critic = written(tmp_path, kind)
    words = ["--actor_model_name_or_path", "actor", "--critic_model_name_or_path", "critic", "--output_dir", "out"]
    words += ["--actor_zero_stage", str(stages[0]), "--critic_zero_stage", str(stages[1]), "--deepspeed"]
    done = subprocess.run(
        [sys.executable, "-m", "shardwise", "deepspeed", "--num_gpus", "2", str(SCRIPT), *words, *options],
        cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    generator = torch.Generator().manual_seed(5)
    rows = torch.randint(2, 61, (8, 5), generator=generator)
    prompts = rows.masked_fill(torch.arange(5) < 5 - (torch.arange(8) % 4 + 2)[:, None], PAD)
    if "--actor_lora_dim" in options:
        adapted(actor)
    expected, average = plain(actor, critic, prompts)
    answers = {tuple(answer[-ANSWER:]) for own in expected for batch in own["answers"] for answer in batch}
    assert len(answers) > 4, "the model says different things"
    for rank, own in enumerate(expected):
        line = next(line for line in done.stdout.splitlines() if line.startswith(f"TOLD{rank} "))
        found = json.loads(line.partition(" ")[2])
        assert found["answers"] == own["answers"]
        for name in ("actor", "critic"):
            assert found[name] == pytest.approx(own[name], rel=1e-4, abs=1e-5)
        for ours, theirs in zip(found["rewards"], own["rewards"], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    models = {"actor": actor, "critic": critic, **({"actor_ema": average} if "--enable_ema" in options else {})}
    for folder, model in models.items():
        saved = torch.load(tmp_path / "out" / folder / "pytorch_model.bin")
        for name, value in model.named_parameters():
            key = name.replace(".left", ".lora_left_weight").replace(".right", ".lora_right_weight")
            key = key.replace(".linear.", ".")
            bound = 2e-5 if not key.endswith(KEYS) else RATE * EPOCHS * 2
            torch.testing.assert_close(saved[key], value.detach(), rtol=0, atol=bound)
