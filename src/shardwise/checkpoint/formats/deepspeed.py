"""Reads checkpoints of DeepSpeed with ZeRO-1, 2 or 3: weights, master weights and Adam's states.

The formats are those of DeepSpeed's own `utils/zero_to_fp32.py` and `checkpoint/ds_to_universal.py`: stages 1 and 2
flatten each parameter group, with a rank's parts of parameters in `param_slice_mappings`; stage 3 splits each parameter
evenly over ranks, with the pieces in the order of `param_shapes`.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint.formats.checked_dicts import CheckedDict, shapes_in
from shardwise.checkpoint.formats.deepspeed_parts import (
    Groups,
    Parts,
    Pieces,
    spec_of,
    stage_3,
    stages_1_and_2,
    universal,
)
from shardwise.checkpoint.formats.pickles import plain_items
from shardwise.checkpoint.formats.source import BUFFER, PARAM, Source, stored_files
from shardwise.checkpoint.formats.torch_files import load_file
from shardwise.errors import CheckpointError
from shardwise.system.safe_files import inside, read_text

Tensor = torch.Tensor
FORM = "deepspeed"
MODEL_FILES, OPTIM_FILES = "*_model_states.pt", "*_optim_states.pt"
OWN_KEYS = {
    *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params"),
    *("frozen_param_fragments", "data_sampler", "random_ltd", "sparse_tensor_module_names"),
    *("skipped_steps", "global_steps", "dp_world_size", "mp_world_size", "ds_config", "ds_version"),
    *("checkpoint_parallel_dimensions", "universal_checkpoint_info", "autoep_layers"),
}
"""DeepSpeed's own keys in a model file; the rest is `client_state`, `lr_scheduler` and `global_samples`."""


def tagged_folder(path: Path) -> Path | None:
    """The folder with the files of a DeepSpeed checkpoint at `path`: itself, or the one that `latest` names."""
    for pointer in ("latest", "latest_universal"):
        if (path / pointer).exists():
            named = inside(path, read_text(inside(path, pointer)))
            if any(named.glob(MODEL_FILES)):
                return named
    return path if any(path.glob(MODEL_FILES)) else None


def open_deepspeed(path: Path) -> Source:
    """The checkpoint at `path`; the newest one, if `path` was given to `save_checkpoint`."""
    folder = tagged_folder(path)
    if folder is None:
        raise CheckpointError(f"{path} is not a DeepSpeed checkpoint: it has no {MODEL_FILES}.")
    _refuse_split_models(folder)
    models = [_model_states(file) for file in _in_order(folder, MODEL_FILES)]
    optims = [_optim_states(file) for file in _in_order(folder, OPTIM_FILES)]
    own = optims[0] if optims else None
    if (folder / "zero").is_dir():
        pieces, groups, own = universal(folder, models[0])
        stage = "universal"
    elif own is None:
        pieces, groups = {}, []
        stage = "0"
    else:
        _check_count(folder, own, len(optims))
        if "fp32_flat_groups" in own:
            pieces, groups = stage_3(folder, models[0], optims)
            stage = "3"
        else:
            pieces, groups = stages_1_and_2(folder, models[0], optims)
            stage = "1 or 2"
    source = _source(folder, stage, models, pieces, groups)
    source.left_out += [] if own is None else _clipping(own, models[0])
    return source


def _source(folder: Path, stage: str, models: list[CheckedDict], pieces: Pieces, groups: Groups) -> Source:
    model = models[0]
    known = {spec.name for spec in pieces}
    pieces |= {spec: one for spec, one in _frozen(folder, models).items() if spec.name not in known}
    pieces |= _buffers(model)
    pieces |= _in_module(model, pieces)
    names = {spec.name for spec in pieces if spec.kind in (PARAM, BUFFER)}
    shared = model.inner_or_empty("shared_params").values
    ties = {alias: name for alias, name in shared.items() if isinstance(alias, str) and isinstance(name, str)}
    ties = {alias: name for alias, name in ties.items() if name in names and alias not in names}
    user, left_out = _user(model)
    if stage == "0":
        left_out.append("the optimizer's states: a checkpoint without ZeRO does not say which parameter they are of")
    return Source(
        form=FORM,
        path=folder,
        specs=tuple(pieces),
        read=lambda spec: pieces[spec].read(spec),
        step=model.count("global_steps"),
        num_steps=model.count("global_steps"),
        groups=groups,
        ties=ties,
        user=user,
        facts={
            "stage": stage,
            "world_size": model.count("dp_world_size"),
            "versions": {"deepspeed": str(model.values.get("ds_version"))[:100]},
        },
        files=stored_files(folder),
        left_out=left_out,
    )


def _clipping(own: CheckedDict, model: CheckedDict) -> list[str]:
    """A note on the run's gradient clipping, from the optimizer or the configuration."""
    limit = own.values.get("clip_grad")
    config = model.values.get("ds_config")
    if limit is None and isinstance(config, dict):
        limit = config.get("gradient_clipping")
    words = "DeepSpeed's gradient clipping, which is a matter of the plan here:"
    if isinstance(limit, int | float):
        return [f"{words} clip_grad_norm: {limit}"] if limit > 0 else []
    return [
        f"{words} the checkpoint does not say at which norm. By default DeepSpeed 0.19 clips "
        f"at 1.0, clip_grad_norm: 1.0, and older versions do not clip"
    ]


# -- the files ------------------------------------------------------------------------------------------


def _in_order(folder: Path, pattern: str) -> list[Path]:
    """Sorted by the numbers in their names, so that rank 10 comes after rank 9. Raises if a rank is missing."""
    found = sorted(folder.glob(pattern), key=lambda path: [int(digits) for digits in _numbers(path)])
    ranks = [int(match[1]) for path in found if (match := re.search(r"zero_pp_rank_(\d{1,9})_", path.name))]
    if ranks and ranks != list(range(len(found))):
        lacking = next(rank for rank in range(len(found) + 1) if rank not in ranks)
        raise CheckpointError(
            f"{folder} has {len(found)} files {pattern}, but none of rank {lacking}; it is incomplete."
        )
    return [inside(folder, path.name) for path in found]


def _numbers(path: Path) -> list[str]:
    return re.findall(r"[0-9]{1,18}", path.name)


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
                f"Save the whole model in DeepSpeed, with save_16bit_model or as Hugging Face, and convert that."
            )


def _model_states(file: Path) -> CheckedDict:
    state = load_file(file)
    if not isinstance(state, dict) or not {"module", "global_steps", "dp_world_size"} <= state.keys():
        raise CheckpointError(f"{file} is not a DeepSpeed model file.")
    return CheckedDict(state, str(file))


def _optim_states(file: Path) -> CheckedDict:
    return CheckedDict.of(load_file(file), str(file)).inner("optimizer_state_dict")


def _check_count(folder: Path, optim: CheckedDict, num_files: int) -> None:
    counts = optim.values.get("partition_count")
    if isinstance(counts, int):
        counts = [counts]
    expected = max(CheckedDict({"partition_count": counts}, optim.where).each("partition_count", int), default=0)
    if expected != num_files:
        raise CheckpointError(
            f"{folder} has {num_files} files {OPTIM_FILES}, but {expected} ranks wrote it; it is incomplete."
        )


# -- common to all stages -------------------------------------------------------------------------------


def _buffers(model: CheckedDict) -> Pieces:
    module, names = model.tensors("module"), model.names("buffer_names")
    found = {name: module[name] for name in names if name in module}
    return {spec_of(BUFFER, name, tuple(one.shape), one): Parts((one,)) for name, one in found.items()}


def _frozen(folder: Path, models: list[CheckedDict]) -> Pieces:
    """Parameters that the optimizer does not own, if DeepSpeed lists them; in stage 3 each rank has its part."""
    pieces: Pieces = {}
    for name, shape in shapes_in(models[0].inner_or_empty("frozen_param_shapes")).items():
        parts = [model.tensors("frozen_param_fragments").get(name) for model in models]
        if parts[0] is not None and parts[0].numel() == math.prod(shape):
            parts = parts[:1]
        elif len(models) != models[0].count("dp_world_size"):
            raise CheckpointError(
                f"{folder} has {len(models)} files {MODEL_FILES}, but {models[0].count('dp_world_size')} ranks have a "
                f"part of {name}; it is incomplete."
            )
        there = [part for part in parts if part is not None]
        if len(there) < len(parts) or len({part.numel() for part in there}) > 1:
            raise CheckpointError(f"{folder} lacks parts of the frozen {name}; it is incomplete.")
        pieces[spec_of(PARAM, name, shape, there[0])] = Parts(tuple(there))
    return pieces


def _in_module(model: CheckedDict, known: Pieces) -> Pieces:
    """Whole parameters of the model file that are nowhere else: all without ZeRO, frozen ones in stage 1."""
    names = {spec.name for spec in known} | set(model.inner_or_empty("shared_params").values)
    module = {name: one for name, one in model.tensors("module").items() if name not in names and one.numel()}
    return {spec_of(PARAM, name, tuple(one.shape), one): Parts((one,)) for name, one in module.items()}


def _user(model: CheckedDict) -> tuple[dict[str, Any], list[str]]:
    """`client_state` and the scheduler, as far as they are plain values."""
    kept = {key: value for key, value in model.values.items() if key not in OWN_KEYS and value is not None}
    user, others = plain_items(kept)
    return user, [f"{name}, which is not plain data" for name in others]
