"""GRPO on a task that can be checked: a policy learns by rewards alone to write words backwards.

    shardwise launch --nproc 2 examples/grpo/grpo.py

Ranks train under a plan; a process of its own samples, from weights that it reads in shared memory. Leaves a record and
plots of reward, KL and mismatch in runs/grpo. README.md goes through it.

GRPO: Shao et al., "DeepSeekMath", 2024. An answer's advantage is its reward, less the mean of those to the same prompt,
over their standard deviation; ratios are clipped as in PPO.
"""

from __future__ import annotations

import argparse
import copy
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import shardwise as sw
from plots import draw
from policy import PROMPT, Policy, log_probs, rewards
from sampler import batch_path
from shardwise.errors import ConfigError, ShardwiseError

CLIPPED = 0.2
MEMORY = Path("/dev/shm")
POLL_SECONDS, PATIENCE_SECONDS = 0.002, 120.0


def main() -> None:
    args = arguments()
    with sw.World.join() as world, folders(args, world) as (weights, samples):
        torch.manual_seed(args.seed)
        policy = Policy()
        reference = copy.deepcopy(policy).requires_grad_(False)
        optimizer = torch.optim.AdamW(policy.parameters(), lr=args.lr, weight_decay=0.0)
        plan = sw.load_plan(args.plan, overrides=(f"run={json.dumps(str(args.out))}", "clip_grad_norm=1.0"))
        with (
            sw.shard(policy, plan, optimizer=optimizer, world=world) as engine,
            sw.shard(reference, args.plan, world=world),
        ):
            if args.prompts % engine.data_ranks[1]:
                raise ConfigError(f"--prompts {args.prompts} do not divide among {engine.data_ranks[1]} ranks.")
            engine.publish(weights, dtype="bf16")
            for step in range(1, args.steps + 1):
                batch = batch_of(samples, step)
                values = train_step(engine, reference, batch, args)
                engine.publish(weights, dtype="bf16", wait=False)  # written beside the next step
                engine.log(values)
                if step % args.report_every == 0 or step == args.steps:
                    report(engine, batch, args, values)
        if world.rank == 0:
            try:
                print(f"plots: {draw(args.out / 'record.jsonl', args.out / 'curves.png')}")
            except ShardwiseError as error:  # without matplotlib
                print(error)


def train_step(
    engine: sw.Engine, reference: nn.Module, batch: dict[str, Tensor], args: argparse.Namespace
) -> dict[str, float]:
    """One optimizer step on this rank's groups; what is logged of it."""
    rows, sampled = own_groups(batch, engine.data_ranks, args.group)
    reward = rewards(rows)
    by_prompt = reward.view(-1, args.group)
    advantage = ((by_prompt - by_prompt.mean(1, keepdim=True)) / (by_prompt.std(1, keepdim=True) + 1e-4)).view(-1, 1)
    trained = log_probs(engine.module, rows)[:, PROMPT:]
    with torch.no_grad():
        apart = log_probs(reference, rows)[:, PROMPT:] - trained.detach()
    ratio = (trained - sampled[:, PROMPT:]).exp()
    clipped = ratio.clamp(1 - CLIPPED, 1 + CLIPPED)
    engine.backward(-torch.minimum(ratio * advantage, clipped * advantage).mean())
    engine.step()
    return {
        "reward": reward.mean().item(),
        "all_right": (reward == 1.0).float().mean().item(),
        "kl": (apart.expm1() - apart).mean().item(),
        "steps_behind": engine.num_steps - 1 - batch["version"].item(),
    }


def report(engine: sw.Engine, batch: dict[str, Tensor], args: argparse.Namespace, values: dict[str, float]) -> None:
    """Compare the sampler with the trainer, which is a step further, and say how it goes. All ranks call."""
    rows, sampled = own_groups(batch, engine.data_ranks, args.group)
    counted = torch.zeros_like(rows, dtype=torch.bool)
    counted[:, PROMPT:] = True
    samples = {"input_ids": rows, "log_probs": sampled, "counted": counted}
    found = engine.mismatch(samples, version=int(batch["version"]), alarm=0.1, rows=len(rows))
    if engine.world.rank == 0:
        print(f"step {engine.num_steps}: reward {values['reward']:.3f}, mismatch: {found}", flush=True)


def own_groups(batch: dict[str, Tensor], ranks: tuple[int, int], group: int) -> tuple[Tensor, Tensor]:
    """The rows and log-probabilities of this rank's prompts."""
    place, number = ranks
    share = len(batch["rows"]) // group // number * group
    mine = slice(place * share, (place + 1) * share)
    return batch["rows"][mine], batch["log_probs"][mine]


def batch_of(samples: Path, number: int) -> dict[str, Tensor]:
    """The sampler's batch for step `number`, once it is there."""
    path, ends = batch_path(samples, number), time.monotonic() + PATIENCE_SECONDS
    while not path.exists():
        if time.monotonic() > ends:
            raise TimeoutError(f"The sampler has not made {path.name} in {PATIENCE_SECONDS:.0f} s; did it end?")
        time.sleep(POLL_SECONDS)
    return load_file(path)


@contextmanager
def folders(args: argparse.Namespace, world: sw.World) -> Iterator[tuple[Path, Path]]:
    """The folders of weights and of samples, in memory where there is any, and the sampler, as long as this lasts."""
    root = ""
    if world.rank == 0:
        shutil.rmtree(args.out, ignore_errors=True)
        root = tempfile.mkdtemp(prefix="grpo-", dir=MEMORY if MEMORY.is_dir() else None)
        (Path(root) / "samples").mkdir()
    root = world.exchange(root.encode(), "folders")[0].decode()
    weights, samples = Path(root) / "weights", Path(root) / "samples"
    sampler = None
    try:
        if world.rank == 0:
            settings = (f"--{name}={getattr(args, name)}" for name in ("prompts", "group", "seed"))
            script = Path(__file__).with_name("sampler.py")
            sampler = subprocess.Popen([sys.executable, str(script), str(weights), str(samples), *settings])
        yield weights, samples
    finally:
        if sampler is not None:
            sampler.terminate()
            sampler.wait()
            shutil.rmtree(root, ignore_errors=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option = parser.add_argument
    option("--plan", default="zero3", help="a preset or a plan file (default: zero3)")
    option("--steps", type=int, default=200, help="optimizer steps (default: 200)")
    option("--prompts", type=int, default=16, help="of a step over all ranks (default: 16)")
    option("--group", type=int, default=16, help="answers to each (default: 16)")
    option("--lr", type=float, default=1e-3, help="learning rate (default: 1e-3)")
    option("--seed", type=int, default=0, help="of the policy and of samples (default: 0)")
    option("--report-every", type=int, default=10, help="steps between comparisons with the sampler (default: 10)")
    option("--out", type=Path, default=Path("runs/grpo"), help="folder of record and plots (default: runs/grpo)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
