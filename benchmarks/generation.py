"""Tokens a second of a model that rests on a disk or on the host, beside what the disk alone allows.

A Llama with random weights generates with all of it on the device, streamed from the host, and streamed from the disk
of `--folder`, in turns with reading its bytes from that disk and nothing else. For each batch size: how long a token
takes, over the longer of computing it (the model on the device) and reading the model.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from torch import nn

import shardwise as sw
from benchmarks.machine import header
from benchmarks.neighbours import Neighbours
from benchmarks.results_file import write_result
from benchmarks.show import show_figures
from benchmarks.tiers import read_through
from shardwise.system.disk import BufferPool, IoQueue, TierFolder
from shardwise.system.machine import num_cores
from shardwise.system.units import format_bytes

BATCHES = (1, 8, 32)
NUM_TOKENS, PROMPT = 6, 8
VOCAB = 1024


def main(args: argparse.Namespace, console: Console) -> int:
    """Exit status 1 if what is streamed from the disk comes to other tokens."""
    rounds = args.rounds or (1 if args.quick else 3)
    torch.set_num_threads(num_cores())
    torch.manual_seed(0)
    model = _llama(256, 4) if args.quick else _llama(768, 8)
    neighbours = Neighbours()
    num_bytes = sum(param.nbytes for param in model.parameters())
    result: dict[str, Any] = header(args.note) | {"benchmark": "generation", "rounds": rounds, "bytes": num_bytes}
    with ExitStack() as stack:
        engines = {
            way: stack.enter_context(_engine(model, way, Path(args.folder))) for way in ("device", "host", "disk")
        }
        result["batches"] = [_race(engines, batch, rounds, Path(args.folder), num_bytes) for batch in BATCHES]
    result["batch_that_hides_reads"] = batch_that_hides_reads(result["batches"])
    result["others_cores"] = neighbours.cores()
    file = write_result(args.out / "generation.json", result)
    _show(result, console)
    console.print(f"\n{file}", markup=False)
    return 0 if all(race["same_tokens"] for race in result["batches"]) else 1


def _llama(width: int, num_layers: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM  # an optional library, and slow to import

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=num_layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model.requires_grad_(False).train(mode=False)


def _engine(model: nn.Module, way: str, folder: Path) -> sw.Engine:
    below = {"param": {"tier": way}, "optim": {"tier": way}, "grad": {"tier": "host"}}
    rows = {} if way == "device" else {"rows": below, "disk": str(folder / "shardwise-bench-generation")}
    return sw.shard(copy.deepcopy(model), {"preset": "zero3", **rows})


def _race(engines: dict[str, sw.Engine], batch: int, rounds: int, folder: Path, num_bytes: int) -> dict[str, Any]:
    """Seconds a token, by way, and of reading the model; in turns."""
    prompt = torch.randint(0, VOCAB, (batch, PROMPT))
    said: dict[str, torch.Tensor] = {}
    place, queue = TierFolder(folder), IoQueue()
    times: dict[str, list[float]] = {way: [] for way in ("read", *engines)}
    try:
        file = place.create("bench", num_bytes, queue)
        pool = BufferPool(2, min(2**24, file.num_bytes))
        buffers = [pool.take(), pool.take()]
        for first in range(0, file.num_bytes, pool.buffer_bytes):  # what was never written is not read from the disk
            file.write(first, buffers[0][: file.num_bytes - first]).wait()
        with ExitStack() as inside:
            for engine in engines.values():
                inside.enter_context(engine.inference())
            for number in range(rounds + 1):
                _note(times["read"], number, partial(read_through, file, buffers))
                for way, engine in engines.items():
                    said[way] = _note(times[way], number, partial(_generate, engine, prompt), NUM_TOKENS)
    finally:
        place.close()
        queue.close()
    same = all(torch.equal(tokens, said["device"]) for tokens in said.values())
    return {"batch": batch, "seconds_per_token": times, "same_tokens": same, "over_least": _over_least(times)}


def _note(times: list[float], number: int, call: Callable[[], Any], parts: int = 1) -> Any:
    started = time.perf_counter()
    found = call()
    if number:  # a first round is not timed
        times.append((time.perf_counter() - started) / parts)
    return found


def _generate(engine: sw.Engine, prompt: torch.Tensor) -> torch.Tensor:
    settings: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    mask = torch.ones_like(prompt)
    model: Any = engine.module
    tokens: torch.Tensor = model.generate(prompt, attention_mask=mask, max_new_tokens=NUM_TOKENS, **settings)
    return tokens


def _over_least(times: dict[str, list[float]]) -> float:
    """A token from the disk over the longer of computing it and reading the model, which no overlap can undercut."""
    return median(
        disk / max(read, device)
        for disk, read, device in zip(times["disk"], times["read"], times["device"], strict=True)
    )


def batch_that_hides_reads(races: list[dict[str, Any]]) -> float | None:
    """The batch at which computing a token takes as long as reading the model, by the line through the smallest and
    the largest batch; `None` if computing takes no longer with more."""
    few, many = races[0], races[-1]
    read = median(time for race in races for time in race["seconds_per_token"]["read"])
    least, most = (median(race["seconds_per_token"]["device"]) for race in (few, many))
    per_sample = (most - least) / (many["batch"] - few["batch"])
    return None if per_sample <= 0 else max(1.0, few["batch"] + (read - least) / per_sample)


def _show(result: dict[str, Any], console: Console) -> None:
    others = f"; others used {result['others_cores']:.1f} cores" if result["others_cores"] else ""
    rows = []
    for race in result["batches"]:
        seconds = {way: median(times) for way, times in race["seconds_per_token"].items()}
        rate = [f"{race['batch'] / seconds[way]:.1f}" for way in ("device", "host", "disk")]
        allowed = f"{race['batch'] / seconds['read']:.1f}"
        rows.append([str(race["batch"]), *rate, allowed, f"{race['over_least']:.2f}"])
    title = f"tokens a second, {format_bytes(result['bytes'])} of parameters{others}"
    show_figures(title, ["batch", "device", "host", "disk", "disk allows", "time over least"], rows, console)
    batch = result["batch_that_hides_reads"]
    if batch is not None:
        console.print(f"Computing a token takes as long as reading the model at a batch of about {batch:.0f}.")
