"""One rank of `weights`: a sharded Llama, whose weights are copied, in bf16, to where a sampler would have them.

All ways end with the same: every tensor in memory that was there before. A peer's `state_dict` is that of PyTorch's own
documentation for one whole copy, and with DeepSpeed it is what TRL (1.16) does before each generation; what peers have
sent is what the kernel counts of gloo's connections.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

import shardwise as sw
from benchmarks.checkpoint_rank import shared_folder
from benchmarks.figures import write_figures
from benchmarks.llama import Blocks, LlamaSize
from benchmarks.traffic import tcp_sent_bytes
from benchmarks.weights import BESIDE, DEEPSPEED, FSDP2, GATHERED, PUBLISHED, STATE, STATE_ON_ALL, STREAM, STREAM_ON_ALL
from shardwise.system.process_memory import PeakOverBaseline

SIZES = {
    "tiny": LlamaSize(2, 192, 512, 3, 3, 1024, 32, 1),
    "135m": LlamaSize(30, 576, 1536, 9, 3, 49152, 32, 1),  # as SmolLM2-135M
}


class Llama(nn.Module):
    """With an embedding that is the head as well."""

    def __init__(self, size: LlamaSize) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(size.vocab, size.dim)
        self.blocks = Blocks(size)
        self.norm = nn.RMSNorm(size.dim)
        self.lm_head = nn.Linear(size.dim, size.vocab, bias=False)
        self.lm_head.weight = self.embed_tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed_tokens(tokens)
        for layer in self.blocks.layers:
            hidden = layer(hidden, self.blocks.cos, self.blocks.sin)
        logits: Tensor = self.lm_head(self.norm(hidden))
        return logits


def build(size: LlamaSize) -> Llama:
    torch.manual_seed(0)
    return Llama(size)


@dataclass
class Turns:
    """What a way takes on this rank, turn by turn; bytes of one turn, and memory over what the rank had before."""

    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    sent_bytes: int = 0
    peak_bytes: int = 0
    agrees: bool = True


class Sampler:
    """The weights of a sampler, there before anything comes."""

    def __init__(self, model: nn.Module) -> None:
        self.weights = {
            name: torch.zeros(value.shape, dtype=torch.bfloat16) for name, value in model.state_dict().items()
        }
        self.expected = {name: value.bfloat16().double().sum().item() for name, value in model.state_dict().items()}
        del self.weights["lm_head.weight"]

    def receive(self, name: str, tensor: Tensor) -> None:
        self.weights[name].copy_(tensor)

    def take(self, state: Mapping[str, Tensor]) -> None:
        for name, weight in self.weights.items():
            weight.copy_(state[name])

    def has_all(self) -> bool:
        """And forget them, so that the next way has to bring them."""
        agrees = all(weight.double().sum().item() == self.expected[name] for name, weight in self.weights.items())
        for weight in self.weights.values():
            weight.zero_()
        return agrees


def measure(world: sw.World, size: LlamaSize, num_turns: int, folder: Path) -> dict[str, Any]:
    model = build(size)
    sampler, params = Sampler(model), sum(param.numel() for param in model.parameters())
    peer, of_deepspeed = fsdp2(build(size)), deepspeed_3(build(size))
    with sw.shard(model, "zero3", world=world) as engine:
        is_first = world.rank == 0
        version = iter(range(1, 1000))

        def stream(on_all: bool) -> None:
            engine.weights(names="module", dtype="bf16").send(sampler.receive if on_all or is_first else None)

        def gathered(on_all: bool) -> None:
            state = engine.state_dict(rank_0_only=not on_all)
            if on_all or is_first:
                sampler.take(state)

        def of_peer() -> None:
            state = whole_state(peer)
            if is_first:
                sampler.take(state)

        def one_by_one() -> None:
            assert of_deepspeed is not None
            for name, values in whole_params(of_deepspeed):
                if is_first:
                    sampler.receive(name, values)

        def gather() -> None:
            engine.save_pretrained(folder / "gathered", dtype="bf16", overwrite=True)

        def publish(wait: bool) -> None:
            engine.publish(folder / "published", dtype="bf16", version=next(version), wait=wait)

        ways: dict[str, tuple[Callable[[], None], bool]] = {
            STREAM: (partial(stream, False), is_first),
            STATE: (partial(gathered, False), is_first),
            FSDP2: (of_peer, is_first),
            STREAM_ON_ALL: (partial(stream, True), True),
            STATE_ON_ALL: (partial(gathered, True), True),
            GATHERED: (gather, False),
            PUBLISHED: (partial(publish, True), False),
            BESIDE: (partial(publish, False), False),
        }
        if of_deepspeed is not None:
            ways[DEEPSPEED] = one_by_one, is_first
        every = {name: Turns() for name in ways}
        ledger = world.collectives(torch.device("cpu")).ledger

        def sent_bytes() -> int:
            return sum(ledger.sent_bytes.values())

        for _ in range(num_turns):
            for name, (way, receives) in ways.items():
                one = every[name]
                count = tcp_sent_bytes if name in (FSDP2, DEEPSPEED) else sent_bytes
                world.barrier()
                before = count() or 0
                started, cpu_started = time.perf_counter(), time.process_time()
                way()
                one.cpu_seconds.append(time.process_time() - cpu_started)
                one.sent_bytes = (count() or 0) - before
                world.barrier()
                one.seconds.append(time.perf_counter() - started)
                engine.wait_for_publish()
                one.agrees = one.agrees and (not receives or sampler.has_all())
        for name, (way, _) in ways.items():
            world.barrier()
            with PeakOverBaseline() as memory:
                way()
                engine.wait_for_publish()
            every[name].peak_bytes = memory.peak_bytes
    num_bytes = sum(weight.nbytes for weight in sampler.weights.values())
    return {"params": params, "num_bytes": num_bytes, "ways": {name: vars(one) for name, one in every.items()}}


def fsdp2(model: Llama) -> nn.Module:
    """https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html: each block, then the root."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in model.blocks.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    """https://docs.pytorch.org/docs/stable/distributed.checkpoint.html: whole tensors on rank 0's CPU."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return cast(dict[str, Tensor], get_model_state_dict(model, options=options))


def deepspeed_3(model: Llama) -> nn.Module | None:
    """Its ZeRO-3 with parameters in bf16, and no optimizer; `None` if it is not installed."""
    if find_spec("deepspeed") is None:
        return None
    import deepspeed as ds

    ds.ops.__compatible_ops__ = {}  # see `engines.deepspeed`
    ds.init_distributed("gloo", verbose=False)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": 2**31,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    return cast(nn.Module, ds.initialize(model=model, config=config)[0].module)


def whole_params(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Each gathered alone, on all ranks, as TRL does where parameters are DeepSpeed's."""
    import deepspeed as ds

    for name, param in model.named_parameters():
        with ds.zero.GatheredParameters([param]):
            yield name, param.data


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=SIZES, required=True)
    parser.add_argument("--turns", type=int, required=True)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    with write_figures(args.out) as figures, sw.World.join() as world, shared_folder(world, args.folder) as folder:
        figures.update(measure(world, SIZES[args.size], args.turns, folder))


if __name__ == "__main__":
    main()
