"""Names of tensors in modules that code wraps: `torch.compile(block)` and torch's `checkpoint_wrapper` put a module
around another, and a part into the names of what is inside. A checkpoint is that of the same model with and without."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from shardwise.checkpoint.index import Index

_WRAPPED = frozenset({"_checkpoint_wrapped_module", "_orig_mod"})


def unwrapped(name: str) -> str:
    """The name of a tensor, or of a module, in the model without wrappers."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPED)


def named_as(index: Index, names: Iterable[str] = ()) -> Index:
    """`index` with the names that its tensors have in a model that calls its own `names`, and without wrappers where it
    has none of them."""
    theirs = {*index.shapes, *index.ties}
    twice = {name for name, count in Counter(map(unwrapped, theirs)).items() if count > 1}
    ours = {unwrapped(name): name for name in names}
    new = {name: ours.get(plain, plain) for name in theirs if (plain := unwrapped(name)) not in twice}
    if all(name == other for name, other in new.items()):
        return index

    def of(name: str) -> str:
        return new.get(name, name)

    def group_of(group: dict[str, Any]) -> dict[str, Any]:
        return {**group, "params": [of(name) for name in group["params"]]} if "params" in group else group

    return replace(
        index,
        shapes={of(name): shape for name, shape in index.shapes.items()},
        groups=[group_of(group) for group in index.groups],
        ties={of(alias): of(name) for alias, name in index.ties.items()},
        numbers={of(name): numbers for name, numbers in index.numbers.items()},
        chunks=[replace(chunk, name=of(chunk.name)) for chunk in index.chunks],
    )
