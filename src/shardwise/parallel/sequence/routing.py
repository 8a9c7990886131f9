"""Routes calls of torch's attention inside a model to attention over split sequences.

[Note: the seam] `torch.nn.functional.scaled_dot_product_attention` dispatches to torch function modes, which apply to
one thread and only while they are entered. So nothing in torch is replaced, it does not matter under which name a model
imported the function, and other models compute as before. The mode is entered by hooks on every module of the model, by
the outermost running one: this covers calls of the model, of a part of it, and of parts recomputed in a backward.

Replacing the function would affect the whole process and miss models that imported it by name; wrapping attention
modules needs a list of them.

[Note: positions] A model that numbers its tokens itself would start at 0 on every rank. It is recognized by an `arange`
over exactly as many numbers as a rank has tokens, or by a slice of as many rows from the start of a table: a
parameter, a buffer, or a longer tensor that it keeps otherwise, such as angles. Models of transformers that take
`position_ids` are not checked, because splitting adds those.

Other functions that mix tokens are refused in models of one's own: [Note: along tokens] in `mixing.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from shardwise.errors import ModelError
from shardwise.parallel.sequence.attention import Attention, AttentionCall
from shardwise.runtime import in_backward

Tensor = torch.Tensor
_OTHER_ATTENTION: dict[Any, str] = {
    functional.multi_head_attention_forward: "torch.nn.MultiheadAttention",
    torch._native_multi_head_attention: "torch.nn.MultiheadAttention",
    torch._transformer_encoder_layer_fwd: "torch.nn.TransformerEncoderLayer",
}


class Routing(TorchFunctionMode):
    """A mode in which torch's attention is attention over split sequences."""

    def __init__(
        self,
        attention: Attention,
        numbering: nn.Module | None,
        *,
        is_own: bool = False,
        is_coincidence: Callable[[Callable[..., Any]], bool] = lambda _: False,
    ) -> None:
        """`numbering` is the model if it might number its tokens itself; see [Note: positions]. `is_own`: whether it is
        no model of transformers. `is_coincidence`: see `refuse_mixing`."""
        super().__init__()
        self._attention = attention
        self._numbering = numbering
        self._is_coincidence = is_coincidence
        self._refuse_mixing: Callable[..., None] | None = None
        if is_own:
            from shardwise.parallel.sequence.mixing import refuse_mixing  # few jobs need it

            self._refuse_mixing = refuse_mixing

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            return self._attend(*args, **kwargs)
        if func in _OTHER_ATTENTION:
            raise refused_attention(_OTHER_ATTENTION[func])
        if self._numbering is not None and func in (torch.arange, Tensor.__getitem__):
            self._check_positions(self._numbering, func, args)
        if self._refuse_mixing is not None and self._attention.sample is not None:
            num_local = self._attention.sample.layout.num_local
            self._refuse_mixing(func, args, kwargs, num_local, self._is_coincidence)
        return func(*args, **kwargs)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,  # the numbers of heads tell
    ) -> Tensor:
        if attn_mask is not None:
            raise ModelError(
                f"The model gives scaled_dot_product_attention a mask of shape {list(attn_mask.shape)}, made for the "
                f"tokens of this rank. Over a split sequence give visibility by is_causal, and padding and packed "
                f"documents to engine.split_sequence (attention_mask, documents)."
            )
        if query.dim() != 4:
            raise ModelError(
                f"scaled_dot_product_attention over a split sequence takes [batch, heads, tokens, dim], and the model "
                f"gives it queries of shape {list(query.shape)}."
            )
        if not enable_gqa and key.shape[1] != query.shape[1]:
            raise ModelError(
                f"scaled_dot_product_attention was given {query.shape[1]} heads of queries and {key.shape[1]} of keys "
                f"without enable_gqa=True."
            )
        return self._attention.attend(
            query, key, value, AttentionCall(is_causal, scale, dropout_p), recomputed=in_backward()
        )

    def _check_positions(self, model: nn.Module, func: Callable[..., Any], args: tuple[Any, ...]) -> None:
        sample = self._attention.sample
        how = "" if sample is None else numbers_tokens(model, func, args, sample.layout.num_local)
        if how and not self._is_coincidence(func):
            raise refused_positions(how)


def numbers_tokens(model: nn.Module, func: Callable[..., Any], args: tuple[Any, ...], num_tokens: int) -> str:
    """How a call in a forward of `model` numbers `num_tokens` tokens from 0; "" if it does not."""
    if func is torch.arange:
        numbers = [value for value in args if isinstance(value, int)]
        return "torch.arange over its tokens" if numbers in ([num_tokens], [0, num_tokens]) else ""
    is_start = func is Tensor.__getitem__ and _begins_at_the_start(args[1], num_tokens)
    return "the first rows of a table" if is_start and _is_table(args[0], args[1], model) else ""


def refused_attention(name: str) -> ModelError:
    return ModelError(
        f"{name} does not go through torch.nn.functional.scaled_dot_product_attention with the batch's tokens in "
        f"sight, so its attention cannot be split over the sequence. Call that function in the model, or leave sp out "
        f"of the mesh."
    )


def _is_table(tensor: Tensor, index: Any, model: nn.Module) -> bool:
    if isinstance(tensor, nn.Parameter) or any(tensor is buffer for buffer in model.buffers()):
        return True
    return isinstance(index, slice) and len(tensor) > index.stop


def _begins_at_the_start(index: Any, num_tokens: int) -> bool:
    slices = [one for one in (index if isinstance(index, tuple) else (index,)) if isinstance(one, slice)]
    return any(isinstance(one.stop, int) and one.stop == num_tokens and not one.start for one in slices)


def refused_positions(how: str) -> ModelError:
    return ModelError(
        f"The model numbers its tokens by itself ({how}), which would begin at 0 on every rank of a split sequence. "
        f"Let its forward take position_ids, which engine.split_sequence cuts with the tokens, and look them up."
    )
