"""Ray Train on our engine: call `shard` inside the function that a `TorchTrainer` runs.

Ray starts the ranks and creates torch's process group, which the engine joins. Each worker writes its part of a
checkpoint directly into the storage of the run, and the checkpoint is reported to Ray without a copy.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ray.train
import ray.train.torch
import torch.distributed as dist
from ray.train import Checkpoint
from ray.train.v2.api.report_config import CheckpointUploadMode
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

import shardwise as sw
from shardwise.errors import CheckpointError, ConfigError
from shardwise.integrations.checkpoint_folders import STATE_FOLDER
from shardwise.integrations.plans import PlanLike

_LOCAL = "local"
_KEPT = (
    "batch_size", "num_workers", "collate_fn", "pin_memory", "drop_last", "timeout", "worker_init_fn", "generator",
    "multiprocessing_context", "prefetch_factor", "persistent_workers",
)  # fmt: skip
"""The attributes that a data loader keeps when it gets a `DistributedSampler`."""


def shard(model: nn.Module, plan: PlanLike = "zero3", *, optimizer: Any = None, **settings: Any) -> sw.Engine:
    """`shardwise.shard` for the workers of a `TorchTrainer`. Replaces `prepare_model`. Collective.

    The model moves to the device that Ray assigned to this worker. With axes `tp`, `sp` or `pp` some workers share a
    batch: use `prepare_data_loader` of this module, because Ray's does not support that. Use the engine in a `with`
    statement: if one worker raises, the others raise too, and Ray restarts all of them if its `FailureConfig` allows.

    Raises `ConfigError` outside of a worker, and for a model that `prepare_model` has wrapped.
    """
    loaded = sw.load_plan(plan)
    if not dist.is_initialized() and _size() > 1:
        raise ConfigError(
            "The workers of this job have no process group. Run the function with ray.train.torch.TorchTrainer, which "
            "creates one."
        )
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ConfigError(
            "prepare_model() has wrapped the model in DistributedDataParallel. Call shard() with the original model; "
            "it moves and shards it."
        )
    device = ray.train.torch.get_device()
    wanted = None if device.type == "cpu" else device
    return sw.shard(model, loaded, optimizer=optimizer, device=wanted, **settings)


def prepare_data_loader(engine: sw.Engine, loader: DataLoader[Any], **settings: Any) -> DataLoader[Any]:
    """Ray's `prepare_data_loader` with the shards of `engine.data_ranks`: workers that share a batch get the same one.

    A loader of an iterable dataset, or with a `DistributedSampler`, keeps its samples. `settings` are Ray's
    (`move_to_device`, `auto_transfer`). If it shuffles, call `loader.sampler.set_epoch(epoch)` before each epoch.

    Raises `ConfigError` for a loader that makes its own batches, or whose sampler chooses samples in another way than
    each once, in order or shuffled: Ray's would replace it without a word.
    """
    place, count = engine.data_ranks
    is_dealt = isinstance(loader.dataset, IterableDataset) or isinstance(loader.sampler, DistributedSampler)
    if count > 1 and not is_dealt:
        if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
            raise ConfigError(
                "The loader makes its own batches (batch_size=None or a batch_sampler), so they cannot be distributed "
                "here. Distribute them yourself by engine.data_ranks, which is (index, number of shards), and leave "
                "this call out."
            )
        if not _takes_each_once(loader.sampler):
            raise ConfigError(
                f"The loader's {type(loader.sampler).__name__} chooses samples by itself, and would be replaced by one "
                f"that deals each of them once. Let it choose those of one shard, by engine.data_ranks, which is "
                f"(index, number of shards), and leave this call out."
            )
        is_shuffled = not isinstance(loader.sampler, SequentialSampler)
        sampler = DistributedSampler(loader.dataset, count, place, shuffle=is_shuffled, drop_last=loader.drop_last)  # type: ignore[var-annotated]
        loader = DataLoader(loader.dataset, sampler=sampler, **{name: getattr(loader, name) for name in _KEPT})
    prepared: DataLoader[Any] = ray.train.torch.prepare_data_loader(loader, add_dist_sampler=False, **settings)
    return prepared


def report(
    engine: sw.Engine, metrics: Mapping[str, Any], *, state: Mapping[str, Any] | None = None, save: bool = True
) -> None:
    """`ray.train.report` of `metrics`, with a checkpoint of the engine. Collective, between steps.

    `state` is additional state, such as a scheduler's `state_dict()` or the epoch; that of worker 0 is saved. Ray's
    `CheckpointConfig` determines which checkpoints are kept.

    Raises `ConfigError` if the storage is not a folder that all workers share.
    """
    if not save:
        ray.train.report(dict(metrics))
        return
    name = f"checkpoint-{engine.num_steps:08d}"
    place = _storage() / name
    engine.save(place / STATE_FOLDER, state=dict(state or {}))
    ray.train.report(
        dict(metrics),
        checkpoint=Checkpoint(str(place)) if engine.world.rank == 0 else None,
        checkpoint_dir_name=name,
        checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD,
    )


def resume(engine: sw.Engine) -> dict[str, Any] | None:
    """Resume from Ray's checkpoint of this run. Returns the `state` given to `report`, or `None` without a checkpoint.

    Collective. The checkpoint may have been written by any number of workers, under any plan.
    """
    checkpoint = ray.train.get_checkpoint()
    own = None if checkpoint is None else str(checkpoint.path)
    path = json.loads(engine.world.exchange(json.dumps(own).encode(), "checkpoint")[0])
    if path is None:
        return None
    found = engine.resume(Path(path) / STATE_FOLDER)
    if found is None:
        raise CheckpointError(
            f"{path} has no {STATE_FOLDER}/ with a checkpoint, so it was not written by report(engine, metrics). Load "
            f"its weights into the model before you call shard()."
        )
    return dict(found.state)


def _takes_each_once(sampler: Sampler[Any] | Iterable[Any]) -> bool:
    """Whether it is one that torch gives a loader for `shuffle=False` or `True`, or does the same."""
    if type(sampler) is not RandomSampler:
        return type(sampler) is SequentialSampler
    return not sampler.replacement and sampler.num_samples == len(sampler.data_source)


def _size() -> int:
    try:
        return int(ray.train.get_context().get_world_size())
    except RuntimeError as error:
        raise ConfigError(
            "shard() was called outside of a worker of Ray Train. Call it in the function that a TorchTrainer runs, or "
            "call shardwise.shard(model, plan) in a job of another launcher."
        ) from error


def _storage() -> Path:
    storage = ray.train.get_context().get_storage()
    kind = storage.storage_filesystem.type_name
    if kind != _LOCAL:
        raise ConfigError(
            f"The storage of this run is {kind}, but the engine writes into a folder. Set storage_path of RunConfig to "
            f"a folder that all workers share, or call engine.save(folder) and upload the folder yourself."
        )
    return Path(storage.experiment_fs_path)
