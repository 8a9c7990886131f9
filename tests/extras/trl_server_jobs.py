"""What ranks do whose TRL trainer samples by a server of vLLM.

vllm is not installed. The server is a stand-in on the loopback, in rank 0's process, that answers the routes which
TRL's client uses; the client is TRL's own but for NCCL: it meets nobody, and tensors are handed to the stand-in
directly.
"""

from __future__ import annotations

import json
import queue
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
import trl.generation.vllm_client as client
import trl.generation.vllm_generation as generation
from datasets import Dataset
from trainer_jobs import llama, told
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl_jobs import COMMON, ours, texts, tokenizer

from tests.ranks.sampler_servers import StandIn

Tensor = torch.Tensor
TRAINERS = {"grpo": (GRPOTrainer, GRPOConfig), "rloo": (RLOOTrainer, RLOOConfig)}


class Served(StandIn):
    """Has a model of its own, and samples as the routes of OpenAI's protocol ask it to."""

    def __init__(self) -> None:
        super().__init__()
        self.model = llama()
        self.arriving: queue.SimpleQueue[list[tuple[str, Tensor]]] = queue.SimpleQueue()
        self.synced: list[dict[str, Any]] = []
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
        self.model.load_state_dict(dict(came))
        self.synced.append({name: one.tolist() for name, one in came})
        return {"message": "Weights updated"}

    def on_finish_weight_update(self) -> dict[str, Any]:
        self.is_updating = False
        return {"message": "Weight update finished"}

    def on_reset_prefix_cache(self) -> dict[str, Any]:
        return {"success": True}

    @torch.no_grad()
    def on_completions(self, prompt: list[list[int]], n: int, max_tokens: int, **_: Any) -> dict[str, Any]:
        choices = []
        for ids in prompt:
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
    return told(trainer, getattr(trainer, "engine", None)) | {"generated": seen, "synced": server.synced}


def refused(name: str, mode: str) -> None:
    """Begin what our trainers refuse, under any server."""
    _connect(Served())
    if name == "online_dpo":
        from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

        TRAINERS[name] = (OnlineDPOTrainer, OnlineDPOConfig)
    _trainer(name, "zero3", vllm_mode=mode)


def _connect(server: Served) -> None:
    """As if vllm were there, with all of TRL's client but its NCCL."""

    def send(iterator: Iterator[tuple[str, Tensor]], **_: Any) -> None:
        server.arriving.put([(name, one.detach().clone()) for name, one in iterator])

    for module in (client, generation):
        module.is_vllm_available = lambda *_: True
    client._HAS_STATEFUL_TRAINER_ENGINE = client._HAS_RESET_PREFIX_CACHE_SUCCESS = True
    client.packed_nccl_broadcast_producer = send
    client.VLLMClient.init_communicator = lambda self, device: self.get_server_info()


def _trainer(name: str, plan: Any, **more: Any) -> tuple[Any, list[Any]]:
    of_trl, settings = TRAINERS[name]
    folder = tempfile.mkdtemp()
    llama().save_pretrained(folder)  # where a reference model comes from; once ranks have met, rank 0 saves alone
    made, given = ours(of_trl, plan)
    common = {key: value for key, value in COMMON.items() if key not in ("max_length", "dataset_num_proc")}
    own = {"num_generations": 2, "max_completion_length": 6, "gradient_accumulation_steps": 1, "max_steps": 3}
    own = own if name != "online_dpo" else {"max_new_tokens": 6, "max_steps": 3}
    arguments = settings(tempfile.mkdtemp(), **{**common, **own, "learning_rate": 3e-2, "use_vllm": True, **more})
    seen: list[Any] = []

    def reward(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        seen.append(json.loads(json.dumps(completion_ids)))
        return [float(sum(ids) % 7) for ids in completion_ids]

    data = Dataset.from_dict({"prompt": texts(16, 0)})
    model = AutoModelForCausalLM.from_pretrained(folder)
    trainer = made(
        model, args=arguments, train_dataset=data, reward_funcs=reward, processing_class=tokenizer(), **given
    )
    return trainer, seen
