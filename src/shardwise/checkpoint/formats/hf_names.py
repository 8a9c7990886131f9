"""The names that a transformers model gives to its tensors, which can differ from those in its files.

The hub's GPT-2 has `wte.weight` where the model has `transformer.wte.weight`; tied weights are in the file once or
twice; buffers look like parameters. The model is the authority, so it is built from its configuration on the meta
device: without memory, without weights, and without code from the folder.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

from shardwise.checkpoint.formats.hf import CONFIG, read_config
from shardwise.checkpoint.formats.rearrangement import Rearrangement, dropped, renamed
from shardwise.checkpoint.formats.source import BUFFER, PARAM, Source, Spec
from shardwise.errors import CheckpointError, nearest


@dataclass(frozen=True)
class ModelNames:
    """Names in a model. `ties` maps other names to the first one; `saved_as` has the name that files use instead."""

    params: dict[str, tuple[int, ...]]
    buffers: dict[str, tuple[int, ...]]
    ties: dict[str, str]
    saved_as: dict[str, str]
    prefix: str

    @classmethod
    def of(cls, model: nn.Module) -> ModelNames:
        """The names of `model`, which may be on the meta device, or sharded."""
        first = {param: name for name, param in model.named_parameters()}
        every = list(model.named_parameters(remove_duplicate=False))
        ties = {name: first[param] for name, param in every if first[param] != name}
        persistent = model.state_dict(keep_vars=True).keys()
        return cls(
            params={name: tuple(param.shape) for param, name in first.items()},
            buffers={name: tuple(one.shape) for name, one in model.named_buffers() if name in persistent},
            ties=ties,
            saved_as=_saved_as(model, ties),
            prefix=getattr(model, "base_model_prefix", ""),
        )


def as_in_files(model: nn.Module, ties: Mapping[str, str], likes: Mapping[str, torch.Tensor]) -> Rearrangement:
    """The tensors of `model`, called `likes` there, under the names of its files. Those that `save_pretrained` of
    transformers leaves out are left out. `ties` maps other names of a parameter to the one in `likes`."""
    saved_as = _saved_as(model, ties)
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    groups = [
        dropped(name) if name in ignored else renamed(name, saved_as.get(name, name), like)
        for name, like in likes.items()
    ]
    return Rearrangement(groups, likes)


def _saved_as(model: nn.Module, ties: Mapping[str, str]) -> dict[str, str]:
    # transformers has {a further name: the one in files}
    targets = getattr(model, "all_tied_weights_keys", None) or {}
    return {ties[alias]: alias for alias in ties if ties[alias] in targets and alias not in targets}


def names_of(folder: Path) -> ModelNames | None:
    """The names in the model of the configuration in `folder`; `None` if it cannot be built."""
    architectures = read_config(folder).get("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    if not isinstance(name, str) or importlib.util.find_spec("transformers") is None:
        return None
    transformers: ModuleType = importlib.import_module("transformers")
    model_class = getattr(transformers, name, None) if name.isidentifier() else None
    if not isinstance(model_class, type) or not issubclass(model_class, transformers.PreTrainedModel):
        return None  # neither code from the folder nor other classes of the library are run
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        with torch.device("meta"):
            return ModelNames.of(model_class(config))
    except Exception as error:  # constructors may raise anything for an untrusted configuration
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(f"{folder / CONFIG} does not describe a {name} that could be built: {reason}") from error


def as_the_model_has_it(source: Source) -> Source:
    """`source`, the weights of a Hugging Face folder, under the names of the model.

    Raises `CheckpointError` if the model has parameters that are not in the folder.
    """
    names = names_of(source.path)
    if names is None:
        reason = (
            "Names are as in the files: no model could be asked for its own (that takes the transformers library and "
        )
        return replace(source, left_out=[*source.left_out, f"{reason}architectures in config.json)."])
    originals: dict[Spec, Spec] = {}
    unknown = []
    for spec in source.specs:
        name = _own_name(spec.name, names)
        if name is None:
            unknown.append(spec.name)
            continue
        originals.setdefault(Spec(BUFFER if name in names.buffers else PARAM, name, spec.shape, spec.dtype), spec)
    _refuse_gaps(source, names, {spec.name: spec for spec in originals}, unknown)
    left_out = [f"{len(unknown)} tensors that the model does not have, such as {unknown[0]}"] if unknown else []
    return replace(
        source,
        specs=tuple(originals),
        read=lambda spec: source.read(originals[spec]),
        ties=names.ties,
        left_out=[*source.left_out, *left_out],
    )


def _own_name(name: str, names: ModelNames) -> str | None:
    """The model's first name for a tensor that is called `name` in a file."""
    dotted = f"{names.prefix}."
    for one in (name, dotted + name, name.removeprefix(dotted)):
        one = names.ties.get(one, one)
        if one in names.params or one in names.buffers:
            return one
    return None


def _refuse_gaps(source: Source, names: ModelNames, found: dict[str, Spec], unknown: list[str]) -> None:
    for name, shape in names.params.items():
        if name not in found:
            hint = f" It has {unknown[0]}, which the model does not have. {nearest(name, unknown)}" if unknown else ""
            raise CheckpointError(
                f"{source.path} lacks {name}, which its model has.{hint} Where transformers rearranges weights as it "
                f"loads them, build the model with from_pretrained, shard it, and save it with engine.save(); or pass "
                f"the folder to shard() as weights=."
            )
        if found[name].shape != shape:
            raise CheckpointError(
                f"{source.path} has {name} with shape {list(found[name].shape)}, but its model has {list(shape)}."
            )
