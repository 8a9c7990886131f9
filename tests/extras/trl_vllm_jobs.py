"""What ranks do whose TRL trainer samples by vLLM: by a server, or by an engine in each rank (colocated_vllm.py).

vllm is not installed. The server is a stand-in on the loopback, in rank 0's process, that answers the routes which
TRL's client uses; the client is TRL's own but for NCCL: it meets nobody, and tensors are handed to the stand-in
directly.
"""

from __future__ import annotations

import importlib
import json
import os
import queue
import tempfile
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import colocated_vllm
import torch
import trl.generation.vllm_client as client
import trl.generation.vllm_generation as generation
from datasets import Dataset
from trainer_jobs import llama, told
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer
from trl_jobs import COMMON, LARGE_EPS, ours, texts, tokenizer

from tests.ranks.sampler_servers import StandIn

Tensor = torch.Tensor
TRAINERS = {
    "grpo": (GRPOTrainer, GRPOConfig),
    "rloo": (RLOOTrainer, RLOOConfig),
    "online_dpo": (OnlineDPOTrainer, OnlineDPOConfig),
}


class Served(StandIn):
    """Has a model of its own, and samples as the routes of OpenAI's protocol ask it to."""

    def __init__(self) -> None:
        super().__init__()
        self.model = llama()
        self.arriving: queue.SimpleQueue[list[tuple[str, Tensor]]] = queue.SimpleQueue()
        self.weights = colocated_vllm.ArrivingWeights(self.model)
        self.draw = torch.Generator().manual_seed(7)
        self.is_updating = False

    def answer(self, route: str, query: dict[str, list[str]], body: dict[str, Any] | None) -> Any:
        named = {"/v1/models": "/models", "/v1/completions": "/completions"}.get(route, route)
        return super().answer(named, query, body)

    def on_health(self) -> dict[str, Any]:
        return {}

    def on_models(self) -> dict[str, Any]:
        return {"data": [{"id": "policy"}]}

    def on_server_info(self, config_format: str) -> dict[str, Any]:
        config = {
            "weight_transfer_config": {"backend": "nccl"},
            "model_config": {"logprobs_mode": "processed_logprobs"},
        }
        return {"vllm_config": config}

    def on_start_weight_update(self) -> dict[str, Any]:
        self.is_updating = True
        return {"message": "Weight update started"}

    def on_update_weights(self, update_info: dict[str, Any]) -> dict[str, Any]:
        if not self.is_updating:
            raise RuntimeError("no update was started")
        came = self.arriving.get(timeout=60)
        announced = list(zip(update_info["names"], update_info["dtype_names"], update_info["shapes"], strict=True))
        described = [(name, str(one.dtype).removeprefix("torch."), list(one.shape)) for name, one in came]
        if announced != described:
            raise ValueError(f"{announced} were announced, and {described} came")
        self.weights.take(came)
        return {"message": "Weights updated"}

    def on_finish_weight_update(self) -> dict[str, Any]:
        self.weights.end_round()
        self.is_updating = False
        return {"message": "Weight update finished"}

    def on_reset_prefix_cache(self) -> dict[str, Any]:
        return {"success": True}

    @torch.no_grad()
    def on_completions(self, prompt: list[Any], n: int, max_tokens: int, **_: Any) -> dict[str, Any]:
        choices = []
        for given in prompt:
            ids = tokenizer()(given)["input_ids"] if isinstance(given, str) else given
            for _ in range(n):
                row, logs = list(ids), []
                for _ in range(max_tokens):
                    logits = self.model(input_ids=torch.tensor([row])).logits[0, -1].log_softmax(-1)
                    row.append(int(torch.multinomial(logits.exp(), 1, generator=self.draw)))
                    logs.append(float(logits[row[-1]]))
                tokens = [f"token_id:{token}" for token in row[len(ids) :]]
                logprobs = {"tokens": tokens, "token_logprobs": logs, "top_logprobs": [None] * len(tokens)}
                choices.append({"prompt_token_ids": ids, "token_ids": row[len(ids) :], "logprobs": logprobs})
        return {"choices": choices}


def served(name: str, plan: Any) -> dict[str, Any]:
    """A run of three steps; what was generated, and what the server got before each, as rank 0 saw it."""
    server = Served()
    with server.serving() as address:
        _connect(server)
        trainer, seen = _trainer(name, plan, vllm_mode="server", vllm_server_base_url=address)
        trainer.train()
    return told(trainer, getattr(trainer, "engine", None)) | {"generated": seen, "synced": server.weights.rounds}


def colocated(name: str, plan: Any, peft_config: Any = None, **more: Any) -> dict[str, Any]:
    """The same with an engine of vLLM in each rank, as this rank saw it."""
    colocated_vllm.install()
    trainer, seen = _trainer(name, plan, peft_config, vllm_mode="colocate", **more)
    trainer.train()
    llm = trainer.llm if name == "online_dpo" else trainer.vllm_generation.llm
    return told(trainer, getattr(trainer, "engine", None)) | {"generated": seen, "synced": llm.weights.rounds}


def alone(name: str, plan: Any, misled_from: int = 99, **more: Any) -> dict[str, Any]:
    """Without vLLM: what is trained generates. Ranks from `misled_from` on get other rewards."""
    trainer, seen = _trainer(name, plan, misled_from=misled_from, use_vllm=False, **more)
    trainer.train()
    return told(trainer, getattr(trainer, "engine", None)) | {"generated": seen}


def _connect(server: Served) -> None:
    """As if vllm were there, with all of TRL's client but its NCCL."""

    def send(iterator: Iterator[tuple[str, Tensor]], **_: Any) -> None:
        server.arriving.put([(name, one.detach().clone()) for name, one in iterator])

    online_dpo: Any = importlib.import_module("trl.experimental.online_dpo.online_dpo_trainer")
    for module in (client, generation, online_dpo):
        module.is_vllm_available = lambda *_: True
    online_dpo.SamplingParams = SimpleNamespace
    online_dpo.torch = _OnProcessors()
    client._HAS_STATEFUL_TRAINER_ENGINE = client._HAS_RESET_PREFIX_CACHE_SUCCESS = True
    client.packed_nccl_broadcast_producer = send
    client.VLLMClient.init_communicator = lambda self, device: self.get_server_info()


class _OnProcessors:
    """torch, for a trainer that asks which accelerator there is and takes it to be one."""

    accelerator = SimpleNamespace(current_accelerator=lambda: torch.device("cpu"))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _trainer(
    name: str, plan: Any, peft_config: Any = None, misled_from: int = 99, **more: Any
) -> tuple[Any, list[Any]]:
    of_trl, settings = TRAINERS[name]
    folder = tempfile.mkdtemp()
    llama().save_pretrained(folder)  # where a reference model comes from; once ranks have met, rank 0 saves alone
    made, given = ours(of_trl, plan)
    common = {key: value for key, value in COMMON.items() if key not in ("max_length", "dataset_num_proc")}
    own = {"num_generations": 2, "max_completion_length": 6, "gradient_accumulation_steps": 1, "max_steps": 3}
    if name == "online_dpo":
        own = {"max_new_tokens": 6, "max_steps": 3, "gradient_accumulation_steps": 1, "max_length": 24}
    given_to_all = {**common, **own, "learning_rate": 3e-2, "adam_epsilon": LARGE_EPS, "use_vllm": True}
    arguments = settings(tempfile.mkdtemp(), **{**given_to_all, **more})
    seen: list[Any] = []

    def reward(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        seen.append(json.loads(json.dumps(completion_ids)))
        sign = -1 if int(os.environ.get("RANK", 0)) >= misled_from else 1
        return [sign * float(sum(ids) % 7) for ids in completion_ids]

    data = Dataset.from_dict({"prompt": texts(16, 0)})
    model = AutoModelForCausalLM.from_pretrained(folder)
    trainer = made(
        model, args=arguments, train_dataset=data, reward_funcs=reward, processing_class=tokenizer(),
        peft_config=peft_config, **given,
    )  # fmt: skip
    return trainer, seen
