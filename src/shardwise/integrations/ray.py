"""Loops of Ray Train's workers over our engine: `shard` inside of the function that a `TorchTrainer` runs.

Ray starts the ranks, names them and has made torch's process group; the engine joins them. A checkpoint is written
once, into the storage of the run, of which each worker writes its part, and reported to Ray as it lies.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray.train
import ray.train.torch
import torch.distributed as dist
from ray.train import Checkpoint
from ray.train.v2.api.report_config import CheckpointUploadMode
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, SequentialSampler

import shardwise as sw
from shardwise.errors import CheckpointError, ConfigError
from shardwise.integrations.folders import STATE_FOLDER
from shardwise.integrations.plans import PlanLike

_LOCAL = "local"
_KEPT = (
    "batch_size", "num_workers", "collate_fn", "pin_memory", "drop_last", "timeout", "worker_init_fn", "generator",
    "multiprocessing_context", "prefetch_factor", "persistent_workers",
)  # fmt: skip
"""What a loader keeps when its samples are dealt out."""


def shard(model: nn.Module, plan: PlanLike = "zero3", *, optimizer: Any = None, **settings: Any) -> sw.Engine:
    """What `shardwise.shard` does, on the workers of a `TorchTrainer`, in the place of `prepare_model`. All call.

    The device is the one that Ray gave this worker. Under a plan with axes `tp`, `sp` or `pp` some workers share in a
    batch: `prepare_data_loader` of this module deals batches so, and Ray's own does not. Use the engine in a `with`:
    what one worker raises, the others raise as well, and Ray starts all of them again if its `FailureConfig` says so.

    Raises `ConfigError` outside of a worker, and for a model that `prepare_model` has wrapped.
    """
    loaded = sw.load_plan(plan)
    if not dist.is_initialized() and _size() > 1:
        raise ConfigError(
            "The workers of this job have no process group. Give the function to ray.train.torch.TorchTrainer, which "
            "makes one."
        )
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ConfigError(
            "prepare_model() has wrapped the model in DistributedDataParallel. Call shard() with the model itself, "
            "which it moves and shards."
        )
    device = ray.train.torch.get_device()
    wanted = None if device.type == "cpu" else device
    return sw.shard(model, loaded, optimizer=optimizer, device=wanted, **settings)


def prepare_data_loader(engine: sw.Engine, loader: DataLoader[Any], **settings: Any) -> DataLoader[Any]:
    """What Ray's own does, by `engine.data_ranks`: workers that share in a batch are given the same one.

    A loader over an iterable dataset, or with a `DistributedSampler` already, keeps its samples. `settings` are Ray's
    (`move_to_device`, `auto_transfer`). Call `loader.sampler.set_epoch(epoch)` before each epoch of a shuffled one.
    """
    place, count = engine.data_ranks
    is_dealt = isinstance(loader.dataset, IterableDataset) or isinstance(loader.sampler, DistributedSampler)
    if count > 1 and not is_dealt:
        if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
            raise ConfigError(
                "The loader has batches of its own (batch_size=None or a batch_sampler), which nothing here can deal "
                "out. Deal them by engine.data_ranks, which is (place, number), and leave this call out."
            )
        is_shuffled = not isinstance(loader.sampler, SequentialSampler)
        sampler = DistributedSampler(loader.dataset, count, place, shuffle=is_shuffled, drop_last=loader.drop_last)  # type: ignore[var-annotated]
        loader = DataLoader(loader.dataset, sampler=sampler, **{name: getattr(loader, name) for name in _KEPT})
    prepared: DataLoader[Any] = ray.train.torch.prepare_data_loader(loader, add_dist_sampler=False, **settings)
    return prepared


def report(
    engine: sw.Engine, metrics: Mapping[str, Any], *, state: Mapping[str, Any] | None = None, save: bool = True
) -> None:
    """`ray.train.report` of `metrics`, with a checkpoint of the engine. All workers call, between steps.

    `state` is the caller's own, such as a scheduler's `state_dict()` or the epoch: worker 0's is kept. Which
    checkpoints stay is said by Ray's `CheckpointConfig`.

    Raises `ConfigError` for a storage that is no folder which all workers see.
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
    """Go on from the checkpoint that Ray has for this run; the `state` given to `report`, or `None` without one.

    All workers call. Any number of workers, under any plan, can have written it.
    """
    checkpoint = ray.train.get_checkpoint()
    paths = [None if checkpoint is None else str(checkpoint.path)]
    told = engine.world.exchange(json.dumps(paths[0]).encode(), "checkpoint")
    path = json.loads(told[0])
    if path is None:
        return None
    found = engine.resume(Path(path) / STATE_FOLDER)
    if found is None:
        raise CheckpointError(
            f"{path} has no {STATE_FOLDER}/ with a checkpoint, so it was not written by report(engine, metrics). Load "
            f"its weights into the model before shard()."
        )
    return dict(found.state)


def _size() -> int:
    try:
        return int(ray.train.get_context().get_world_size())
    except RuntimeError as error:
        raise ConfigError(
            "shard() was called outside of a worker of Ray Train. Call it in the function that a TorchTrainer runs, or "
            "shardwise.shard(model, plan) in a job of another launcher."
        ) from error


def _storage() -> Path:
    storage = ray.train.get_context().get_storage()
    kind = storage.storage_filesystem.type_name
    if kind != _LOCAL:
        raise ConfigError(
            f"The storage of this run is {kind}, and the engine writes into a folder. Give RunConfig a storage_path "
            f"that is a folder all workers see, or save with engine.save(folder) and upload that yourself."
        )
    return Path(storage.experiment_fs_path)
