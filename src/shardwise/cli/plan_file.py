"""`shardwise convert ds_config.json plan.yaml`: a DeepSpeed config as a plan, with a report on each of its fields."""

from __future__ import annotations

import argparse
from pathlib import Path

import yaml

from shardwise.cli.console import SafeConsole
from shardwise.errors import ConfigError
from shardwise.integrations.deepspeed.config import TranslatedConfig, read_config


def run(args: argparse.Namespace) -> int:
    reading = read_config(args.source, world_size=args.world)
    text = _yaml_of(reading, args.source, args.world)
    if args.dry_run:
        print(text, end="")
    else:
        _write_new(args.out, text)
        print(f"{args.out}: written. `shardwise explain {args.out} --world {args.world}` shows what it does.")
    if report := reading.report(monitors_by="set run and trackers in the plan, and call engine.log"):
        SafeConsole(stderr=True).print(report, highlight=False, soft_wrap=True)
    return 0


def _yaml_of(reading: TranslatedConfig, source: Path, num_ranks: int) -> str:
    samples = f"{reading.micro_batch} samples per micro-batch and rank, {reading.global_batch} per step"
    lines = [f"# From {source.name}: {samples} on {num_ranks} ranks."]
    for what, named in (("optimizer", reading.optimizer), ("scheduler", reading.scheduler)):
        if named is not None:
            values = ", ".join(f"{key}={value!r}" for key, value in named.params.items())
            lines.append(f"# Create the {what} in the script: {named.name}({values}).")
    return "\n".join(lines) + "\n" + yaml.safe_dump(reading.plan, sort_keys=False)


def _write_new(path: Path, text: str) -> None:
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise ConfigError(f"{path} already exists. Name a new file, or use --dry-run to print the plan.") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}.") from error
