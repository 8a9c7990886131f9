"""What `engine.inference()` refuses, with a pipeline and without."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

from torch import nn

from shardwise.errors import ModelError, StateError

_BEGIN = "init_continuous_batching"
"""What `generate_batch` and the other entrances call first. Errors that come later are only logged, by its thread."""


def require_same_budget(keep_bytes: Mapping[int, int | None], have: str = "") -> None:
    """Raise `StateError` unless ranks that gather together give the same `keep_bytes`, which are by rank. They `have`
    the same of something."""
    first, *others = keep_bytes
    other = next((rank for rank in others if keep_bytes[rank] != keep_bytes[first]), None)
    if other is not None:
        raise StateError(
            f"engine.inference() was given keep_bytes={keep_bytes[first]} on rank {first} and {keep_bytes[other]} on "
            f"rank {other}, which {have}gather together what they do not keep. Give both the same."
        )


@contextmanager
def paged_caches_refused(model: nn.Module, axis: str) -> Iterator[None]:
    """Inside, `model.generate_batch` raises `ModelError`: its cache has the heads and layers of the model's config, and
    a rank along `axis` has a part of them."""
    if not hasattr(model, _BEGIN):
        yield
        return

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise ModelError(
            f"generate_batch makes a cache for all heads and layers of {type(model).__name__}, of which each rank "
            f"along {axis!r} has a part. Call generate(), with prompts of different lengths padded on the left, or "
            f"leave {axis!r} out of the mesh."
        )

    model.__dict__[_BEGIN] = refuse
    try:
        yield
    finally:
        del model.__dict__[_BEGIN]
