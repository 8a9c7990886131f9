"""What of a model is one of transformers, whose plans and config say how it is split."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import nn

from shardwise.system.loaded import loaded

_MARK = "base_model_prefix"
"""An attribute of the classes of their models, and not of their layers."""


class LibraryModel(NamedTuple):
    """A model of transformers in a model: `paths` has, by the name of each of its modules, the path in the whole."""

    module: nn.Module
    paths: Mapping[str, str]


def library_models(model: nn.Module) -> list[LibraryModel]:
    """`model`, or the models of transformers that it has, as a `LightningModule`, a dual encoder, or a teacher beside
    its student do; `model` itself if there are none. What is said of one of them by names of modules says nothing of
    the others."""
    paths = {module: path for path, module in model.named_modules()}
    found = dict.fromkeys(_outermost(model)) or {model: None}
    return [LibraryModel(one, {name: paths[inner] for name, inner in one.named_modules()}) for one in found]


def pretrained_in(model: nn.Module) -> list[Any]:
    """The models of transformers in `model` and in each other, outermost first; does not import the library."""
    kind = loaded("transformers.modeling_utils", "PreTrainedModel")
    return [] if kind is None else [module for module in model.modules() if isinstance(module, kind)]


def _outermost(module: nn.Module) -> Iterator[nn.Module]:
    if hasattr(module, _MARK):
        yield module
        return
    for child in module.children():
        yield from _outermost(child)
