"""Fine-tunes a small model of sentences to find functions of Python's library by what they are for.

    shardwise launch --nproc 2 examples/stdlib_search/finetune.py

docs/tutorial.md goes through it. Leaves checkpoints, a record and a folder for `from_pretrained` in
runs/stdlib_search; the same command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor

import shardwise as sw
from search_model import loss_of, minilm, share_found, tokens_of
from shardwise.launch import StopRequest
from stdlib import stdlib_functions


def main() -> None:
    args = arguments()
    pairs, held_out = tokenized(args.candidates)
    with StopRequest() as stop:
        model = minilm()
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
        plan = sw.load_plan(args.plan, overrides=(f"run={json.dumps(str(args.out))}", f"accumulate={args.accumulate}"))
        engine = sw.shard(model, plan, optimizer=optimizer)
        loader = sw.data.Loader(
            pairs, batch_rows=args.rows, world=engine.data_ranks, accumulate=args.accumulate, steps=args.steps
        )
        engine.remember(loader=loader)

        def report(words: str) -> None:
            if engine.world.rank == 0:
                print(words, flush=True)

        def found() -> str:
            with engine.inference():
                return f"finds {share_found(model(held_out)):.1%} of {len(held_out)} functions that it has not seen"

        if engine.resume(args.out / "checkpoints") is None:
            report(f"before: {found()}")
        losses = []
        for rows in loader:
            loss = loss_of(model(rows))
            losses.append(loss.item())
            engine.backward(loss)
            if engine.step() is None:
                continue  # a micro-batch, and the step is not over
            said = engine.log({"loss": sum(losses) / len(losses)}, samples=len(losses) * len(rows))
            losses.clear()
            report(f"step {engine.num_steps}/{args.steps}: loss {said['loss']:.4f}")
            if engine.any_rank(stop.requested):
                break
        engine.save(args.out / "checkpoints", step=engine.num_steps)

        if engine.num_steps < args.steps:
            report(f"Stopped and saved after step {engine.num_steps}. The same command continues from there.")
        else:
            report(f"after: {found()}")
            engine.save_pretrained(args.out / "model", overwrite=True)
            report(f"The model is in {args.out / 'model'}.")
        engine.close()


def tokenized(num_held_out: int) -> tuple[Tensor, Tensor]:
    """A question and its code in each row: to train on, and of modules that are held out."""
    functions = stdlib_functions()
    pairs = tokens_of([one.question for one in functions], [one.code for one in functions])
    held_out = torch.tensor([one.is_held_out for one in functions])
    return pairs[~held_out], pairs[held_out][:num_held_out]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--plan", default="zero3", help="a preset or a plan file (default: zero3)")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rows", type=int, default=32, help="pairs in a step, over all ranks (default: 32)")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of a step (default: 1)")
    parser.add_argument("--lr", type=float, default=3e-5)
    parser.add_argument("--candidates", type=int, default=128, help="functions to find (default: 128)")
    parser.add_argument("--out", type=Path, default=Path("runs/stdlib_search"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
