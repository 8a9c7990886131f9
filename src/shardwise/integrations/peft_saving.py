"""Saves peft adapters of a sharded model: a few whole tensors, and prompts, which peft computes while it saves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

import shardwise as sw
from shardwise.parallel.pipeline.saved_adapters import with_all_modules


def adapter_state_dict(model: Any, engine: sw.Engine) -> dict[str, torch.Tensor]:
    """The whole tensors that peft saves, of all pipeline stages: adapters, fully trained modules, and their buffers, as
    the projections of VeRA are. Collective."""
    from peft import get_peft_model_state_dict

    whole = with_all_modules(model)
    names = list(whole.state_dict(keep_vars=True))
    marks = {name: torch.empty(0, device="cpu") for name in names}
    chosen = set()
    for adapter, config in model.peft_config.items():
        with _without_rank_pattern(config):
            found = get_peft_model_state_dict(whole, state_dict=dict(marks), adapter_name=adapter)
        chosen |= {id(value) for value in found.values()}
    params = dict(whole.named_parameters(remove_duplicate=False))
    # of a parameter of several modules, as VB-LoRA's vectors are, the engine knows the first name
    first: dict[int, str] = {}
    for name, param in params.items():
        first.setdefault(id(param), name)
    wanted = [name for name in names if id(marks[name]) in chosen]
    kept = _buffers(model, engine, [name for name in wanted if name not in params])
    for name in wanted:
        value = engine.get(first[id(params[name])]) if name in params else None
        if value is not None:
            kept[name] = value.cpu()
    return kept


def _buffers(model: Any, engine: sw.Engine, names: list[str]) -> dict[str, torch.Tensor]:
    """The buffers `names`. Ranks have all of them whole, but those of other pipeline stages."""
    if not names:
        return {}
    own = model.state_dict(keep_vars=True)
    state = engine.state_dict() if engine.any_rank(any(name not in own for name in names)) else own
    return {name: state[name].detach().cpu() for name in names}


@contextmanager
def prompts_precomputed(model: Any) -> Iterator[None]:
    """Inside, rank 0 can save alone: all ranks compute the prompts on entry, with gathered parameters. Collective."""
    with torch.no_grad():
        prompts = {
            adapter: model.get_prompt_embedding_to_save(adapter)
            for adapter, config in model.peft_config.items()
            if config.is_prompt_learning
        }
    if not prompts:
        yield
        return
    model.get_prompt_embedding_to_save = prompts.__getitem__
    try:
        yield
    finally:
        del model.get_prompt_embedding_to_save


@contextmanager
def _without_rank_pattern(config: Any) -> Iterator[None]:
    """AdaLoRA drops rows by a pattern while it saves, which fails on the empty tensors that mark names here."""
    pattern = getattr(config, "rank_pattern", None)
    if pattern:
        config.rank_pattern = None
    try:
        yield
    finally:
        if pattern:
            config.rank_pattern = pattern
