"""Tokens a second of a model that is sharded over ranks, or rests on a disk or on the host.

On two ranks, each of which generates with its own prompt, in turns (`generation_rank.py`): the unsharded model, ours
with all units kept whole, half and none, and DeepSpeed's ZeRO-3.

On one, in turns with reading its bytes from the disk of `--folder` and nothing else: a Llama with random weights with
all of it on the device, streamed from the host, and streamed from that disk. For each batch size: how long a token
takes, over the longer of computing it (the model on the device) and reading the model.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from torch import nn

import shardwise as sw
from benchmarks.fresh import run_ranks
from benchmarks.machine import header
from benchmarks.results_file import write_result
from benchmarks.show import show_figures
from benchmarks.tiers import read_through
from shardwise.system.disk import BufferPool, IoQueue, TierFolder
from shardwise.system.machine import num_cores
from shardwise.system.neighbours import Neighbours
from shardwise.system.units import format_bytes

UNSHARDED, DEEPSPEED = "unsharded", "deepspeed-3"
KEEPS = {"all kept": 1.0, "half kept": 0.5, "none kept": 0.0}
"""By name, the share of the model that each rank keeps whole."""
NUM_RANKS = 2
BATCHES = (1, 8, 32)
NUM_TOKENS, PROMPT = 6, 8
VOCAB = 1024


def main(args: argparse.Namespace, console: Console) -> int:
    """Exit status 1 if what is sharded, or streamed from the disk, comes to other tokens."""
    rounds = args.rounds or (1 if args.quick else 3)
    torch.set_num_threads(num_cores())
    model = build_llama(quick=args.quick)
    num_bytes = sum(param.nbytes for param in model.parameters())
    result: dict[str, Any] = header(args.note) | {"benchmark": "generation", "rounds": rounds, "bytes": num_bytes}
    neighbours = Neighbours()
    result["ranks"] = _race_of_ranks(rounds, quick=args.quick)
    _show_ranks(result, console)
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
    return 0 if all(race["same_tokens"] for race in (result["ranks"], *result["batches"])) else 1


def _race_of_ranks(rounds: int, *, quick: bool) -> dict[str, Any]:
    """Seconds a token, by way, of the slower rank in each round; and the medians of tokens a second over those of the
    unsharded model, and of DeepSpeed, in the same round."""
    options = [f"--rounds={rounds}", f"--tokens={4 if quick else 16}", *(["--quick"] if quick else [])]
    told = run_ranks("benchmarks.generation_rank", options, num_ranks=NUM_RANKS, timeout_seconds=900)
    times = slowest([one["seconds_per_token"] for one in told])
    same = all(said == one["said"][UNSHARDED] for one in told for said in one["said"].values())
    return {
        "seconds_per_token": times,
        "rates_over": {peer: rates_over(times, peer) for peer in (UNSHARDED, DEEPSPEED) if peer in times},
        "without": told[0].get("without", ""),
        "same_tokens": same,
    }


def slowest(ranks: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """By way, for each round the time of the slowest rank."""
    return {way: list(map(max, *(rank[way] for rank in ranks))) for way in ranks[0]}


def rates_over(times: Mapping[str, Sequence[float]], peer: str) -> dict[str, float]:
    """How many times as many tokens a second as `peer`: the median over rounds."""
    return {
        way: median(theirs / own for own, theirs in zip(seconds, times[peer], strict=True))
        for way, seconds in times.items()
        if way != peer
    }


def build_llama(*, quick: bool) -> nn.Module:
    """The same on all ranks."""
    torch.manual_seed(0)
    return _llama(256, 4) if quick else _llama(768, 8)


def prompt_of(batch: int, seed: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (batch, PROMPT), generator=torch.Generator().manual_seed(seed))


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
    prompt = prompt_of(batch, seed=0)
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
                    said[way] = _note(
                        times[way], number, partial(generate, engine.module, prompt, NUM_TOKENS), NUM_TOKENS
                    )
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


def generate(model: Any, prompt: torch.Tensor, num_tokens: int, **more: Any) -> torch.Tensor:
    """Greedily, `num_tokens` to each row of the prompt."""
    settings: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, **more}
    mask = torch.ones_like(prompt)
    tokens: torch.Tensor = model.generate(prompt, attention_mask=mask, max_new_tokens=num_tokens, **settings)
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


def _show_ranks(result: dict[str, Any], console: Console) -> None:
    ranks = result["ranks"]
    rows = []
    for way, times in ranks["seconds_per_token"].items():
        over = [f"{each[way]:.2f}" if way in each else "" for each in ranks["rates_over"].values()]
        rows.append([way, f"{NUM_RANKS / median(times):.1f}", *over])
    title = f"tokens a second, {NUM_RANKS} ranks, {format_bytes(result['bytes'])} of parameters"
    show_figures(title, ["way", "tokens/s", *(f"x {peer}" for peer in ranks["rates_over"])], rows, console)
    if ranks["without"]:
        console.print(f"Without {DEEPSPEED}: {ranks['without']}", markup=False)


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
