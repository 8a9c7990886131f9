"""In the place of vLLM in each rank's own process: what TRL (1.16) asks of `vllm.LLM` with
`vllm_mode="colocate"`, over a model that really loads and samples. vllm is not installed where tests run.

As in vLLM, level 2 of sleep drops the weights, and weights are loaded only while there is memory for them.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from trl_jobs import tokenizer

Tensor = torch.Tensor
_PARTS = {"weights", "kv_cache"}
_USERS = ("trl.generation.vllm_generation", "trl.experimental.online_dpo.online_dpo_trainer")


class ArrivingWeights:
    """Those of `model`, all of which come in each round of updates; `rounds` has them after each."""

    def __init__(self, model: nn.Module) -> None:
        self.rounds: list[dict[str, Any]] = []
        self._own = dict(model.named_parameters())
        self._came: set[str] = set()

    def take(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            self._own[name].data.copy_(tensor)
            self._came.add(name)

    def end_round(self) -> None:
        if self._came != set(self._own):
            raise RuntimeError(f"an update without {set(self._own) - self._came}")
        self._came.clear()
        self.rounds.append({name: one.tolist() for name, one in self._own.items()})


class LLM:
    def __init__(self, model: str, seed: int, **settings: Any) -> None:
        if settings["distributed_executor_backend"] != "external_launcher":
            raise ValueError("it would start processes of its own")
        self.model = AutoModelForCausalLM.from_pretrained(model).eval()
        self.weights = ArrivingWeights(self.model)
        self._draw = torch.Generator().manual_seed(seed)
        self._awake = set(_PARTS)
        worker = SimpleNamespace(model_runner=SimpleNamespace(model=self))
        self.llm_engine = SimpleNamespace(model_executor=SimpleNamespace(driver_worker=worker))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        if "weights" not in self._awake:
            raise RuntimeError("there is no memory for weights while it sleeps")
        self.weights.take(weights)

    def reset_prefix_cache(self) -> bool:
        self.weights.end_round()
        return True

    def sleep(self, level: int = 1) -> None:
        self._awake.clear()
        if level == 2:
            for param in self.model.parameters():
                param.data.fill_(torch.nan)

    def wake_up(self, tags: list[str] | None = None) -> None:
        self._awake |= _PARTS if tags is None else set(tags)

    def collective_rpc(self, method: str) -> None:
        """Reloading from the folder, which workers on other platforms than CUDA do not have."""
        raise NotImplementedError(method)

    @torch.no_grad()
    def generate(self, prompts: list[Any], sampling_params: Any, use_tqdm: bool = True) -> list[Any]:
        if self._awake != _PARTS:
            raise RuntimeError(f"it samples, and of it is awake: {self._awake}")
        made = []
        for prompt in prompts:
            ids = tokenizer()(prompt)["input_ids"] if isinstance(prompt, str) else prompt["prompt_token_ids"]
            outputs = [self._sampled(ids, sampling_params) for _ in range(sampling_params.n)]
            made.append(SimpleNamespace(prompt_token_ids=list(ids), outputs=outputs))
        return made

    def _sampled(self, ids: list[int], settings: Any) -> Any:
        row, logs = list(ids), []
        for _ in range(settings.max_tokens):
            logits = self.model(input_ids=torch.tensor([row])).logits[0, -1] / settings.temperature
            known = logits.log_softmax(-1)
            row.append(int(torch.multinomial(known.exp(), 1, generator=self._draw)))
            logs.append({row[-1]: SimpleNamespace(logprob=float(known[row[-1]]), rank=1)})
        return SimpleNamespace(token_ids=row[len(ids) :], logprobs=logs)


def install() -> None:
    """As if vllm were there, for the trainers of TRL that are made afterwards."""
    for name in _USERS:
        module: Any = importlib.import_module(name)
        module.is_vllm_available = lambda *_: True
        module.LLM, module.SamplingParams, module.StructuredOutputsParams = LLM, SimpleNamespace, SimpleNamespace
