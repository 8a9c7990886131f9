"""`load_for_inference`: a model that only computes, split along `tp`, in the precision or the bits that are asked for.

There is no engine: nothing is gathered and nothing is updated, so parameters are plain tensors, each rank's own parts,
which never move, and the model needs neither units nor a program. Its forwards send what tensor parallelism sends, and
nothing else. `Engine.inference` generates with a model that is being trained.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.checkpoint import formats
from shardwise.checkpoint.formats.hf import open_files
from shardwise.comm import World
from shardwise.comm.agreed import Told, agreed
from shardwise.comm.transport.pairwise import Nobody
from shardwise.errors import CheckpointError, ConfigError, ModelError, nearest
from shardwise.init import Wishes, check_same_settings, deferred_init, device_for, end_recording
from shardwise.init.files import INDEX, SINGLE, WeightFiles
from shardwise.init.match import Match, match
from shardwise.init.quantized import FORMATS, linear_weights, quantized
from shardwise.init.tape import PROCESS_WIDE, values_of
from shardwise.memory import part_of
from shardwise.parallel.model_axes import carry_out_split, split_of
from shardwise.parallel.tensor import AXIS, Generators, ModelSplit
from shardwise.plan import load_plan
from shardwise.plan.mesh import MODEL_AXES, Mesh
from shardwise.plan.placement import Box, Span
from shardwise.system.named_folder import given_folder

__all__ = ["load_for_inference"]

Tensor = torch.Tensor
Folder = str | Path | Sequence[str | Path]
_SAFE = ".safetensors"
_MOST_RUNS = 1024
"""A part of more runs of contiguous elements is cut from the whole tensor: each run is a read of its own."""
_ROTARY = "inv_freq"
"""Frequencies of rotary positions, which transformers computes in fp32 whatever the dtype of the model: rounded to 16
bits they are wrong by several positions after a few thousand tokens."""


def load_for_inference(
    folder: Folder | None = None,
    *,
    model: nn.Module | None = None,
    mesh: Mapping[str, int] | None = None,
    weights: str | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    world: World | None = None,
) -> Any:
    """A model for inference alone, split over the ranks along `tp`. All ranks call.

    `folder` has the weights: a safetensors file, a folder of Hugging Face, a checkpoint of shardwise, DeepSpeed or
    torch DCP, or a list of files of safetensors or `torch.save`, which together have them. Without it they are those of
    `model`, each rank's own, which are the same on all. `model` stays the same object; it may have been built inside
    `deferred_init`, and is then never whole. Without it transformers builds the language model that `folder` has the
    `config.json` of.

    `mesh` has the axis `tp`; the other ranks, along `dp`, have models of their own (default: all of them).
    Floating-point parameters are converted to `dtype`, except those that transformers keeps in fp32; by default they
    keep theirs. `weights` is `"int8"`, `"fp8"` (e4m3) or `"int4"`: the weights of linear layers are then kept so, and
    computed with in `dtype` (docs/after-training.md).

    Returns the model: frozen, in evaluation mode, on `device` (by default its own, or this rank's if it has no values
    yet). Ranks along `tp` call it alike; samples drawn from it (`generate(do_sample=True)`) are the same on all of them
    as long as they draw alike. Others call it when they like.

    Raises `ConfigError` for a mesh that is impossible, `ModelError` for a model that cannot be split so or weights of
    another model, `CheckpointError` for files that cannot be read.
    """
    end_recording()
    if weights is not None and weights not in FORMATS:
        raise ConfigError(
            f"load_for_inference(weights={weights!r}): it must be int8, fp8 or int4. {nearest(weights, FORMATS)}"
        )
    if folder is None and model is None:
        raise ConfigError("load_for_inference() needs a folder with weights, or a model, or both.")
    joined = World.join() if world is None else world
    try:
        asked = {"mesh": dict(mesh or {}), "weights": weights, "dtype": str(dtype), "folder given": folder is not None}
        check_same_settings(asked, "arguments of load_for_inference", _who_agree(joined))
        found = model
        if found is None:
            with _agreed(joined):
                found = _built(folder, dtype)
        ranks = Mesh.of(_axes(mesh), joined.size)
        _lay(found, folder, ranks, joined, dtype, weights, device)
    except BaseException as error:
        if world is None:
            joined.close(error)
        raise
    return found


def _lay(
    model: nn.Module,
    folder: Folder | None,
    mesh: Mesh,
    world: World,
    dtype: torch.dtype | None,
    form: str | None,
    device: torch.device | str | None,
) -> None:
    """Split `model` in place, with its values. Nothing is changed if that is impossible. All ranks call."""
    own = next((param.device for param in model.parameters()), torch.device("cpu"))
    target = device_for(model, own, Wishes(device=None if device is None else torch.device(device)), world)
    plan = load_plan({"preset": "ddp", "mesh": mesh.named_sizes})
    split = split_of(model, plan, mesh, world.rank)
    source: Match | None = None
    if folder is not None:
        with _agreed(world):
            source = match(model, _opened(folder), strict=True)
    model.requires_grad_(False).eval()
    with _agreed(world):
        _fill(model, source, split, dtype, target, form)
    if split is not None:
        if world.membership is not None:  # what is split among ranks is lost with one of them
            world.membership.has_several = True
            world.membership.needs_all()
        carry_out_split(model, split, mesh, world, target)
        group = world.group(mesh, AXIS)
        Generators(world.rank_device, group.index).synchronize(world, group)


def _axes(mesh: Mapping[str, int] | None) -> dict[str, int]:
    """`mesh`, with the axis `dp` for all ranks that it leaves."""
    asked = dict(mesh or {})
    others = [axis for axis in asked if axis in MODEL_AXES and axis != AXIS]
    if others:
        raise ConfigError(
            f"load_for_inference() splits along {AXIS} alone, and the mesh has {', '.join(others)}. Use shard() "
            f"instead, and generate inside `with engine.inference():`."
        )
    return asked if any(axis != AXIS for axis in asked) else {"dp": -1, **asked}


def _who_agree(world: World) -> World:
    """The ranks that load the model together: this one alone, if it joins others that train, which have theirs."""
    return World(0, 1, Nobody(), device=world.rank_device) if world.is_arriving else world


def _agreed(world: World) -> AbstractContextManager[Told]:
    return agreed(_who_agree(world), "inference", CheckpointError, ConfigError, ModelError)


def _built(folder: Folder | None, dtype: torch.dtype | None) -> nn.Module:
    """The language model of the configuration in `folder`, without values."""
    if not isinstance(folder, str | Path):
        raise ConfigError(
            "load_for_inference() of several files needs the model: load_for_inference(files, model=model)."
        )
    path = given_folder(folder)
    try:
        library = importlib.import_module("transformers")
    except ImportError as error:
        raise ConfigError(
            "load_for_inference(folder) builds the model with transformers, which is not installed. Install it, or "
            "give the model as well: load_for_inference(folder, model=model)."
        ) from error
    if not path.exists():
        raise CheckpointError(
            f"There is no folder {path} to load a model from. Name one of Hugging Face, or a checkpoint."
        )
    if not (path / "config.json").exists():
        raise CheckpointError(
            f"{path} has no config.json, which says what model its weights are of. Give the model as well: "
            f"load_for_inference(folder, model=model)."
        )
    config = library.AutoConfig.from_pretrained(path)
    with PROCESS_WIDE, deferred_init():  # transformers replaces the default dtype meanwhile
        model: Any = library.AutoModelForCausalLM.from_config(config, dtype=dtype or config.dtype)
    if (path / "generation_config.json").exists():
        model.generation_config = library.GenerationConfig.from_pretrained(path)
    built: nn.Module = model
    return built


# -- values ---------------------------------------------------------------------------------------------


def _fill(
    model: nn.Module,
    source: Match | None,
    split: ModelSplit | None,
    dtype: torch.dtype | None,
    device: torch.device,
    form: str | None,
) -> None:
    """Replace every parameter by this rank's part of it, one at a time, and give buffers their values.

    Beside the parts there is one whole parameter at most, if the model has no values or nobody else keeps them.
    """
    boxes = {} if split is None else {split.names[param]: box for param, box in split.boxes.items()}
    if split is not None:  # or it would keep all former parameters
        for table in (split.names, split.boxes, split.split_by):
            table.clear()
    names = {param: name for name, param in model.named_parameters()}
    transposed = {} if form is None else {names[param]: one for param, one in linear_weights(model).items()}
    sites: dict[str, list[tuple[nn.Module, str]]] = {name: [] for name in names.values()}
    for module in model.modules():
        for short, param in module._parameters.items():
            if param is not None:
                sites[names[param]].append((module, short))
    names.clear()
    stays_wide = _kept_wide(model, dtype)
    for name, places in sites.items():
        former = places[0][0]._parameters[places[0][1]]
        assert former is not None
        part = _part(source, name, former, boxes.get(name) or Box.whole(former.shape))
        wanted = _converted_dtype(former.dtype, None if stays_wide(name) else dtype)
        value = part.to(device, wanted).contiguous()
        if value.untyped_storage().nbytes() > value.nbytes:
            value = value.clone()  # a view would keep all of the former one
        if form is not None and name in transposed:
            narrow = quantized(value, form, is_transposed=transposed[name])
            value = value if narrow is None else narrow
        kept = nn.Parameter(value, requires_grad=False)
        for module, short in places:
            module._parameters[short] = kept
        del former, part, value
    _fill_buffers(model, source, dtype, device)
    if source is not None:
        source.let_go()


def _part(source: Match | None, name: str, former: Tensor, box: Box) -> Tensor:
    """This rank's part of a parameter, in the dtype in which it is stored."""
    if source is None or name not in source:
        if former.is_meta:
            raise ModelError(
                f"{name} is on the meta device and has no values. Build the model inside `with "
                f"shardwise.deferred_init():`, or give load_for_inference() a folder that has them."
            )
        return part_of(values_of(former).detach(), box)
    if len(box.runs) > _MOST_RUNS:
        return part_of(source.read(name, Span(0, former.numel())).view(box.shape), box)
    runs = [source.read(name, Span(start, start + numel)) for _, start, numel in box.runs]
    return (runs[0] if len(runs) == 1 else torch.cat(runs)).view(box.own_shape)


def _fill_buffers(model: nn.Module, source: Match | None, dtype: torch.dtype | None, device: torch.device) -> None:
    names = {buffer: name for name, buffer in model.named_buffers()}
    filled: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for short, buffer in module._buffers.items():
            if buffer is None:
                continue
            if buffer not in filled:
                value = _part(source, names[buffer], buffer, Box.whole(buffer.shape)).view(buffer.shape)
                wanted = _converted_dtype(buffer.dtype, None if short.endswith(_ROTARY) else dtype)
                filled[buffer] = value.to(device, wanted)
            module._buffers[short] = filled[buffer]


def _converted_dtype(own: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and own.is_floating_point else own


def _kept_wide(model: nn.Module, dtype: torch.dtype | None) -> Callable[[str], bool]:
    """Whether transformers' `from_pretrained(dtype=...)` keeps the parameter of a name in fp32."""
    words: set[str] = set()
    if dtype in (torch.float16, torch.bfloat16):
        words |= set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        words |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    pattern = re.compile("|".join(rf"(?:^|\.){re.escape(word)}(?:\.|$)" for word in sorted(words)))
    return lambda name: bool(words) and pattern.search(name) is not None


# -- files ------------------------------------------------------------------------------------------------


def _opened(folder: Folder) -> WeightFiles:
    """The tensors in one of the forms that `load_for_inference` reads."""
    if not isinstance(folder, str | Path):
        files = [Path(one) for one in folder]
        return WeightFiles(files) if all(one.suffix == _SAFE for one in files) else _SourceFiles(open_files(files))
    path = given_folder(folder)
    if path.is_dir() and not any((path / name).exists() for name in (SINGLE, INDEX)):
        return _SourceFiles(formats.open_checkpoint(path))
    return WeightFiles(path)


class _SourceFiles(WeightFiles):
    """The tensors of a checkpoint that is read tensor by tensor."""

    def __init__(self, source: formats.Source) -> None:
        self.path, self.label, self.bytes_read = source.path, str(source.path), 0
        found = {spec.name: _InSource(source, spec) for spec in source.weights}
        found |= {name: found[first] for name, first in source.ties.items()}
        self.tensors = found  # type: ignore[assignment]  # each has what is asked of a tensor in a file
        self._last: tuple[str, Tensor] | None = None

    def read(self, name: str, span: Span) -> Tensor:
        if self._last is None or self._last[0] != name:
            self._last = None  # freed before the next one is read
            self._last = name, self.tensors[name].read()
            self.bytes_read += self._last[1].nbytes
        return self._last[1][span.as_slice]


@dataclass(frozen=True)
class _InSource:
    """A tensor of a checkpoint, with the attributes of `safetensors_headers.Stored`."""

    source: formats.Source
    spec: formats.Spec

    @property
    def shape(self) -> tuple[int, ...]:
        return self.spec.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.spec.dtype

    @property
    def num_bytes(self) -> int:
        return self.spec.num_bytes

    def read(self) -> Tensor:
        """All elements, flat."""
        return self.source.read(self.spec).reshape(-1)
