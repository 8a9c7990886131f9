"""DeepSpeed's `--autotuning tune|run`: the ZeRO stage and the micro-batch, found by a search instead of trial jobs.

The launcher starts the script once (`cli/deepspeed.py`). When its first forward that trains begins, the model and what
it is called with are known: rank 0 predicts a step of each stage and size, and writes the results where DeepSpeed does;
then all ranks end. With `run` the launcher starts the script again with the config that was found.

[Note: what is tuned] As with DeepSpeed, the stage where the config sets none, or `"auto"`, and the micro-batch where it
is not a number. All sizes are tried that are powers of two times the least one, up to the first that fits under no
stage. A `train_batch_size` that is a number stays, and accumulation follows; otherwise accumulation is the config's.
"""

from __future__ import annotations

import inspect
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shardwise as sw
from shardwise.comm.agreed import agreed
from shardwise.errors import CommError, ConfigError, ModelError, ShardwiseError, StateError
from shardwise.fit.candidates import Candidate
from shardwise.fit.equal_blocks import without_values
from shardwise.fit.foreseen import updates_of
from shardwise.fit.hardware_here import hardware_here, with_ranks_of
from shardwise.fit.model_subject import ModelSubject
from shardwise.fit.search import DEVICE_SHARE, HOST_SHARE, Evaluated, Limits
from shardwise.integrations.deepspeed.config import TranslatedConfig, load_config, read_config
from shardwise.integrations.deepspeed.fields import AUTOTUNING
from shardwise.system.machine import memory_here
from shardwise.system.own_hooks import hook
from shardwise.system.units import format_bytes, format_seconds

VARIABLE = "SHARDWISE_AUTOTUNING"
"""Set in ranks of a job that is only started to be looked at."""
OPTIMAL, SUMMARY, TRIED = "ds_config_optimal.json", "summary.txt", "ds_config.json"
MICRO, STEPS, WHOLE = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"
METRICS = ("throughput", "latency", "flops")
_OPTIMIZERS = ("adam", "adamw", "sgd", "lion", "lamb", "adafactor", "muon")
"""Those of `OPTIMIZERS` that any stage of ZeRO can shard, by the names of their classes."""


@dataclass(frozen=True)
class Settings:
    """The section `autotuning` of a config."""

    results: Path
    experiments: Path
    overwrite: bool
    metric: str
    most_tried: int
    batch_sizes: tuple[int, int | None]
    """The least and the most samples of a step on all ranks."""
    micro_sizes: tuple[int, int]
    arguments: Mapping[str, str]
    """The script's argument for a field of the config."""
    notes: tuple[str, ...]

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Settings:
        """Raises `ConfigError` for values that cannot be."""
        section = config.get("autotuning") or {}
        if not isinstance(section, Mapping):
            raise ConfigError(f"autotuning is {section!r:.40}; it must be an object.")
        unknown = [f"autotuning.{name}: DeepSpeed 0.19 has no such field" for name in section if name not in AUTOTUNING]
        given = {name: section.get(name, default) for name, (default, _) in AUTOTUNING.items()}
        notes = [f"autotuning.{name}: {why}" for name, (_, why) in AUTOTUNING.items() if why and name in section]

        def count(name: str) -> int:
            value = given[name]
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"autotuning.{name} is {value!r}; it must be an integer of at least 1.")
            return value

        if given["metric"] not in METRICS:
            raise ConfigError(f"autotuning.metric is {given['metric']!r}; it must be one of {', '.join(METRICS)}.")
        mapped = given["arg_mappings"] or {}
        if not isinstance(mapped, Mapping) or not all(isinstance(one, str) for one in (*mapped, *mapped.values())):
            raise ConfigError("autotuning.arg_mappings must be an object: fields of the config, and script arguments.")
        most = None if given["max_train_batch_size"] is None else count("max_train_batch_size")
        return cls(
            Path(given["results_dir"] or "autotuning_results"),
            Path(given["exps_dir"] or "autotuning_exps"),
            bool(given["overwrite"]),
            given["metric"],
            count("tuner_num_trials"),
            (count("min_train_batch_size"), most),
            (count("min_train_micro_batch_size_per_gpu"), count("max_train_micro_batch_size_per_gpu")),
            {name.strip(): argument for name, argument in mapped.items()},
            (*unknown, *notes),
        )


@dataclass(frozen=True)
class Tried:
    """One stage and micro-batch: a candidate, and what it has in common with others. `found` is why not, if it is
    impossible."""

    stage: int
    candidate: Candidate
    base: sw.Plan
    num_replicas: int
    found: Evaluated | ShardwiseError
    limits: Limits

    @property
    def micro_batch(self) -> int:
        return self.candidate.rows

    @property
    def accumulate(self) -> int:
        return self.candidate.accumulate

    @property
    def name(self) -> str:
        return f"z{self.stage}_gas{self.accumulate}_tmbspg{self.micro_batch}"

    @property
    def batch_size(self) -> int:
        return self.micro_batch * self.accumulate * self.num_replicas

    @property
    def fits(self) -> bool:
        return isinstance(self.found, Evaluated) and self.found.fits(self.limits)

    def value(self, metric: str) -> float:
        """More is better: samples a second, the negative seconds of a step, or the share of the peak FLOP rate."""
        assert isinstance(self.found, Evaluated)
        seconds = self.found.seconds
        return {"throughput": self.batch_size / seconds, "latency": -seconds, "flops": self.found.mfu}[metric]

    def config(self, source: Mapping[str, Any]) -> dict[str, Any]:
        """`source` with this stage and batch."""
        kept = {name: value for name, value in source.items() if name != "autotuning"}
        zero = source.get("zero_optimization")
        return {
            **kept,
            "zero_optimization": {**(zero if isinstance(zero, Mapping) else {}), "stage": self.stage},
            MICRO: self.micro_batch,
            STEPS: self.accumulate,
            WHOLE: self.batch_size,
        }

    def __str__(self) -> str:
        head = f"stage {self.stage}, micro-batch {self.micro_batch} x {self.accumulate}"
        if not isinstance(self.found, Evaluated):
            return f"{head}: {self.found}"
        device, host = self.found.over(self.limits)
        over = f", {format_bytes(max(device, host))} too much" if max(device, host) > 0 else ""
        rate = f"{self.batch_size / self.found.seconds:.3g} samples/s"
        held = f"{format_bytes(self.found.device_bytes)} of a device{over}"
        return f"{head}: {format_seconds(self.found.seconds)} a step, {rate}, {held}"


class Tuner:
    """Ends this job when its first forward that trains begins, with the stage and micro-batch found for it."""

    def __init__(
        self,
        config: Mapping[str, Any],
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        auto: Mapping[str, Any] | None = None,
    ) -> None:
        """`model` is not sharded yet. `auto` has values for other fields that are `"auto"`: see `read_config`. All
        ranks call. Raises `ConfigError` for a config with pipeline stages."""
        section = config.get("pipeline")
        stages = section.get("stages") if isinstance(section, Mapping) else None
        if isinstance(stages, int) and stages > 1:
            raise ConfigError(
                f"--autotuning is not for a model in pipeline stages, and the config has pipeline.stages {stages}. "
                f"Leave them out, or use shardwise plan --axes pp."
            )
        self._config, self._twin, self._auto = config, without_values(model), auto or {}
        self._name = _counted_as(optimizer)

    def watch(self, model: nn.Module, world: sw.World) -> None:
        """`model` is, by now."""

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if torch.is_grad_enabled():
                handle.remove()
                self._end(world, _named(model, args, kwargs))

        handle = model.register_forward_pre_hook(hook(before), prepend=True, with_kwargs=True)

    def _end(self, world: sw.World, batch: object) -> None:
        with agreed(world, "autotuning", ConfigError, worded=lambda failure: f"autotuning: {failure.text}"):
            if world.rank == 0:
                self._write(tuned(self._twin, batch, self._config, world, self._name, self._auto))
        raise SystemExit(0)

    def _write(self, every: Sequence[Tried]) -> None:
        settings = Settings.of(self._config)
        best = best_of(every, settings.metric)
        if not every:
            raise ConfigError("the bounds of batch sizes in the section autotuning leave none to be tried.")
        if best is None:
            raise ConfigError("no stage and micro-batch fits:\n" + "\n".join(f"  {one}" for one in every))
        for one in every:
            _write_json(settings.experiments / one.name / TRIED, one.config(self._config))
        _write_json(settings.results / OPTIMAL, best.config(self._config))
        lines = [f"autotuning, by {settings.metric} as predicted, on {world_words(best)}"]
        lines += [("* " if one is best else "  ") + str(one) for one in every]
        (settings.results / SUMMARY).write_text("\n".join(lines) + "\n", encoding="utf-8")
        print("\n".join(["shardwise: " + lines[0], *lines[1:], f"written to {settings.results / OPTIMAL}"]), flush=True)


def _counted_as(optimizer: object) -> str | None:
    """The key of `OPTIMIZERS` whose states `optimizer` has; `None` if there is none, and two states are counted."""
    name = type(optimizer).__name__.lower()
    if name == "sgd" and any(group["momentum"] for group in getattr(optimizer, "param_groups", ())):
        return "momentum"
    return name if name in _OPTIMIZERS else None


def _named(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
    """What `model` is called with, as a tuple or by name."""
    if not kwargs:
        return args
    return {**dict(zip(inspect.signature(model.forward).parameters, args, strict=False)), **kwargs}


def best_of(every: Sequence[Tried], metric: str) -> Tried | None:
    return max((one for one in every if one.fits), key=lambda one: one.value(metric), default=None)


def world_words(one: Tried) -> str:
    return f"{one.num_replicas} data-parallel ranks, {format_bytes(one.limits.device_bytes)} of each device"


def first_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the job that is only started to be looked at: of the last stage, which needs the least memory."""
    sizes = {name: value for name, value in config.items() if name not in (MICRO, STEPS, WHOLE)}
    kept = {name: config[name] for name in (MICRO, STEPS) if isinstance(config.get(name), int)}
    zero = config.get("zero_optimization")
    zero = dict(zero) if isinstance(zero, Mapping) else {}
    return {**sizes, **kept, "zero_optimization": {**zero, "stage": _stages(config)[-1]}}


def tuned(
    model: nn.Module,
    batch: object,
    config: Mapping[str, Any],
    world: sw.World,
    optimizer: str | None,
    auto: Mapping[str, Any],
) -> list[Tried]:
    """A step of `model`, without values, for each stage and micro-batch: see [Note: what is tuned]. `batch` is what it
    is called with. Asks no other rank."""
    settings = Settings.of(config)
    num_local = min(world.size, world.local_size or world.size)
    machine = with_ranks_of(hardware_here(world), world)
    limits = _limits(world, num_local)
    updates = None if optimizer is None else updates_of(model, optimizer)
    on_cpu = world.device.type == "cpu"
    subject: ModelSubject | None = None
    every: list[Tried] = []
    for micro_batch in _micro_sizes(config, settings):
        of_size: list[Tried] = []
        for stage, read in _translated(config, settings, micro_batch, world.size, auto):
            if len(every) + len(of_size) >= settings.most_tried:
                break
            base = sw.load_plan(read.plan)
            subject = subject or ModelSubject(model, batch, machine, 1, base, updates, on_cpu=on_cpu)
            base = base.model_copy(update={"precision": subject.base.precision})
            candidate = _candidate(base, micro_batch, read.accumulate, world.size)
            found = _evaluated(subject, base, candidate, is_exact=False)
            of_size.append(Tried(stage, candidate, base, read.num_replicas, found, limits))
        every += of_size
        if of_size and not any(one.fits for one in of_size):
            break
    while subject is not None and (best := best_of(every, settings.metric)) is not None:
        if isinstance(best.found, Evaluated) and best.found.is_exact:
            break
        found = _evaluated(subject, best.base, best.candidate, is_exact=True)
        every[every.index(best)] = replace(best, found=found)
    return every


def _translated(
    config: Mapping[str, Any], settings: Settings, micro_batch: int, world_size: int, auto: Mapping[str, Any]
) -> Iterator[tuple[int, TranslatedConfig]]:
    """By stage, but for those that these batch sizes or the config's other fields exclude. Raises `ConfigError` if the
    fields exclude all."""
    errors = []
    for stage in _stages(config):
        try:
            sized = _sized(config, stage, micro_batch)
            read = read_config(sized, world_size=world_size, auto=auto, may_sum=True)
        except ConfigError as error:
            errors.append(error)
            continue
        if _is_allowed(read.global_batch, settings):
            yield stage, read
    if len(errors) == len(_stages(config)) and micro_batch == settings.micro_sizes[0]:
        raise errors[-1]


def _candidate(base: sw.Plan, micro_batch: int, accumulate: int, world_size: int) -> Candidate:
    mesh = sw.Mesh.of(base.mesh or {"dp": -1}, world_size)
    sizes = tuple(zip(mesh.axes, mesh.sizes, strict=True))
    policy = base.activations.policy or "keep"
    return Candidate(base.preset, sizes, micro_batch, accumulate, policy, precision=base.precision)


def _evaluated(
    subject: ModelSubject, base: sw.Plan, candidate: Candidate, *, is_exact: bool
) -> Evaluated | ShardwiseError:
    subject.rebase(base)
    try:
        return subject.confirm(candidate) if is_exact else subject.evaluate(candidate)
    except (ConfigError, ModelError, CommError, StateError) as error:
        return error


def _stages(config: Mapping[str, Any]) -> tuple[int, ...]:
    zero = config.get("zero_optimization")
    stage = zero.get("stage") if isinstance(zero, Mapping) else None
    offloads = isinstance(zero, Mapping) and any(name in zero for name in ("offload_optimizer", "cpu_offload"))
    return (stage,) if type(stage) is int else (1, 2, 3) if offloads else (0, 1, 2, 3)


def _micro_sizes(config: Mapping[str, Any], settings: Settings) -> Iterator[int]:
    given = config.get(MICRO)
    if type(given) is int:
        yield given
        return
    least, most = settings.micro_sizes
    yield from (least * 2**power for power in range(int(math.log2(max(1, most // least))) + 1))


def _sized(config: Mapping[str, Any], stage: int, micro_batch: int) -> dict[str, Any]:
    """With `train_batch_size`, if it is a number, and accumulation that follows; otherwise the config's."""
    zero = config.get("zero_optimization")
    sized = {name: value for name, value in config.items() if value != "auto" or name not in (MICRO, STEPS, WHOLE)}
    sized |= {"zero_optimization": {**(zero if isinstance(zero, Mapping) else {}), "stage": stage}, MICRO: micro_batch}
    if type(config.get(WHOLE)) is int:
        sized.pop(STEPS, None)
    return sized


def _is_allowed(batch_size: int, settings: Settings) -> bool:
    least, most = settings.batch_sizes
    return batch_size >= least and (most is None or batch_size <= most)


def _limits(world: sw.World, num_local: int) -> Limits:
    host = int(HOST_SHARE * memory_here().total_bytes)
    device = world.rank_device.memory_bytes if world.device.type != "cpu" else None
    return Limits(host // num_local if device is None else int(DEVICE_SHARE * device), host)


def _write_json(path: Path, config: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


# -- the launcher's part ----------------------------------------------------------------------------------

_CONFIG_ARGUMENTS = ("--deepspeed_config", "--deepspeed", "--deepscale_config")


@dataclass(frozen=True)
class TunedJob:
    """A command line that names a config, to be tuned."""

    command: tuple[str, ...]
    place: int
    """Of the word with the config's path."""
    settings: Settings
    config: Mapping[str, Any]

    @classmethod
    def of(cls, command: Sequence[str]) -> TunedJob:
        """Raises `ConfigError` if the script's arguments name no config that can be read."""
        for place, word in enumerate(command):
            name, has_value, value = word.partition("=")
            if name not in _CONFIG_ARGUMENTS:
                continue
            at = place if has_value else place + 1
            path = value if has_value else command[at] if at < len(command) else ""
            if Path(path).is_file():
                config = load_config(path)
                return cls(tuple(command), at, Settings.of(config), config)
        raise ConfigError(
            "--autotuning needs the DeepSpeed config as a file among the script's arguments: --deepspeed_config FILE, "
            "or --deepspeed FILE for Trainer. For a config that the script makes itself: shardwise plan."
        )

    @property
    def is_done(self) -> bool:
        """Whether an earlier result is kept (`overwrite: false`)."""
        return not self.settings.overwrite and self.optimal.is_file()

    @property
    def optimal(self) -> Path:
        return self.settings.results / OPTIMAL

    def begin(self) -> None:
        """Before the job that is looked at."""
        self.optimal.unlink(missing_ok=True)
        os.environ[VARIABLE] = "1"

    def tuned_command(self) -> tuple[str, ...]:
        """After it: the command with the config that was found, and the script's arguments in `arg_mappings`. Raises
        `ConfigError` if it has found none."""
        os.environ.pop(VARIABLE, None)
        if not self.optimal.is_file():
            raise ConfigError(
                "autotuning found no config: the script ended before a forward that trains, under "
                "deepspeed.initialize(), Trainer or Accelerate with this config."
            )
        found = load_config(self.optimal)
        words = list(self.command)
        name, has_value, _ = words[self.place].partition("=")
        words[self.place] = f"{name}={self.optimal}" if has_value and name.startswith("--") else str(self.optimal)
        mappings = dict(self.settings.arguments)
        if "--deepspeed" in (words[self.place - 1], name):  # Trainer's, whose arguments and config must agree
            mappings = {MICRO: "--per_device_train_batch_size", STEPS: f"--{STEPS}", **mappings}
        for field, argument in mappings.items():
            if field in found:
                words = _with_argument(words, argument, found[field])
        return tuple(words)


def _with_argument(words: Sequence[str], argument: str, value: object) -> list[str]:
    kept = list(words)
    for place, word in enumerate(words):
        if word == argument and place + 1 < len(words):
            kept[place + 1] = str(value)
            return kept
        if word.startswith(f"{argument}="):
            kept[place] = f"{argument}={value}"
            return kept
    return [*kept, argument, str(value)]
