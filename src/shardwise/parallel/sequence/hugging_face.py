"""Models of transformers: attention through its `AttentionInterface`, under a name of our own.

[Note: masks of transformers] transformers makes no mask for an attention name that its mask functions do not know; a
mask would only cover this rank's tokens. What each token may see is derived from the whole batch instead.

[Note: eager attention] The library's eager attention adds the lowest number to scores that are masked, so a token that
sees nothing (padding before the first token that is kept) gets the mean of all values, later ones too. Its other kinds
of attention, and ours, give zeros. The output for such a token matters only if a label counts there.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from shardwise.errors import ModelError
from shardwise.parallel.library_model import pretrained_in
from shardwise.parallel.sequence.attention import Attention, AttentionCall
from shardwise.runtime import in_backward
from shardwise.system.loaded import loaded

Tensor = torch.Tensor
NAME = "shardwise_sequence"
_KNOWN_LAYERS = ("full_attention", "sliding_attention")
_UNKNOWN = ("s_aux", "position_bias")
_COUNT_KEPT = ("opt",)
"""Values of `config.model_type` whose models number the tokens of a mask that are kept, with -1 for others."""
_BESIDE_TOKENS = ("pixel_values", "pixel_values_videos", "input_features", "input_values")
_BLOCKS = "block_sequence_ids"
"""The library's argument for tokens that see each other both ways, in the source of models that pass it."""

_ATTENTIONS: weakref.WeakKeyDictionary[nn.Module, Attention] = weakref.WeakKeyDictionary()
"""The attention of each module, because transformers calls one function for all models of the process."""


def check(model: nn.Module) -> None:
    """Raise `ModelError` for a model of transformers whose attention cannot be split over the sequence."""
    for module in pretrained_in(model):
        name, config = type(module).__name__, module.config
        if not module._can_set_attn_implementation():
            raise ModelError(
                f"{name} does not go through transformers' AttentionInterface, so its attention cannot be split over "
                f"the sequence. Leave sp out of the mesh."
            )
        if getattr(config, "is_encoder_decoder", False):
            raise ModelError(
                f"{name} is an encoder and a decoder, whose sequences have lengths of their own; only one sequence can "
                f"be split. Leave sp out of the mesh."
            )
        if getattr(config, "output_router_logits", False):
            raise ModelError(
                f"{name} adds a loss that balances its experts, over all tokens of a batch, to its own; over sp a rank "
                f"has some of them only. Set output_router_logits=False in its configuration."
            )
        if getattr(config, "token_dropout", False):
            raise ModelError(
                f"{name} scales its embeddings by how many tokens of a sequence are masked; over sp a rank has some of "
                f"them only. Set token_dropout=False in its configuration."
            )
        others = set(getattr(config, "layer_types", None) or ()) - set(_KNOWN_LAYERS)
        if others:
            raise ModelError(
                f"{name} has layers of kind {', '.join(sorted(others))}; over a split sequence there are "
                f"{' and '.join(_KNOWN_LAYERS)}. Leave sp out of the mesh."
            )


def num_heads(model: nn.Module) -> list[int]:
    """The numbers of query heads of the transformers models in `model`, where their configurations have them."""
    found = [getattr(module.config, "num_attention_heads", None) for module in pretrained_in(model)]
    return [number for number in found if isinstance(number, int)]


def takes_positions(model: nn.Module) -> bool:
    """Whether the outermost model of transformers in `model` takes `position_ids`, instead of counting from 0."""
    models = pretrained_in(model)
    return bool(models) and "position_ids" in inspect.signature(inspect.unwrap(type(models[0]).forward)).parameters


def positions(model: nn.Module, tokens: Tensor, mask: Tensor | None) -> Tensor:
    """The `position_ids` `[1 or batch, tokens]` that the transformers model in `model` would give to a whole batch.

    `tokens` are `input_ids` or `inputs_embeds`.
    """
    num_tokens = tokens.shape[1]
    numbers = torch.arange(num_tokens, device=tokens.device)[None]
    first = pretrained_in(model)[0]
    if mask is not None and first.config.model_type in _COUNT_KEPT:
        return mask.long().cumsum(1) * mask.long() - 1
    for module in first.modules():
        padding = getattr(module, "padding_idx", None)
        if isinstance(padding, int) and _counts_from_padding(module):
            kept = tokens.ne(padding).long() if tokens.dim() == 2 else torch.ones_like(numbers)
            return kept.cumsum(1) * kept + padding
    return numbers


def _counts_from_padding(module: nn.Module) -> bool:
    """Whether embeddings count tokens that are not padding, from after the padding's own number, as RoBERTa's do."""
    name = "create_position_ids_from_input_ids"
    is_of_file = hasattr(sys.modules[type(module).__module__], name) and hasattr(module, "position_embeddings")
    return hasattr(module, name) or is_of_file


def check_batch(model: nn.Module, names: Collection[str]) -> None:
    """Raise `ModelError` for a batch with inputs `names` by which more than the order of tokens decides what each sees,
    or which belong to tokens of any rank."""
    models = pretrained_in(model)
    if not models:
        return
    name = type(models[0]).__name__
    beside = [one for one in _BESIDE_TOKENS if one in names]
    if beside:
        raise ModelError(
            f"{name} is given {' and '.join(beside)}, which it places among its tokens; over sp a rank has only some "
            f"of those. Leave sp out of the mesh."
        )
    if "token_type_ids" in names and any(_BLOCKS in _source_of(type(module)) for module in models):
        raise ModelError(
            f"{name} is given token_type_ids, by which tokens of a prefix see each other both ways. That cannot be "
            f"split over the sequence yet. Leave token_type_ids out of the batch, or sp out of the mesh."
        )


def _source_of(kind: type) -> str:
    return _source_of_module(kind.__module__)


@functools.cache
def _source_of_module(name: str) -> str:
    try:
        return inspect.getsource(sys.modules[name])
    except OSError:
        return ""


def is_eager(model: nn.Module) -> bool:
    """Whether a model of transformers in `model` has the library's eager attention; see [Note: eager attention]."""
    return any(module.config._attn_implementation == "eager" for module in pretrained_in(model))


def sees_nothing(model: nn.Module, kept: Tensor) -> Tensor:
    """Which tokens see neither themselves nor others under a causal mask, `[batch, tokens]`."""
    num_seen = kept.long().cumsum(1)
    windows = [getattr(module.config, "sliding_window", None) for module in pretrained_in(model)]
    window = min((one for one in windows if isinstance(one, int)), default=kept.shape[1])
    if window < kept.shape[1]:
        num_seen = num_seen - functional.pad(num_seen, (window, 0))[:, : kept.shape[1]]
    return num_seen == 0


def takes_shifted_labels(model: nn.Module) -> bool:
    """Whether `model` is a causal language model with transformers' own loss, which takes `shift_labels`."""
    models = pretrained_in(model)
    if not models or getattr(models[0], "loss_type", None) not in ("ForCausalLM", None):
        return False
    forward = inspect.unwrap(type(models[0]).forward)
    return "loss_function" in forward.__code__.co_names


def route(model: nn.Module, attention: Attention) -> Callable[[], None]:
    """Route the attention of transformers models in `model` to `attention`. Returns a function that undoes it."""
    models = pretrained_in(model)
    if not models:
        return lambda: None
    interface: Any = loaded("transformers.modeling_utils", "ALL_ATTENTION_FUNCTIONS")
    if NAME not in interface:
        type(interface).register(NAME, _attention_forward)
    before = {id(module.config): (module.config, module.config._attn_implementation) for module in models}
    for module in model.modules():
        _ATTENTIONS[module] = attention
    for config, _ in before.values():
        config._attn_implementation_internal = NAME

    def put_back() -> None:
        for config, name in before.values():
            config._attn_implementation_internal = name
        for module in model.modules():
            _ATTENTIONS.pop(module, None)

    return put_back


def _attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Called by transformers: `[batch, heads, tokens, dim]` in, `[batch, tokens, heads, dim]` out."""
    _check_call(module, attention_mask, kwargs)
    is_causal = kwargs.get("is_causal")
    call = AttentionCall(
        is_causal=getattr(module, "is_causal", True) if is_causal is None else is_causal,
        scale=kwargs.get("scaling"),
        dropout=kwargs.get("dropout", 0.0),
        window=kwargs.get("sliding_window"),
        softcap=kwargs.get("softcap"),
    )
    if call.window is not None and not call.is_causal:
        raise ModelError(f"{type(module).__name__} has a bidirectional window, which cannot be split yet.")
    out = _ATTENTIONS[module].attend(query, key, value, call, recomputed=in_backward())
    return out.transpose(1, 2).contiguous(), None


def _check_call(module: nn.Module, attention_mask: Tensor | None, kwargs: Mapping[str, Any]) -> None:
    name = type(module).__name__
    unknown = [key for key in _UNKNOWN if kwargs.get(key) is not None]
    if unknown:
        raise ModelError(
            f"{name} asks for {' and '.join(unknown)} in its attention, which cannot be split over the sequence yet. "
            f"Leave sp out of the mesh."
        )
    if kwargs.get("output_attentions"):
        raise ModelError("Attention over a split sequence gives no weights. Leave out output_attentions=True.")
    if attention_mask is not None:
        raise ModelError(
            f"{name} was given an attention mask of shape {list(attention_mask.shape)} of its own. Give padding to "
            f"engine.split_sequence as attention_mask [batch, tokens], and packed documents as documents=."
        )
