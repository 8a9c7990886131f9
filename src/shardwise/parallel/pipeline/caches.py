"""Key-value caches of transformers, of which each rank fills the layers of its own stages.

[Note: layers elsewhere] A model asks its cache how much it holds, of the first layer mostly, to number positions and to
make masks. So after each call a rank appends as many tokens to layers of other ranks as its own have got, of one head
with one element each: their lengths are right, whatever their class, and so is all that is done to whole caches
between calls, such as reordering them for beam search.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import nn

from shardwise.errors import ModelError
from shardwise.system.loaded import loaded

Tensor = torch.Tensor
_ARGUMENT, _SWITCH = "past_key_values", "use_cache"
_HALVES = ("self_attention_cache", "cross_attention_cache")
_CACHES = "transformers.cache_utils"
_LAYERS = ("DynamicLayer", "DynamicSlidingWindowLayer", "StaticLayer", "StaticSlidingWindowLayer")
"""Classes of layers that hold keys and values, one of each per token, and nothing else."""


class Growth(NamedTuple):
    """What a call has appended to a layer of a cache."""

    rows: int
    tokens: int


class CallCache:
    """The cache that one call of a model is given. `own` are the numbers of this rank's layers, by stage.

    Of a decoder that attends to an encoder it has two. What a layer keeps of the encoder only that layer reads, so
    layers elsewhere have none of it.

    Raises `ModelError` for a cache with layers that are not known to work.
    """

    def __init__(self, cache: Any, own: Mapping[int, frozenset[int]]) -> None:
        self.cache = cache
        self._own = own
        self._mine = sorted(frozenset().union(*own.values()))
        halves = [getattr(cache, half) for half in _HALVES if hasattr(cache, half)] or [cache]
        for half in halves:
            _require_known(half)
        self._kept = kept = halves[0]
        if kept.layer_class_to_replicate is not None:
            while len(kept.layers) <= max(self._mine, default=0):
                kept.layers.append(kept.layer_class_to_replicate())
        self._length = self._own_length()
        self._before = {number: _of_same_length(kept.layers[number]) for number in self._mine} if len(own) > 1 else {}

    @contextmanager
    def in_stage(self, stage: int) -> Iterator[None]:
        """A context for the forward of one stage: to it, layers of this rank's other stages are as before the call."""
        layers = self._kept.layers
        others = self._before.keys() - self._own[stage]
        self._kept.layers = [self._before[at] if at in others else layer for at, layer in enumerate(layers)]
        try:
            yield
        finally:
            self._kept.layers = layers

    def growth(self) -> Growth | None:
        """What the call has appended to this rank's layers; `None` if it has none, or if the model has not used the
        cache."""
        tokens = self._own_length() - self._length
        return Growth(self._kept.layers[self._mine[0]].keys.shape[0], tokens) if tokens else None

    def grow_others(self, growth: Growth) -> None:
        """Make the layers of other ranks as long as those that have got `growth`."""
        device = next((layer.keys.device for layer in self._kept.layers if layer.keys is not None), None)
        tokens = torch.ones(growth.rows, 1, growth.tokens, 1, dtype=torch.uint8, device=device)
        for number, layer in enumerate(self._kept.layers):
            if number not in self._mine:
                layer.update(tokens, tokens)

    def _own_length(self) -> int:
        return int(self._kept.layers[self._mine[0]].get_seq_length()) if self._mine else 0


def cache_in(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The cache among the arguments of a call, or `None`."""
    kind = loaded(_CACHES, "Cache")
    return None if kind is None else next((one for one in (*args, *kwargs.values()) if isinstance(one, kind)), None)


def is_cache(value: object) -> bool:
    return cache_in((value,), {}) is not None


def with_cache(model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments of a call, with the cache that a model of transformers would otherwise make in its forward:
    in each stage another one."""
    config, kind = getattr(model, "config", None), loaded(_CACHES, "DynamicCache")
    if getattr(config, "is_encoder_decoder", False) and kwargs.get(_SWITCH) is None and cache_in(args, kwargs) is None:
        return without_cache(model, args, kwargs)  # the decoder makes it, of two
    uses = kwargs.get(_SWITCH)
    uses = getattr(config, "use_cache", False) if uses is None else uses
    if not uses or kind is None or not getattr(config, "is_decoder", True) or cache_in(args, kwargs) is not None:
        return kwargs
    return {**kwargs, _ARGUMENT: kind(config=config)} if _takes(model, args, _ARGUMENT) else kwargs


def without_cache(model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments of a call in which a model of transformers makes no cache."""
    config = getattr(model, "config", None)
    inner = getattr(config, "text_config", None)  # of a model with an image tower, which passes arguments on
    # the decoder of an encoder-decoder model may have a config of its own
    is_used = any(getattr(config, name, False) for name in (_SWITCH, "is_encoder_decoder"))
    is_used |= getattr(inner, _SWITCH, False)
    takes = is_used and _takes(model, args, _SWITCH, passes_on=inner is not None)
    return {**kwargs, _SWITCH: False} if takes else kwargs


def _takes(model: nn.Module, args: Sequence[Any], name: str, *, passes_on: bool = False) -> bool:
    """Whether a call with positional `args` may give the model, or what peft has wrapped, an argument of this name;
    `passes_on`: also if it takes any."""
    wrapped = getattr(model, "get_base_model", None)  # peft's wrapper passes on what it is called with
    given = signature((wrapped() if callable(wrapped) else model).forward).parameters
    takes_any = any(one.kind is one.VAR_KEYWORD for one in given.values())
    return name in list(given)[len(args) :] or (passes_on and takes_any)


def layers_of(modules: Sequence[nn.Module]) -> frozenset[int]:
    """The numbers of the cache's layers that `modules` fill. Layers of an encoder may have numbers too."""
    found = (inner for module in modules for inner in module.modules() if getattr(inner, "is_decoder", True))
    numbers = (getattr(inner, "layer_idx", None) for inner in found)
    return frozenset(number for number in numbers if isinstance(number, int))


def _require_known(cache: Any) -> None:
    layers = getattr(cache, "layers", None)
    lazy = getattr(cache, "layer_class_to_replicate", None)
    kinds = {type(layer) for layer in layers or ()} | ({lazy} if lazy is not None else set())
    odd = next((kind for kind in kinds if kind not in [loaded(_CACHES, name) for name in _LAYERS]), None)
    if layers is None or odd is not None or getattr(cache, "offloading", False):
        what = "layers on the host" if odd is None and layers is not None else getattr(odd, "__name__", "other layers")
        raise ModelError(
            f"A {type(cache).__name__} with {what} cannot be kept by pipeline stages, each of which has its own layers "
            f"of a cache. Call the model, or generate, with use_cache=False, or with a plain DynamicCache."
        )


def _of_same_length(layer: Any) -> Any:
    """A layer that only says how much `layer` holds at present."""
    copied = copy.copy(layer)
    for name, value in vars(layer).items():
        if isinstance(value, Tensor):
            setattr(copied, name, value[:, :1, :, :1] if value.dim() == 4 else value.clone())
    return copied
