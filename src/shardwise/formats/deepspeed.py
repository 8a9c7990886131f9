"""Checkpoints that DeepSpeed wrote with ZeRO-1, 2 or 3: weights, master weights and Adam's states.

Formats as in DeepSpeed's own `utils/zero_to_fp32.py` and `checkpoint/ds_to_universal.py`:
stages 1 and 2 flatten each parameter group, and say in `param_slice_mappings` which part of which parameter a rank
has; stage 3 splits each parameter evenly over ranks, and lays the pieces out in the order of `param_shapes`.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardwise.errors import CheckpointError
from shardwise.formats.pickles import load_inert, plain_items
from shardwise.formats.source import BUFFER, PARAM, Source, Spec, stored_files

Tensor = torch.Tensor
FORM = "deepspeed"
OWN_KEYS = {
    *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params"),
    *("frozen_param_fragments", "data_sampler", "random_ltd", "sparse_tensor_module_names"),
    *("skipped_steps", "global_steps", "dp_world_size", "mp_world_size", "ds_config", "ds_version"),
    *("checkpoint_parallel_dimensions", "universal_checkpoint_info", "autoep_layers"),
}
"""What DeepSpeed keeps in a model file; the rest is `client_state`, besides `lr_scheduler` and `global_samples`."""


def folder_of(path: Path) -> Path | None:
    """The folder with the files of a DeepSpeed checkpoint at `path`: itself, or the one that `latest` names."""
    for pointer in ("latest", "latest_universal"):
        if (path / pointer).is_file():
            named = path / (path / pointer).read_text().strip()
            if any(named.glob("*_model_states.pt")):
                return named
    return path if any(path.glob("*_model_states.pt")) else None


def open_deepspeed(path: Path) -> Source:
    """The checkpoint at `path`; the newest one, if it is the folder given to `save_checkpoint`."""
    folder = folder_of(path)
    if folder is None:
        raise CheckpointError(f"{path} has no DeepSpeed checkpoint: no *_model_states.pt is in it.")
    _refuse_split_models(folder)
    models = [_model_states(file) for file in _in_order(folder, "*_model_states.pt")]
    optims = [load_inert(file)["optimizer_state_dict"] for file in _in_order(folder, "*_optim_states.pt")]
    if (folder / "zero").is_dir():
        pieces, groups = _universal(folder, models[0])
        stage = "universal"
    elif not optims:
        pieces, groups = {}, []
        stage = "0"
    elif "fp32_flat_groups" in optims[0]:
        _check_count(folder, optims, optims[0]["partition_count"])
        pieces, groups = _stage_3(models, optims), _groups_of_stage_3(models[0], optims[0])
        stage = "3"
    else:
        _check_count(folder, optims, optims[0]["partition_count"])
        pieces, groups = _stages_1_and_2(folder, models[0], optims), _groups_of(models[0], optims[0])
        stage = "1 or 2"
    source = _source(folder, stage, models, pieces, groups)
    limit = optims[0].get("clip_grad") if optims else None
    if limit:
        source.left_out.append(
            f"DeepSpeed's gradient clipping, which is a matter of the plan here: clip_grad_norm: {limit}"
        )
    return source


def _source(folder: Path, stage: str, models: list[dict[str, Any]], pieces: Pieces, groups: Groups) -> Source:
    model = models[0]
    known = {spec.name for spec in pieces}
    pieces |= {spec: one for spec, one in _frozen(models).items() if spec.name not in known}
    pieces |= _buffers(model)
    pieces |= _in_module(model, pieces)
    names = {spec.name for spec in pieces if spec.kind in (PARAM, BUFFER)}
    ties = {alias: name for alias, name in dict(model.get("shared_params") or {}).items() if name in names}
    user, left_out = _user(model)
    if stage == "0":
        left_out.append("the optimizer's states: a checkpoint without ZeRO does not say which parameter they are of")
    return Source(
        form=FORM,
        path=folder,
        specs=tuple(pieces),
        read=lambda spec: pieces[spec].read(spec),
        step=int(model["global_steps"]),
        num_steps=int(model["global_steps"]),
        groups=groups,
        ties=ties,
        user=user,
        facts={
            "stage": stage,
            "world_size": model["dp_world_size"],
            "versions": {"deepspeed": str(model.get("ds_version"))},
        },
        files=stored_files(folder),
        left_out=left_out,
    )


@dataclass(frozen=True)
class Parts:
    """A tensor as ranges of flat ones, in the order of its elements; what is behind its end is padding."""

    parts: tuple[Tensor, ...]

    def read(self, spec: Spec) -> Tensor:
        whole = torch.empty(spec.numel, dtype=spec.dtype)
        filled = 0
        for part in self.parts:
            taken = min(part.numel(), spec.numel - filled)
            whole[filled : filled + taken] = part.reshape(-1)[:taken]
            filled += taken
        if filled < spec.numel:
            raise CheckpointError(
                f"{spec.kind} {spec.name} has {filled} of {spec.numel} elements; the checkpoint is incomplete."
            )
        return whole.view(spec.shape)


@dataclass(frozen=True)
class OwnFile:
    """A tensor in a file of its own, as in a universal checkpoint."""

    path: Path

    def read(self, spec: Spec) -> Tensor:
        tensor = _universal_tensor(self.path)
        return tensor.reshape(spec.shape).clone()


Pieces = dict[Spec, Parts | OwnFile]
Groups = list[dict[str, Any]]


# -- the files ------------------------------------------------------------------------------------------


def _in_order(folder: Path, pattern: str) -> list[Path]:
    """By the numbers in their names: rank 10 is behind rank 9."""

    def numbers(path: Path) -> list[int]:
        return [int(digits) for digits in re.findall(r"\d+", path.name)]

    return sorted(folder.glob(pattern), key=numbers)


def _refuse_split_models(folder: Path) -> None:
    split = [
        ("layer_*", "of a pipeline"),
        ("*expert_*", "with experts (MoE)"),
        ("*mp_rank_01_*", "split by tensor parallelism"),
    ]
    for pattern, words in split:
        found = next(iter(sorted(folder.glob(pattern))), None)
        if found is not None:
            raise CheckpointError(
                f"{folder} is a DeepSpeed checkpoint {words} (it has {found.name}), which cannot be imported. "
                f"Save the model whole there, with save_16bit_model or as Hugging Face, and convert that."
            )


def _model_states(file: Path) -> dict[str, Any]:
    state = load_inert(file)
    if not isinstance(state, dict) or not {"module", "global_steps", "dp_world_size"} <= state.keys():
        raise CheckpointError(f"{file} is not a model file of DeepSpeed.")
    return state


def _check_count(folder: Path, optims: list[Any], counts: Any) -> None:
    expected = max(counts) if isinstance(counts, list) else int(counts)
    if expected != len(optims):
        raise CheckpointError(
            f"{folder} has {len(optims)} files *_optim_states.pt, but {expected} ranks wrote it; it is incomplete."
        )


# -- what every stage has -------------------------------------------------------------------------------


def _spec(kind: str, name: str, shape: Any, tensor: Tensor) -> Spec:
    return Spec(kind, name, tuple(shape), tensor.dtype)


def _buffers(model: dict[str, Any]) -> Pieces:
    found = {name: model["module"][name] for name in model.get("buffer_names") or () if name in model["module"]}
    return {_spec(BUFFER, name, one.shape, one): Parts((one,)) for name, one in found.items()}


def _frozen(models: list[dict[str, Any]]) -> Pieces:
    """Parameters that the optimizer does not own, where DeepSpeed lists them; in stage 3 each rank has its part."""
    listed = models[0].get("frozen_param_shapes") or {}
    fragments = [model.get("frozen_param_fragments") or {} for model in models]
    pieces: Pieces = {}
    for name, shape in listed.items():
        is_whole = fragments[0][name].numel() == math.prod(shape)
        parts = tuple(rank[name] for rank in (fragments[:1] if is_whole else fragments))
        pieces[_spec(PARAM, name, shape, parts[0])] = Parts(parts)
    return pieces


def _in_module(model: dict[str, Any], known: Pieces) -> Pieces:
    """Whole parameters of the model file that are nowhere else: all without ZeRO, frozen ones in stage 1."""
    names = {spec.name for spec in known} | set(model.get("shared_params") or {})
    module = {name: one for name, one in model["module"].items() if isinstance(one, Tensor) and name not in names}
    return {_spec(PARAM, name, one.shape, one): Parts((one,)) for name, one in module.items() if one.numel()}


def _user(model: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """`client_state` and the scheduler, as far as they are plain values."""
    kept = {key: value for key, value in model.items() if key not in OWN_KEYS and value is not None}
    user, others = plain_items(kept)
    return user, [f"{name}, which is not plain data" for name in others]


def _shape_groups(model: dict[str, Any]) -> list[dict[str, tuple[int, ...]]]:
    """Names and shapes by parameter group; in stage 3 by sub-group."""
    shapes = model["param_shapes"]
    listed = shapes if isinstance(shapes, list) else [shapes]
    return [{name: tuple(shape) for name, shape in group.items()} for group in listed]


def _hyper(group: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """A parameter group as torch has it; `step`, which Apex keeps there, is a state of each parameter."""
    settings = {key: value for key, value in group.items() if key not in ("params", "step")}
    return {**plain_items(settings)[0], **_tuples(settings), "params": names}


def _tuples(settings: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if isinstance(value, tuple)}


def _scalars(entry: dict[str, Any], group: dict[str, Any]) -> dict[str, Tensor]:
    """States that are one number for all parameters of a group, as tensors, which torch's optimizers have."""
    found = {key: value for key, value in entry.items() if not isinstance(value, Tensor) or value.dim() == 0}
    if "step" not in entry and isinstance(group.get("step"), int | float | Tensor):
        found["step"] = group["step"]
    numbers = {key: value for key, value in found.items() if isinstance(value, int | float | Tensor)}
    return {f"state.{key}": torch.as_tensor(value, dtype=torch.float32) for key, value in numbers.items()}


def _vectors(entry: dict[str, Any], flat: Tensor) -> dict[str, Tensor]:
    """The flat group itself and states of its size, or of its padded size."""
    states = {
        f"state.{key}": value
        for key, value in entry.items()
        if isinstance(value, Tensor) and value.dim() == 1 and value.numel() >= flat.numel()
    }
    return {PARAM: flat, **states}


# -- stages 1 and 2 -------------------------------------------------------------------------------------


def _stages_1_and_2(folder: Path, model: dict[str, Any], optims: list[dict[str, Any]]) -> Pieces:
    if "param_slice_mappings" not in optims[0]:
        raise CheckpointError(f"{folder} was written by a DeepSpeed older than 0.7; load and save it with a newer one.")
    found = _Found()
    for optim in optims:
        for number, slices in enumerate(optim["param_slice_mappings"]):
            entry, group = _base_state(optim, number), _base_groups(optim)[number]
            vectors = _vectors(entry, optim["single_partition_of_fp32_groups"][number])
            for name, address in slices.items():
                found.add(name, vectors, address.start, address.numel, _scalars(entry, group))
    return found.pieces({name: shape for group in _shape_groups(model) for name, shape in group.items()})


class _Found:
    """Ranges of flat tensors by parameter and kind, in the order in which ranks have them."""

    def __init__(self) -> None:
        self._parts: dict[str, dict[str, list[Tensor]]] = defaultdict(lambda: defaultdict(list))
        self._scalars: dict[str, dict[str, Tensor]] = defaultdict(dict)

    def add(self, name: str, vectors: dict[str, Tensor], start: int, numel: int, scalars: dict[str, Tensor]) -> None:
        for kind, flat in vectors.items():
            self._parts[name][kind].append(flat[start : start + numel])
        self._scalars[name].update(scalars)

    def pieces(self, shapes: dict[str, tuple[int, ...]]) -> Pieces:
        pieces: Pieces = {}
        for name, shape in shapes.items():
            if name not in self._parts:
                raise CheckpointError(f"{name} is in no *_optim_states.pt; the checkpoint is incomplete.")
            for kind, parts in self._parts[name].items():
                pieces[_spec(kind, name, shape, parts[0])] = Parts(tuple(parts))
            for kind, one in self._scalars[name].items():
                pieces[_spec(kind, name, (), one)] = Parts((one,))
        return pieces


def _base_state(optim: dict[str, Any], number: int) -> dict[str, Any]:
    """The wrapped optimizer's state of a flat group: by its number, or in a list if the checkpoint is elastic."""
    base = optim["base_optimizer_state"]
    if isinstance(base, list):
        return dict(base[number])
    return dict(base["state"].get(base["param_groups"][number]["params"][0], {}))


def _base_groups(optim: dict[str, Any]) -> list[dict[str, Any]]:
    base = optim["base_optimizer_state"]
    if isinstance(base, list):  # an elastic checkpoint keeps no hyper-parameters
        return [{} for _ in base]
    return list(base["param_groups"])


def _groups_of(model: dict[str, Any], optim: dict[str, Any]) -> Groups:
    names = [list(group) for group in _shape_groups(model)]
    return [_hyper(group, owned) for group, owned in zip(_base_groups(optim), names, strict=True)]


# -- stage 3 --------------------------------------------------------------------------------------------


def _stage_3(models: list[dict[str, Any]], optims: list[dict[str, Any]]) -> Pieces:
    if optims[0].get("ds_zero_partition_groups"):
        raise CheckpointError("The checkpoint has experts split over ranks (AutoEP), which cannot be imported.")
    sub_groups = _shape_groups(models[0])
    owners = {sub: group for group in _z3_groups(optims[0]) for sub in group["params"]}
    found = _Found()
    for optim in optims:
        for number, shapes in enumerate(sub_groups):
            entry = optim["optimizer_state_dict"]["state"].get(number, {})
            vectors = _vectors(entry, optim["fp32_flat_groups"][number])
            scalars = _scalars(entry, owners.get(number, {}))
            for name, start, numel in _walk(shapes, len(optims)):
                found.add(name, vectors, start, numel, scalars)
    return found.pieces({name: shape for group in sub_groups for name, shape in group.items()})


def _walk(shapes: dict[str, tuple[int, ...]], num_ranks: int) -> Iterator[tuple[str, int, int]]:
    """Where each parameter's part begins in a rank's flat sub-group, and how long it is."""
    start = 0
    for name, shape in shapes.items():
        numel = math.ceil(math.prod(shape) / num_ranks)
        yield name, start, numel
        start += numel


def _z3_groups(optim: dict[str, Any]) -> list[dict[str, Any]]:
    return list(optim["optimizer_state_dict"]["param_groups"])


def _groups_of_stage_3(model: dict[str, Any], optim: dict[str, Any]) -> Groups:
    """A parameter group is several sub-groups there, which it names by their numbers."""
    sub_groups = _shape_groups(model)
    return [_hyper(group, [name for sub in group["params"] for name in sub_groups[sub]]) for group in _z3_groups(optim)]


# -- universal ------------------------------------------------------------------------------------------


def _universal(folder: Path, model: dict[str, Any]) -> tuple[Pieces, Groups]:
    """One folder for each parameter, with a file for the master weight and for each state."""
    groups = [*_shape_groups(model), model.get("frozen_param_shapes") or {}]
    pieces: Pieces = {}
    for name, shape in (item for group in groups for item in group.items()):
        if not (folder / "zero" / name / "fp32.pt").is_file():
            raise CheckpointError(f"{folder / 'zero' / name} has no fp32.pt; the checkpoint is incomplete.")
        for file in sorted((folder / "zero" / name).glob("*.pt")):
            tensor = _universal_tensor(file)
            kind = PARAM if file.stem == "fp32" else f"state.{file.stem}"
            pieces[_spec(kind, name, shape if tensor.dim() else (), tensor)] = OwnFile(file)
    state = load_inert(folder / "zero" / "optimizer_state.pt")
    if "fp32_flat_groups" in state:
        return pieces, _groups_of_stage_3(model, state)
    names = [list(group) for group in _shape_groups(model)]
    return pieces, [_hyper(group, owned) for group, owned in zip(state["param_groups"], names, strict=True)]


def _universal_tensor(file: Path) -> Tensor:
    held = load_inert(file)
    tensor = held["param"] if isinstance(held, dict) else held
    return tensor if isinstance(tensor, Tensor) else torch.tensor(float(tensor))
