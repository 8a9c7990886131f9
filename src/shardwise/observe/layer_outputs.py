"""What each layer of a language model gives for some tokens, and how far that is from what another engine's give.

Rounding grows from layer to layer by small factors. Where two engines do something different, such as other positions,
an old or a wrongly loaded weight, or an attention that masks otherwise, the distance is as rounding makes it up to one
layer, and is many times that after it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shardwise.errors import ConfigError, ModelError, nearest
from shardwise.parallel.pipeline.placeholder_modules import PlaceholderModule
from shardwise.runtime.nested import tensors_in
from shardwise.system.module_modes import in_evaluation
from shardwise.system.own_hooks import hook

Tensor = torch.Tensor
Take = Callable[[str, Tensor], None]
_GROWTH = 4.0
"""More than rounding grows in a layer: in fp32 it is 1.2 to 1.6 times a rounding behind the first layer of small models
whose adapters are merged in the sampler, or that `tp` splits, and grows less in later ones; more in wide models, whose
sums are longer."""


@dataclass(frozen=True)
class LayerDistance:
    name: str
    distance: float
    """The norm of the difference of two outputs, relative to the norm of the trainer's; infinite if either has values
    that are not finite."""
    rounding: float
    """Of the coarser of the two dtypes."""


def layer_outputs(
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    names: Sequence[str] | None = None,
    rows: int = 8,
) -> dict[str, Tensor]:
    """What layers of `model` give for `input_ids` `[rows, tokens]`: `[rows, tokens, features]` by name, on the host, in
    the dtype that they have.

    For `Engine.mismatch(layers=...)`: a sampler calls it on its own model, and sends or saves the result with what it
    has sampled (`safetensors.torch.save_file`). `names` are of modules that return hidden states, or a tuple that
    begins with them; by default the blocks of the model, which are those in its outermost lists. The model is called
    with `input_ids`, and `attention_mask` if there is one, `rows` rows at a time, without dropout and gradients.

    Ranks that share the model call it alike. Raises `ModelError` for a model without lists of blocks, or a layer that
    is not called or gives something of another shape, `ConfigError` for a name that it does not have.
    """
    if not len(input_ids):
        raise ConfigError("layer_outputs() got no rows.")
    if names is None:
        names = blocks_of(model)
        if not names:
            raise ModelError(
                f"{type(model).__name__} has no list of blocks. Name its layers: layer_outputs(names=[...])."
            )
    modules = modules_of(model, names)
    found: dict[str, list[Tensor]] = {name: [] for name in names}
    take: Take = lambda name, output: found[name].append(output.cpu())  # noqa: E731
    with in_evaluation(model), torch.no_grad(), watched(modules, take):
        for first in range(0, len(input_ids), rows):
            call(model, input_ids, attention_mask, slice(first, first + rows))
    outputs = {name: torch.cat(found[name]) if found[name] else torch.empty(0, device="cpu") for name in names}
    for name, output in outputs.items():
        if not is_hidden(output, input_ids):
            raise ModelError(
                f"{name} has given {list(output.shape)} for tokens {list(input_ids.shape)}, in all its calls. Name "
                f"layers that are called once in a forward and return [rows, tokens, features]."
            )
    return outputs


def is_hidden(output: Tensor, tokens: Tensor) -> bool:
    """Whether it has features of each token, `[rows, tokens, features]`."""
    return output.is_floating_point() and output.shape[:-1] == tokens.shape


def call(model: nn.Module, tokens: Tensor, mask: Tensor | None, some: slice) -> Any:
    return model(input_ids=tokens[some], **({} if mask is None else {"attention_mask": mask[some]}))


def blocks_of(model: nn.Module) -> list[str]:
    """The names of the modules in the outermost lists of several that have parameters."""
    found: list[str] = []
    lists: list[str] = []
    for name, module in model.named_modules():
        is_inside = any(name.startswith(f"{one}.") for one in lists)
        if isinstance(module, nn.ModuleList | nn.Sequential) and not is_inside and len(module) > 1:
            lists.append(name)
            found += [f"{name}.{short}" if name else short for short, one in module.named_children() if _has_any(one)]
    return found


def _has_any(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def modules_of(model: nn.Module, names: Sequence[str]) -> dict[str, nn.Module]:
    """Those of `names` that are on this rank: other pipeline stages have the others. A name may lack what stands before
    all names of the model, such as peft's `base_model.model`."""
    modules = dict(model.named_modules())
    found = {}
    for name in names:
        full = [name] if name in modules else [one for one in modules if one.endswith(f".{name}")]
        if len(full) != 1:
            said = f"several layers that end with {name!r}: {', '.join(full[:3])}" if full else f"no layer {name!r}"
            raise ConfigError(f"{type(model).__name__} has {said}. {'' if full else nearest(name, modules)}".rstrip())
        if not isinstance(modules[full[0]], PlaceholderModule):
            found[name] = modules[full[0]]
    return found


@contextmanager
def watched(modules: Mapping[str, nn.Module], take: Take) -> Iterator[None]:
    """A context in which `take` gets the hidden states that each call of these modules returns."""

    def note_of(name: str) -> Callable[..., None]:
        def note(_: nn.Module, __: object, output: object) -> None:
            tensor = next((one for one in tensors_in(output) if one.is_floating_point()), None)
            if tensor is not None:
                take(name, tensor.detach())

        return note

    handles = [module.register_forward_hook(hook(note_of(name))) for name, module in modules.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass
class Comparison:
    """Of what this rank's layers give with what a sampler's gave for the same tokens, `[rows, tokens, features]`."""

    of_sampler: Mapping[str, Tensor]
    mask: Tensor | None
    """`[rows, tokens]`, true where there is a token; without it everywhere."""
    sums: dict[str, list[float]] = field(default_factory=dict)
    """By layer: of squared differences, of the trainer's squares, and the rounding of the coarser of the two dtypes."""
    problem: str = ""
    """Of the first layer that cannot be compared. It is told after the forwards, as other ranks wait for this one's."""
    first_row: int = 0
    """Of the call that runs."""
    called: set[str] = field(default_factory=set)
    """Layers that this call has run."""

    def begin_call(self, first_row: int) -> None:
        self.first_row = first_row
        self.called.clear()

    def add(self, name: str, own: Tensor) -> None:
        """Count what one call of a layer gives."""
        if name in self.called:
            self.problem = self.problem or f"{name} is called more than once in a forward. Compare other layers."
            return
        self.called.add(name)
        some = slice(self.first_row, self.first_row + own.shape[0])
        other = self.of_sampler[name][some].to(own.device)
        if own.shape != other.shape:
            self.problem = self.problem or (
                f"{name} gives {list(own.shape)} in the trainer, and in the sampler {list(other.shape)}, for the same "
                f"tokens. Compare layers that return [rows, tokens, features]."
            )
            return
        dtype = torch.promote_types(torch.promote_types(own.dtype, other.dtype), torch.float32)
        apart, size = own.to(dtype) - other.to(dtype), own.to(dtype)
        if self.mask is not None:
            is_padding = ~self.mask[some].to(own.device).bool()[..., None]
            apart, size = apart.masked_fill(is_padding, 0.0), size.masked_fill(is_padding, 0.0)
        sums = self.sums.setdefault(name, [0.0, 0.0, 0.0])
        sums[0] += float(apart.square().sum(dtype=torch.float64))
        sums[1] += float(size.square().sum(dtype=torch.float64))
        sums[2] = max(torch.finfo(own.dtype).eps, torch.finfo(other.dtype).eps)


def distances(names: Sequence[str], sums: Sequence[Mapping[str, Sequence[float]]]) -> tuple[LayerDistance, ...]:
    """In the order of `names`, of the `sums` of all who have samples of their own."""
    found = []
    for name in names:
        own = [one[name] for one in sums if name in one]
        if not own:
            raise ConfigError(f"mismatch() was given what {name} gave in the sampler, but no forward here calls it.")
        apart, size = sum(one[0] for one in own), sum(one[1] for one in own)
        distance = math.sqrt(apart / size) if size else math.sqrt(apart)
        found.append(LayerDistance(name, distance if math.isfinite(distance) else math.inf, own[0][2]))
    return tuple(found)


def parting(layers: Sequence[LayerDistance]) -> int | None:
    """The number of the layer behind which the distance is the largest multiple of that before it; less than rounding
    counts as that. `None` if it grows nowhere by more than rounding does."""
    largest, place, before = _GROWTH, None, 0.0
    for number, layer in enumerate(layers):
        now, before = max(layer.distance, layer.rounding), max(before, layer.rounding)
        if not math.isinf(before) and now / before > largest:
            largest, place = now / before, number
        before = now
    return place
