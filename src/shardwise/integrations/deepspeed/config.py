"""Translates a `ds_config.json` into a plan: each field is honoured, explained or refused, none is silently ignored."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError
from shardwise.integrations.deepspeed import hjson
from shardwise.integrations.deepspeed.elastic_batches import Elasticity, elastic_batch
from shardwise.integrations.deepspeed.fields import (
    ELSEWHERE_SECTIONS,
    FIELDS,
    FREE_SECTIONS,
    REFUSED_SECTIONS,
    RENAMED,
    SECTION_NAMES,
    TUNED,
    TUNED_BY,
    FieldStatus,
    why_unknown,
)
from shardwise.system.safe_files import read_config_text

_DTYPES = {"fp32": "fp32", "float32": "fp32", "fp16": "fp16", "float16": "fp16", "bf16": "bf16", "bfloat16": "bf16"}
_NUM_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
_TRACKERS = {"tensorboard": "tensorboard", "csv_monitor": "csv", "wandb": "wandb", "comet": "comet"}
_COMET_OPTIONS = ("project", "workspace", "api_key", "experiment_key", "mode")
SAMPLES_LOG_INTERVAL = "samples_log_interval"
"""An option of `TranslatedConfig.monitors` that trackers do not have: the least number of samples between two values of
one event."""
_STATES_AS_WEIGHTS = (
    "states always have the dtype of the weights that are updated, as DeepSpeed's with false; smaller ones: "
    "sw.optim.AdamW(state_dtype='bf16')"
)
_WHOLE_PARAMS = "it has no effect below stage 3, as in DeepSpeed: parameters are whole on every rank"
_STAGES_OF_MODULE = "the arguments of PipelineModule are used"
_BY_SIZE = ("best", "parameters")
"""Values of `pipeline.partition` for which stages are about equally large."""
_STATES_TOO = "parameters are offloaded together with gradients and optimizer states"
_GENERATES = "generate inside `with engine.inference():`"
_PRESETS = {0: "ddp", 1: "zero1", 2: "zero2", 3: "zero3"}


class ElasticityError(ConfigError):
    """A config or a number of ranks that elastic training cannot have."""


class ElasticityConfigError(ElasticityError):
    """An `elasticity` section that is missing, off or contradictory."""


class ElasticityIncompatibleWorldSize(ElasticityError):  # noqa: N818  # DeepSpeed's name
    """A number of ranks that cannot share the batch."""


@dataclass(frozen=True)
class Note:
    """How one field was handled."""

    path: str
    status: FieldStatus
    text: str = ""

    def __str__(self) -> str:
        return f"{self.path}: {self.status.value}" + (f"; {self.text}" if self.text else "")


@dataclass(frozen=True)
class ComponentConfig:
    """The `type` and `params` of an optimizer or LR scheduler in a config."""

    name: str
    params: Mapping[str, Any]


@dataclass(frozen=True)
class TranslatedConfig:
    """A DeepSpeed config, translated."""

    plan: dict[str, Any]
    """A plan for `shardwise.shard`, `load_plan` or a YAML file."""
    micro_batch: int
    """Samples per rank and forward: `train_micro_batch_size_per_gpu`."""
    accumulate: int
    """Micro-batches per step: `gradient_accumulation_steps`."""
    num_replicas: int
    """Data-parallel ranks."""
    stage: int
    optimizer: ComponentConfig | None
    scheduler: ComponentConfig | None
    steps_per_print: int | None
    notes: tuple[Note, ...] = field(default=())
    monitors: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The enabled trackers, by their names in shardwise, with options such as where they write."""
    recomputed_run: int = 0
    """`pipeline.activation_checkpoint_interval`, which replaces that of a `PipelineModule` if it is not 0."""
    source: Mapping[str, Any] = field(default_factory=dict)
    """The config itself."""
    given: Mapping[str, Any] = field(default_factory=dict)
    """The fields that are set, by path."""

    def value(self, path: str) -> Any:
        """The value of a field, or DeepSpeed's default; for a section, those of its fields by name."""
        if path in FIELDS and path not in SECTION_NAMES:
            return self.given.get(path, FIELDS[path].default)
        names = [name.removeprefix(f"{path}.") for name in FIELDS if name.startswith(f"{path}.")]
        return {name: self.value(f"{path}.{name}") for name in names}

    @property
    def tag_validation(self) -> str:
        """What happens if ranks give different tags to a checkpoint: `ignore`, `warn` or `fail`."""
        return str(self.value("checkpoint.tag_validation")).lower()

    @property
    def sums_gradients(self) -> bool:
        """Whether gradients are summed over data-parallel ranks, not averaged."""
        return str(self.value("gradient_allreduce_op")).lower() == "sum"

    @property
    def global_batch(self) -> int:
        """Samples per step on all ranks: `train_batch_size`."""
        return self.micro_batch * self.accumulate * self.num_replicas

    def report(self, *, monitors_by: str | None = None) -> str:
        """One line for each field that was not simply honoured, with unknown fields first.

        If the caller is not `initialize`, `monitors_by` says what is used instead of `monitors`.
        """
        notes = self.notes
        if monitors_by is not None:
            used = {f"{section}.enabled" for section, tracker in _TRACKERS.items() if tracker in self.monitors}
            enabled = [note.path for note in notes if note.path in used]
            notes = (*notes, *(Note(path, FieldStatus.ELSEWHERE, monitors_by) for path in enabled))
            if self.value("hybrid_engine.enabled"):
                notes = (*notes, Note("hybrid_engine.enabled", FieldStatus.ELSEWHERE, _GENERATES))
        order = (FieldStatus.UNKNOWN, FieldStatus.AUTO, FieldStatus.ELSEWHERE, FieldStatus.NOT_NEEDED)
        shown = [note for status in order for note in notes if note.status is status]
        shown += [note for note in notes if note.status is FieldStatus.HONOURED and note.text == _STATES_TOO]
        return "\n".join(map(str, shown))


def load_config(source: Mapping[str, Any] | str | Path) -> dict[str, Any]:
    """The config in `source`: a mapping, a file of JSON or HJSON, or such a file's text in base64.

    Raises `ConfigError` for a file that cannot be read, is not an object, or contains a key twice.
    """
    if isinstance(source, Mapping):
        return dict(source)
    path, text = Path(source), None
    try:
        text = read_config_text(path)
    except OSError as error:
        text = _decoded(str(source))
        if text is None:
            raise ConfigError(f"{path}: the DeepSpeed config cannot be read: {error.strerror}.") from error
        path = Path("(base64)")
    try:
        config = hjson.parse(text, lambda pairs: _unique(path, pairs))
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: this is neither JSON nor HJSON: {error}.") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: a DeepSpeed config is an object, not a {type(config).__name__}.")
    return config


def _decoded(source: str) -> str | None:
    """The text that `source` is in base64, as Transformers and Accelerate pass configs on; `None` if it is not."""
    try:
        text = base64.urlsafe_b64decode(source).decode()
    except ValueError:
        return None
    return text if text.lstrip().startswith("{") else None


def read_config(
    source: Mapping[str, Any] | str | Path,
    *,
    world_size: int,
    auto: Mapping[str, Any] | None = None,
    num_stages: int | None = None,
    may_sum: bool = False,
) -> TranslatedConfig:
    """Translate the config in `source` for `world_size` ranks.

    `num_stages` are the pipeline stages of a `PipelineModule`; `None` for any other model, which has those of
    `pipeline.stages` in the config. DeepSpeed ignores that field.
    `may_sum`: the caller sums gradients if `gradient_allreduce_op` says so, which no plan does by itself.
    `auto` has values for fields that are `"auto"`, by path (`"zero_optimization.reduce_bucket_size"`); without a value
    such a field counts as not set, with a note. Raises `ConfigError` for fields that contradict each other, and for
    unsupported ones, of which the message lists all.
    """
    if world_size < 1:
        raise ConfigError(f"world_size is {world_size}; a config is translated for 1 or more ranks.")
    config = load_config(source)
    values, notes = _classified(config, auto or {})
    values.one_of("checkpoint.tag_validation", ("ignore", "warn", "fail"))
    reduction = values.one_of("gradient_allreduce_op", ("mean", "sum"))
    values.flag("hybrid_engine.enabled")
    values.flag("hybrid_engine.pin_parameters")
    values.count("hybrid_engine.inference_tp_size")
    plan: dict[str, Any] = {}
    _set_precision(plan, values)
    _set_table(plan, values, notes)
    if num_stages is None:
        num_stages = _stages_of_plain(plan, values)
    elif values.is_given("pipeline.stages"):
        notes.append(Note("pipeline.stages", FieldStatus.NOT_NEEDED, _STAGES_OF_MODULE))
    sizes = _ParallelSizes.of(values, num_stages, world_size)
    if reduction == "sum" and (not may_sum or num_stages * sizes.sequence > 1):
        raise ConfigError(
            'gradient_allreduce_op = "sum" is for deepspeed.initialize(), without pipelines or split sequences; here '
            "gradients are averaged. Leave it out, and multiply the loss by the number of data-parallel ranks."
        )
    _set_mesh(plan, values, sizes)
    _set_codes(plan, values, notes)
    clip = values.number("gradient_clipping")
    if clip > 0:
        plan["clip_grad_norm"] = float(clip)
    micro_batch, accumulate = _batches(values, sizes.replicas)
    if accumulate > 1:
        plan["accumulate"] = accumulate
    optimizer = values.named("optimizer")
    if optimizer is not None and optimizer.params.get("fp32_optimizer_states") is False:
        notes.append(Note("optimizer.params.fp32_optimizer_states", FieldStatus.NOT_NEEDED, _STATES_AS_WEIGHTS))
    return TranslatedConfig(
        plan=plan,
        micro_batch=micro_batch,
        accumulate=accumulate,
        num_replicas=sizes.replicas,
        stage=int(values.number("zero_optimization.stage")),
        optimizer=optimizer,
        scheduler=values.named("scheduler"),
        steps_per_print=values.get("steps_per_print"),
        notes=tuple(notes),
        monitors=_monitors(values),
        recomputed_run=values.count_or_0("pipeline.activation_checkpoint_interval"),
        source=config,
        given=values.given,
    )


class _Values:
    """The values of fields by path: those that are set, and DeepSpeed's defaults."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.given = given

    def get(self, path: str) -> Any:
        return self.given.get(path, FIELDS[path].default)

    def is_given(self, path: str) -> bool:
        return path in self.given

    def one_of(self, path: str, words: tuple[str, ...]) -> str:
        """One of `words`, which may be in upper case in the config. Raises `ConfigError` for anything else."""
        value = self.get(path)
        if not isinstance(value, str) or value.lower() not in words:
            raise ConfigError(f"{path} is {json.dumps(value)}; it must be one of {', '.join(words)}.")
        return value.lower()

    def flag(self, path: str) -> bool:
        value = self.get(path)
        if not isinstance(value, bool):
            raise ConfigError(f"{path} is {value!r}; it must be true or false.")
        return value

    def number(self, path: str) -> float:
        value = self.get(path)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{path} is {value!r}, which is not a number.")
        if not isinstance(value, int) and not math.isfinite(value):
            raise ConfigError(f"{path} is {value!r}, which is not a finite number.")
        return value

    def count(self, path: str) -> int | None:
        """A positive integer, or `None` if it is not set."""
        value = self.get(path)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{path} is {value!r}; it must be an integer of at least 1.")
        return value

    def count_or_0(self, path: str) -> int:
        """A positive integer, or 0."""
        return 0 if self.get(path) == 0 else self.count(path) or 0

    def text(self, path: str) -> str | None:
        """Text, or `None` if it is not set."""
        value = self.get(path)
        if value is not None and not isinstance(value, str):
            raise ConfigError(f"{path} is {value!r}, which is not text.")
        return value

    def named(self, section: str) -> ComponentConfig | None:
        name = self.get(f"{section}.type")
        if name is None:
            return None
        params = self.get(f"{section}.params") or {}
        if not isinstance(name, str) or not isinstance(params, Mapping):
            raise ConfigError(f"{section} must be an object with type (a name) and params (an object).")
        return ComponentConfig(name, {key: value for key, value in params.items() if value != "auto"})


def _unique(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    duplicates = sorted({key for key in keys if keys.count(key) > 1})
    if duplicates:
        raise ConfigError(f"{path}: {', '.join(map(repr, duplicates))} is there twice. Keep one.")
    return dict(pairs)


def _leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        path = RENAMED.get(f"{prefix}{key}", f"{prefix}{key}")
        if path == "zero_optimization" and isinstance(value, bool):  # the oldest form
            yield f"{path}.stage", int(value)
        elif path not in SECTION_NAMES or path in FREE_SECTIONS or value == "auto":
            yield path, value
        elif isinstance(value, Mapping):
            yield from _leaves(value, f"{path}.")
        elif value is not None:
            raise ConfigError(f"{path} is {json.dumps(value)}; it must be an object with fields of its own.")


def _classified(config: Mapping[str, Any], auto: Mapping[str, Any]) -> tuple[_Values, list[Note]]:
    """The values to use, and a note on each field. Raises `ConfigError` listing all unsupported fields."""
    given: dict[str, Any] = {}
    notes: list[Note] = []
    refused: list[str] = []
    for path, value in _leaves(config):
        section = path.partition(".")[0]
        if section in ELSEWHERE_SECTIONS:
            notes.append(Note(path, FieldStatus.ELSEWHERE, ELSEWHERE_SECTIONS[section]))
        elif section in REFUSED_SECTIONS:
            is_off = not _is_enabled(value)
            notes.append(
                Note(path, FieldStatus.NOT_NEEDED if is_off else FieldStatus.REFUSED, "it is off" if is_off else "")
            )
            refused += [] if is_off else [f"{path}: {REFUSED_SECTIONS[section]}"]
        elif path not in FIELDS:
            notes.append(Note(path, FieldStatus.UNKNOWN, why_unknown(path)))
        elif value == "auto" and path not in auto and FIELDS[path].default != "auto":
            cure = f"; {TUNED_BY}" if path in TUNED else ""
            notes.append(Note(path, FieldStatus.AUTO, f"counts as {json.dumps(FIELDS[path].default)}{cure}"))
        else:
            value = auto[path] if value == "auto" and path in auto else value
            known = FIELDS[path]
            if known.status is FieldStatus.REFUSED and value not in (known.default, None):
                refused.append(f"{path} = {json.dumps(value)}: {known.why}")
            given[path] = value
            notes.append(Note(path, known.status, known.why))
    if refused:
        raise ConfigError(
            "This DeepSpeed config has fields that shardwise does not support:\n"
            + "\n".join(f"  {line}" for line in refused)
        )
    return _Values(given), notes


def _is_enabled(value: object) -> bool:
    """Whether a section has any effect: as its `enabled` says, or else if any of its values is not empty."""
    if isinstance(value, Mapping):
        if "enabled" in value:
            return bool(value["enabled"])
        return any(map(_is_enabled, value.values()))
    return value not in (None, False, 0, "", "none")


def _monitors(values: _Values) -> dict[str, dict[str, Any]]:
    """The enabled trackers and their options. W&B and Comet choose themselves where to write, and are online unless the
    config or the environment prevents it."""
    options: dict[str, dict[str, Any]] = {
        "tensorboard": {"log_dir": str(_job_folder(values, "tensorboard"))},
        "csv": {"file": str(_job_folder(values, "csv_monitor") / "metrics.csv")},
        "wandb": {
            "project": values.text("wandb.project"),
            "group": values.text("wandb.group"),
            "entity": values.text("wandb.team"),
            "name": None,
            "mode": None,
            "dir": None,
        },
        "comet": {
            "name": values.text("comet.experiment_name"),
            "online": values.get("comet.online"),
            "offline_directory": None,
            SAMPLES_LOG_INTERVAL: values.count(f"comet.{SAMPLES_LOG_INTERVAL}"),
            **{name: values.text(f"comet.{name}") for name in _COMET_OPTIONS},
        },
    }
    return {name: options[name] for section, name in _TRACKERS.items() if values.flag(f"{section}.enabled")}


def _job_folder(values: _Values, section: str) -> Path:
    return Path(values.text(f"{section}.output_path") or "") / (values.text(f"{section}.job_name") or "")


def _set_precision(plan: dict[str, Any], values: _Values) -> None:
    is_fp16, is_bf16 = values.flag("fp16.enabled"), values.flag("bf16.enabled")
    if is_fp16 and is_bf16:
        raise ConfigError("fp16 and bf16 are both enabled. Keep one of them.")
    if is_fp16:
        fixed = values.number("fp16.loss_scale")
        plan["precision"] = "fp16"
        plan["loss_scale"] = {
            "dynamic": fixed == 0,
            "initial": float(fixed or 2.0 ** _exponent(values)),
            "window": int(values.number("fp16.loss_scale_window")),
            "hysteresis": int(values.number("fp16.hysteresis")),
            "minimum": float(values.number("fp16.min_loss_scale")),
        }
    elif is_bf16:
        plan["precision"] = "bf16"
        if _skips_in_bf16(values):
            plan["skip_nonfinite"] = True
    if (wire := _dtype(values, "communication_data_type")) is not None:
        plan["wire"] = {"grad": wire}
    if (kept := _dtype(values, "data_types.grad_accum_dtype")) is not None:
        _edit(plan, "grad", dtype=kept)


def _exponent(values: _Values) -> float:
    path = "fp16.initial_scale_power"
    exponent = values.number(path)
    if not -1000 <= exponent <= 1000:
        raise ConfigError(f"{path} is {exponent!r}, and no number is 2 to that power. Give one such as 16.")
    return exponent


def _skips_in_bf16(values: _Values) -> bool:
    """Whether DeepSpeed (`_do_optimizer_sanity_check` and `_configure_zero_optimizer` of 0.19) takes an optimizer that
    looks for gradients that are not finite: those of stages 1 and 2. Stage 3 looks in fp16 alone, and stage 1 has
    another optimizer, which never looks, where gradients are accumulated in fp32 on the device."""
    stage = values.get("zero_optimization.stage")
    accumulates_wide = _dtype(values, "data_types.grad_accum_dtype") == "fp32"
    has_other = stage == 1 and accumulates_wide and _tier(values, "offload_optimizer", "cpu_offload") != "host"
    return stage in (1, 2) and not has_other and values.flag("bf16.check_grad_overflow")


def _dtype(values: _Values, path: str) -> str | None:
    name = values.get(path)
    if name is None:
        return None
    if not isinstance(name, str) or name not in _DTYPES:
        raise ConfigError(f"{path} is {name!r}; it must be one of {', '.join(_DTYPES)}.")
    return _DTYPES[name]


def _set_table(plan: dict[str, Any], values: _Values, notes: list[Note]) -> None:
    stage = values.get("zero_optimization.stage")
    if not isinstance(stage, int) or stage not in _PRESETS:
        raise ConfigError(f"zero_optimization.stage is {stage!r}; it must be 0, 1, 2 or 3.")
    plan["preset"] = _PRESETS[stage]
    if stage == 3:
        threshold = values.number("zero_optimization.stage3_param_persistence_threshold")
        plan["resident_below"] = int(threshold)
        if values.is_given("zero_optimization.stage3_prefetch_bucket_size"):
            elements = values.number("zero_optimization.stage3_prefetch_bucket_size")
            plan["prefetch_bytes"] = int(elements * _NUM_BYTES[plan.get("precision", "fp32")])
    _set_offload(plan, values, stage, notes)


def _set_offload(plan: dict[str, Any], values: _Values, stage: int, notes: list[Note]) -> None:
    optim = _tier(values, "offload_optimizer", "cpu_offload")
    param = _tier(values, "offload_param", "cpu_offload_param")
    ratio = values.number("zero_optimization.offload_optimizer.ratio")
    if param is not None and stage < 3:
        notes.append(Note("zero_optimization.offload_param", FieldStatus.NOT_NEEDED, _WHOLE_PARAMS))
        param = None
    if optim is None and param is None:
        return
    if stage == 0:
        raise ConfigError("zero_optimization.offload_optimizer needs stage 1, 2 or 3, but stage is 0.")
    if optim is None:
        notes.append(Note("zero_optimization.offload_param", FieldStatus.HONOURED, _STATES_TOO))
        optim = "host"
    if ratio < 1 and "disk" in (optim, param):
        section = "offload_optimizer" if optim == "disk" else "offload_param"
        raise ConfigError(
            f"zero_optimization.offload_optimizer.ratio is {ratio:g}, and {section}.device is nvme. A share is "
            f"supported only if both are offloaded to the cpu. To offload a part to disk, use a shardwise plan with "
            f"offload: {{optim: {ratio:g}, optim_disk: {ratio:g}}}."
        )
    if ratio < 1:
        plan["offload"] = {"optim": float(ratio), "param": float(ratio) if param else 0.0}
        return
    _edit(plan, "optim", tier=optim)
    if stage > 1 or optim == "disk":
        _edit(plan, "grad", tier="host")
    if param is not None:
        _edit(plan, "param", tier=param)
    if "disk" in (optim, param):
        sections = ("offload_optimizer", "offload_param")
        folders = {values.get(f"zero_optimization.{section}.nvme_path") for section in sections} - {None}
        if len(folders) != 1:
            raise ConfigError(
                f"offload to nvme needs one nvme_path, but there are {len(folders)}: "
                f"{', '.join(sorted(map(str, folders))) or 'none'}."
            )
        plan["disk"] = str(folders.pop())


def _tier(values: _Values, section: str, deprecated: str) -> str | None:
    """The tier for a section's `device`: `host`, `disk`, or `None` without offload."""
    path = f"zero_optimization.{section}.device"
    device = values.get(path)
    if values.get(f"zero_optimization.{deprecated}"):
        device = "cpu" if device == "none" else device
    tiers = {"none": None, None: None, "cpu": "host", "nvme": "disk"}
    if not isinstance(device, str | None) or device not in tiers:
        raise ConfigError(f"{path} is {device!r}; it must be none, cpu or nvme.")
    return tiers[device]


def _edit(plan: dict[str, Any], row: str, **changes: str) -> None:
    plan.setdefault("rows", {}).setdefault(row, {}).update(changes)


def _stages_of_plain(plan: dict[str, Any], values: _Values) -> int:
    """The pipeline stages into which the config splits a model that is no `PipelineModule`. In them a run of layers
    that is recomputed is a unit of the plan."""
    num_stages = 1 if values.get("pipeline.stages") == "auto" else values.count("pipeline.stages") or 1
    if num_stages == 1:
        return 1
    partition = values.text("pipeline.partition") or "best"
    if partition.lower() not in _BY_SIZE:
        raise ConfigError(
            f"pipeline.partition is {partition!r}, which counts the layers of a PipelineModule. Any other model is "
            f"split by parameters: leave it out. Or list its stages in a shardwise plan: pipeline: {{stages: [[...], "
            f"[...]]}}."
        )
    if values.count_or_0("pipeline.activation_checkpoint_interval"):
        plan["activations"] = "recompute"
    return num_stages


@dataclass(frozen=True)
class _ParallelSizes:
    """The sizes of pipeline, sequence, tensor and data parallelism."""

    stages: int
    sequence: int
    tensor: int
    replicas: int

    @classmethod
    def of(cls, values: _Values, stages: int, world_size: int) -> _ParallelSizes:
        tensor = max(values.count(f"tensor_parallel.{name}") or 1 for name in ("tp.tp_size", "autotp_size"))
        sequence = values.count("sequence_parallel_size") or 1
        if world_size % (tensor * sequence * stages):
            raise ConfigError(
                f"The number of ranks, {world_size}, is not a multiple of tensor_parallel ({tensor}) times "
                f"sequence_parallel_size ({sequence}) times stages ({stages})."
            )
        return cls(stages, sequence, tensor, world_size // (tensor * sequence * stages))


def _set_mesh(plan: dict[str, Any], values: _Values, sizes: _ParallelSizes) -> None:
    mics = int(values.number("zero_optimization.mics_shard_size"))
    hpz = int(values.number("zero_optimization.zero_hpz_partition_size"))
    if mics > 1 and hpz > 1:
        raise ConfigError(
            "mics_shard_size and zero_hpz_partition_size are two ways to shard parameters. Set only one of them."
        )
    data = {"dp": -1}
    if mics > 1 or hpz > 1:
        local = max(mics, hpz)
        if values.get("zero_optimization.stage") != 3:
            raise ConfigError("mics_shard_size and zero_hpz_partition_size need stage 3.")
        if sizes.replicas % local:
            raise ConfigError(
                f"The number of data-parallel ranks, {sizes.replicas}, is not a multiple of "
                f"{'mics_shard_size' if mics > 1 else 'zero_hpz_partition_size'} {local}."
            )
        plan["preset"] = "hsdp" if mics > 1 else "hpz"
        data = {"node": -1, "local": local}
    inner = {axis: size for axis, size in (("sp", sizes.sequence), ("tp", sizes.tensor)) if size > 1}
    outer = {"pp": sizes.stages} if sizes.stages > 1 else {}
    if inner or outer or "local" in data:
        plan["mesh"] = {**outer, **data, **inner}


_QUANTIZED = (
    ("param", "weights", "int8"),
    ("frozen", "nontrainable_weights", "int8"),
    ("grad", "gradients", "int4"),
)
"""What ZeRO++ sends in fewer bits: its key in `wire`, the end of its field, and as what it is sent."""
_FEEDBACK = {"err_beta": "beta", "reset_T": "reset"}


def _set_codes(plan: dict[str, Any], values: _Values, notes: list[Note]) -> None:
    """ZeRO++'s quantized weights and gradients, between hosts where the config says where these are, and LoCo's
    feedback of what the latter lose. Frozen weights also rest so, but where they rest off the device."""
    for kind, what, dtype in _QUANTIZED:
        path = f"zero_optimization.zero_quantized_{what}"
        if not values.flag(path):
            continue
        if values.get("zero_optimization.stage") != 3:
            notes.append(Note(path, FieldStatus.NOT_NEEDED, "DeepSpeed uses it in stage 3 only"))
            continue
        if kind == "frozen" and not plan.get("rows", {}).get("param"):
            plan["storage"] = {"frozen": {"dtype": dtype}}
            continue
        wire: dict[str, Any] = {"dtype": dtype}
        if kind != "grad" and plan["preset"] == "hsdp":
            wire["axes"] = ["local"]  # of hosts, where MiCS gathers
        plan.setdefault("wire", {})[kind] = wire
    _set_feedback(plan, values, notes)


def _set_feedback(plan: dict[str, Any], values: _Values, notes: list[Note]) -> None:
    path = "zero_optimization.zeropp_loco_param"
    asked = values.get(path)
    if asked is None:
        return
    if not isinstance(asked, Mapping) or set(asked) - set(_FEEDBACK):
        raise ConfigError(f"{path} is {json.dumps(asked)}; it must be an object with err_beta and reset_T.")
    if "grad" not in plan.get("wire", {}):
        notes.append(Note(path, FieldStatus.NOT_NEEDED, "DeepSpeed uses it with zero_quantized_gradients only"))
        return
    if plan.get("precision") == "fp16":
        raise ConfigError(
            f"{path} is given, and fp16 is enabled, whose loss scale changes: what codes have lost would be added to "
            f"gradients of another scale. Enable bf16 in its place, or leave out zeropp_loco_param."
        )
    plan["wire"]["feedback"] = {key: asked.get(name, values.get(f"{path}.{name}")) for name, key in _FEEDBACK.items()}


def read_elasticity(source: Mapping[str, Any] | str | Path) -> Elasticity:
    """The `elasticity` section of a config. Raises `ConfigError` for values that cannot be."""
    section = load_config(source).get("elasticity", {})
    return _elasticity(_classified({"elasticity": section}, {})[0])


def _elasticity(values: _Values) -> Elasticity:
    sizes = values.get("elasticity.micro_batch_sizes")
    if not isinstance(sizes, list) or not all(type(size) is int for size in sizes):
        raise ConfigError(f"elasticity.micro_batch_sizes is {sizes!r}; it must be a list of integers.")
    counts = {
        name: values.count(f"elasticity.{name}") or 1
        for name in ("max_train_batch_size", "min_gpus", "max_gpus", "num_gpus_per_node", "model_parallel_size")
    }
    larger = values.flag("elasticity.prefer_larger_batch")
    version = float(values.number("elasticity.version"))
    return Elasticity(micro_batch_sizes=tuple(sizes), version=version, prefer_larger_batch=larger, **counts)


def _elastic_batches(values: _Values, replicas: int) -> tuple[int, int]:
    """As `_batches`, with the `elasticity` section: the batch is one that many numbers of ranks can share."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    given = [name for name in names if values.count(name) is not None]
    if given and not values.flag("elasticity.ignore_non_elastic_batch_info"):
        raise ElasticityConfigError(
            f"Both elasticity and {' and '.join(given)} set the batch size. Remove {' and '.join(given)}, or set "
            f"elasticity: {{ignore_non_elastic_batch_info: true}}."
        )
    wish = _elasticity(values)
    shared = elastic_batch(wish, replicas)
    micro = shared.micro_batch(replicas, wish.micro_batch_sizes, prefer_larger=wish.prefer_larger_batch)
    return micro, shared.batch // (micro * replicas)


def _batches(values: _Values, replicas: int) -> tuple[int, int]:
    """Samples per micro-batch and micro-batches per step. Any two of DeepSpeed's three numbers give the third."""
    if values.flag("elasticity.enabled"):
        return _elastic_batches(values, replicas)
    whole = values.count("train_batch_size")
    micro = values.count("train_micro_batch_size_per_gpu")
    steps = values.count("gradient_accumulation_steps")
    if whole is None:
        return micro or 1, steps or 1
    if whole % replicas:
        raise ConfigError(
            f"train_batch_size {whole} is not a multiple of the number of data-parallel ranks, {replicas}."
        )
    each = whole // replicas
    if micro is None and steps is None:
        return each, 1
    known = micro or steps
    assert known is not None
    other, is_even = each // known, each % known == 0
    found = (micro, steps or other) if micro is not None else (other, known)
    if not is_even or found[0] * found[1] != each:
        raise ConfigError(
            f"train_batch_size {whole} is not train_micro_batch_size_per_gpu ({micro}) times "
            f"gradient_accumulation_steps ({steps}) times {replicas} data-parallel ranks. Remove one of the three."
        )
    return found
