"""Writes a sharded model as a Hugging Face folder during training: unit by unit, on rank 0."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.checkpoint.formats.as_saved import reversal_of
from shardwise.checkpoint.formats.drafts import drafted
from shardwise.checkpoint.formats.hf import HfWriter
from shardwise.checkpoint.formats.hf_names import ModelNames
from shardwise.checkpoint.formats.source import BUFFER, PARAM, Spec
from shardwise.comm import World
from shardwise.errors import CheckpointError, ModelError
from shardwise.memory.dtypes import dtype_of_codes

Tensor = torch.Tensor


def save_pretrained(
    model: nn.Module,
    kept: Mapping[str, Tensor],
    whole: Iterator[tuple[str, Tensor]],
    world: World,
    folder: Path,
    *,
    dtype: torch.dtype | None,
    max_file_bytes: int,
    overwrite: bool,
) -> None:
    """Write `model` into `folder`. All ranks must call, and all get the error if rank 0 cannot write.

    `kept` has the sharded parameters, in the order in which `whole` yields them, as tensors without memory that have
    the shapes and dtypes of the whole ones. Each step of `whole` is a collective, so every rank must exhaust it,
    whatever happens on rank 0.
    """
    if hasattr(model, "peft_config"):
        raise ModelError(
            f"{type(model).__name__} has PEFT adapters, which have a file format of their own: "
            f"model.save_pretrained(folder, state_dict=engine.state_dict(rank_0_only=True)) writes it."
        )
    refusal = ""
    if world.rank == 0:
        try:
            with drafted(folder, overwrite=overwrite) as draft:
                _write(model, kept, whole, draft, dtype, max_file_bytes)
        except (CheckpointError, ValueError) as error:  # ValueError: a configuration that transformers refuses
            refusal = str(error)
    for _ in whole:
        pass
    answer = world.exchange(refusal.encode(), "save_pretrained")[0].decode()
    if answer:
        raise CheckpointError(answer)


def _write(
    model: nn.Module,
    kept: Mapping[str, Tensor],
    whole: Iterator[tuple[str, Tensor]],
    draft: Path,
    dtype: torch.dtype | None,
    max_file_bytes: int,
) -> None:
    names = ModelNames.of(model)
    loose = _loose(model, names, kept)
    codes = {name for name, param in model.named_parameters() if dtype_of_codes(param) is not None}
    dtypes = {name: dtype if dtype and _is_value(own, name, codes) else own.dtype for name, own in kept.items()}
    specs = {name: _spec(PARAM, name, names, dtypes[name], own) for name, own in kept.items()}
    specs |= {name: _spec(BUFFER, name, names, tensor.dtype, tensor) for name, tensor in loose.items()}
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    specs = {name: spec for name, spec in specs.items() if name not in ignored}
    metas = {spec.name: torch.empty(spec.shape, dtype=spec.dtype, device="meta") for spec in specs.values()}
    reversal = reversal_of(model, metas)
    written = list(specs.values()) if reversal is None else [_made(name, one) for name, one in reversal.made.items()]
    with HfWriter(draft, written, max_file_bytes) as writer:
        for name, tensor in _chained(whole, loose):
            if name not in specs:
                continue
            if reversal is None:
                writer.write(specs[name], tensor)
                continue
            for made, one in reversal.add(specs[name].name, tensor).items():
                writer.write(_made(made, one), one.contiguous())
    weights = (spec.dtype for spec in specs.values() if spec.kind == PARAM)
    _write_configuration(model, draft, next((one for one in weights if one.is_floating_point), None))


def _is_value(tensor: Tensor, name: str, codes: Collection[str]) -> bool:
    """Whether a parameter may be converted to another dtype."""
    return tensor.is_floating_point() and name not in codes


def _chained(whole: Iterator[tuple[str, Tensor]], loose: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Unlike `itertools.chain` this can be abandoned half-way, after which `whole` continues from there."""
    while (item := next(whole, None)) is not None:
        yield item
    yield from loose.items()


def _loose(model: nn.Module, names: ModelNames, kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of the state dict that are not sharded: buffers, and wide integer parameters. Every rank has them."""
    own = {name: param.detach() for name, param in model.named_parameters() if name not in kept}
    return own | {name: one for name, one in model.named_buffers() if name in names.buffers}


def _spec(kind: str, name: str, names: ModelNames, dtype: torch.dtype, like: Tensor) -> Spec:
    return Spec(kind, names.saved_as.get(name, name), tuple(like.shape), dtype)


def _made(name: str, like: Tensor) -> Spec:
    return Spec(PARAM, name, tuple(like.shape), like.dtype)


def _write_configuration(model: Any, folder: Path, dtype: torch.dtype | None) -> None:
    """As transformers does; a plain module has no configuration, and its folder is a state dict."""
    config: Any = copy.deepcopy(getattr(model, "config", None))
    if not hasattr(config, "save_pretrained"):
        return
    config.architectures = [type(model).__name__]
    if dtype is not None:
        config.dtype = str(dtype).removeprefix("torch.")
    config.save_pretrained(folder)
    if hasattr(model, "can_generate") and model.can_generate():
        model.generation_config.save_pretrained(folder)
