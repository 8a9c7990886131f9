"""One rank of `generation`: engines that generate the same tokens with a model that is sharded over ranks, in turns."""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.figures import write_figures
from benchmarks.generation import DEEPSPEED, KEEPS, UNSHARDED, build_llama, generate, prompt_of
from benchmarks.schedule import interleaved
from shardwise import World, shard

NUM_WARM = 3
"""Tokens before each turn, in which ranks meet and orders are learned."""
Say = Callable[[int], Tensor]
Way = Callable[[int], tuple[float, Tensor]]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    with write_figures(args.out) as figures, World.join() as world, ExitStack() as stack:
        model = build_llama(quick=args.quick)
        ways = _ways(model, world, stack)
        deepspeed = _deepspeed(model, figures)
        if deepspeed is not None:
            ways[DEEPSPEED] = deepspeed
        figures["said"], figures["seconds_per_token"] = {}, {name: [] for name in ways}
        for _, name in interleaved(list(ways), args.rounds):
            seconds, said = ways[name](args.tokens)
            figures["seconds_per_token"][name].append(seconds)
            figures["said"].setdefault(name, said.tolist())
        dist.barrier()


def _ways(model: nn.Module, world: World, stack: ExitStack) -> dict[str, Way]:
    prompt = prompt_of(1, seed=world.rank)
    sharded = copy.deepcopy(model)
    engine = stack.enter_context(shard(sharded, "zero3", world=world))
    whole = engine.inference_bytes()

    def ours(share: float, num_tokens: int) -> tuple[float, Tensor]:
        with engine.inference(int(share * whole)):
            return _timed(lambda num: generate(sharded, prompt, num), num_tokens)

    def plain(num_tokens: int) -> tuple[float, Tensor]:
        return _timed(lambda num: generate(model, prompt, num), num_tokens)

    return {UNSHARDED: plain, **{name: partial(ours, share) for name, share in KEEPS.items()}}


def _deepspeed(model: nn.Module, figures: dict[str, Any]) -> Way | None:
    """ZeRO-3 as its documentation has it for inference: no optimizer, parameters gathered by its hooks."""
    try:
        import deepspeed as ds
    except ImportError as error:
        figures["without"] = str(error)
        return None
    ds.ops.__compatible_ops__ = {}  # see `engines.deepspeed`
    ds.init_distributed("gloo", verbose=False)
    largest = sum(param.numel() for param in model.model.layers[0].parameters())  # type: ignore[union-attr, index]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": 2**31,
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "stage3_prefetch_bucket_size": largest,
            "stage3_param_persistence_threshold": 10 * model.config.hidden_size,  # type: ignore[union-attr, operator]
        },
    }
    engine, *_ = ds.initialize(model=copy.deepcopy(model), config=config)
    engine.module.eval()
    prompt = prompt_of(1, seed=dist.get_rank())
    return lambda num_tokens: _timed(lambda num: generate(engine.module, prompt, num, synced_gpus=True), num_tokens)


def _timed(say: Say, num_tokens: int) -> tuple[float, Tensor]:
    """Seconds a token on this rank, after a few that are not counted, and what was said."""
    say(NUM_WARM)
    dist.barrier()
    started = time.perf_counter()
    said = say(num_tokens)
    seconds = (time.perf_counter() - started) / num_tokens
    dist.barrier()
    return seconds, said


if __name__ == "__main__":
    main()
