"""The conversion of heads whose logits are not computed before it is known what is asked of them (`loss: chunked`)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shardwise.comm import Line
from shardwise.errors import ModelError
from shardwise.parallel.chunked_logits.deferred_logits import defer
from shardwise.parallel.library_model import pretrained_in


class ChunkedHead(nn.Module):
    """What becomes of the class of a head: called with hidden states, it gives `DeferredLogits`.

    The call is put off whole, with its hooks. So an engine gathers the head once, when the loss is computed.
    """

    chunk_bytes: int | None
    num_updates: int

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        is_known = len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor)
        if is_known and not torch.compiler.is_compiling():
            logits = defer(self, args[0], self.chunk_bytes)
            if logits is not None:
                return logits
        return super().__call__(*args, **kwargs)


@functools.cache
def _deferring(kind: type) -> type:
    """A class like `kind` whose calls are put off; it keeps the name that users, rules and units know."""
    return type(kind.__name__, (ChunkedHead, kind), {"__module__": kind.__module__, "__qualname__": kind.__qualname__})


class ChunkedHeads:
    """The conversion of the heads of causal language models of transformers in `model`."""

    what = "logits in chunks"
    communicates = False

    def __init__(self, model: nn.Module, chunk_bytes: int | None) -> None:
        """Raises `ModelError` if there are none."""
        self._chunk_bytes = chunk_bytes
        self._heads = heads_of(model)
        if not self._heads:
            raise ModelError(
                f"loss: chunked is for language models of transformers, whose head get_output_embeddings() returns; "
                f"{type(model).__name__} has none. In a model of your own, return "
                f"shardwise.chunked_cross_entropy(hidden, self.head, labels) from its forward, and leave loss out of "
                f"the plan."
            )

    def takes(self, path: str, module: nn.Module) -> bool:  # noqa: ARG002
        return module in self._heads and not isinstance(module, ChunkedHead)

    def convert(self, module: nn.Module) -> Callable[[], object]:
        kind: type = type(module)
        module.__class__ = _deferring(kind)
        module.__dict__.update(chunk_bytes=self._chunk_bytes, num_updates=0)

        def undo() -> None:
            module.__class__ = kind
            for name in ("chunk_bytes", "num_updates"):
                module.__dict__.pop(name, None)

        return undo

    def check_device(self, device: torch.device) -> None:
        """Any will do."""

    def connect(self, module: nn.Module, lines: tuple[Line, ...]) -> None:
        """Nothing is sent."""

    def note_update(self, module: nn.Module) -> None:
        module.__dict__["num_updates"] += 1

    def notes(self) -> tuple[str, ...]:
        return ()


def heads_of(model: nn.Module) -> list[nn.Module]:
    """The heads of the language models of transformers in `model`; does not import the library."""
    heads = (one.get_output_embeddings() for one in pretrained_in(model))
    return list(dict.fromkeys(one for one in heads if isinstance(one, nn.Module)))
