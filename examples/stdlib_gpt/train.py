"""The main job: a small GPT learns to write Python, sharded over however many processes there are.

    shardwise launch --nproc 2 examples/stdlib_gpt/train.py

Leaves a record, a loss curve and checkpoints in runs/stdlib_gpt/PLAN. Ctrl-C saves and leaves; the same
command goes on from there, on as many processes as you like.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

import shardwise as sw
from corpus import Corpus, pieces, stdlib_folder
from model import GPT, ModelSize, decay_groups, generate
from report import Report
from shardwise.data import Loader
from shardwise.errors import ConfigError
from shardwise.launch import StopRequest
from tokens import Tokens, bigram_loss

RUNS = Path("runs/stdlib_gpt")
ROWS = 8  # of a step over all ranks, where --batch says nothing
CORPUS_BYTES = 4 * 2**20
JOB_PLAN = {"precision": "auto", "clip_grad_norm": "1.0"}  # where neither --plan nor --set says anything
WARMUP_SHARE, FINAL_LR_SHARE = 0.05, 0.1
VALIDATION_BATCHES = 8
PROMPT, SAMPLE_TOKENS, TEMPERATURE = b"class Reader:\n    def __init__(self, ", 140, 0.6


@dataclass(frozen=True)
class Run:
    """What every rank builds alike; only `world.rank` differs."""

    args: argparse.Namespace
    world: sw.World
    plan: sw.Plan
    rows: int
    tokens: Tokens
    bigram: float
    """The loss of a bigram model on the validation text."""
    model: GPT
    engine: sw.Engine
    scheduler: LambdaLR
    train: Loader
    validation: Loader

    @property
    def folder(self) -> Path:
        return folder_of(self.args)

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"


def main() -> int:
    args = parse_arguments()
    with StopRequest() as stop, sw.World.join() as world:
        run = build(args, world)
        with closing(run.engine), run.train, run.validation:
            done = resume(run)
            with Report(run.folder, run.engine, total=args.steps, resumed_step=done) as report:
                finished = train(run, done or 0, stop, report)
            return finish(run, stop, report) if finished else interrupted(stop)


def build(args: argparse.Namespace, world: sw.World) -> Run:
    """Text, model, optimizer and schedule as in any script; then the engine that shards them."""
    plan = load_plan(args)
    corpus = Corpus.of_folder(Path(args.text), CORPUS_BYTES)
    tokens = Tokens.learn(corpus.train, args.vocabulary)
    train, validation = tokens.encode(corpus.train), tokens.encode(corpus.validation)
    torch.manual_seed(args.seed)
    model = GPT(ModelSize(args.vocabulary, args.layers, args.width, args.heads, args.context))
    optimizer = torch.optim.AdamW(decay_groups(model, weight_decay=0.1), lr=args.lr, betas=(0.9, 0.95))
    engine = sw.shard(model, plan, optimizer=optimizer, world=world)
    dealt = engine.data_ranks
    rows = batch_rows(args, dealt[1] * plan.accumulate, dealt[1])
    return Run(
        args=args,
        world=world,
        plan=plan,
        rows=rows,
        tokens=tokens,
        bigram=bigram_loss(train, validation, args.vocabulary),
        model=model,
        engine=engine,
        scheduler=LambdaLR(optimizer, lambda step: lr_share(step, args.steps)),
        train=Loader(
            pieces(train, args.context),
            batch_rows=rows,
            seed=args.seed,
            world=dealt,
            accumulate=plan.accumulate,
            steps=args.steps,
        ),
        validation=Loader(pieces(validation, args.context), batch_rows=rows, world=dealt, steps=VALIDATION_BATCHES),
    )


def folder_of(args: argparse.Namespace) -> Path:
    """As --out says, or one for each plan: `runs/stdlib_gpt/zero3`."""
    return Path(args.out) if args.out else RUNS / Path(args.plan).stem


def batch_rows(args: argparse.Namespace, parts: int, num_ranks: int) -> int:
    """Rows of a step: as --batch says, which has to come out even, or 8, rounded up until they do."""
    if args.batch is None:
        return -(-ROWS // parts) * parts
    if args.batch <= 0 or args.batch % parts:
        raise ConfigError(
            f"--batch {args.batch} does not divide among {num_ranks} ranks with {parts // num_ranks} micro-batches "
            f"each. Give a multiple of {parts}: {as_given(f'--batch {max(1, round(args.batch / parts)) * parts}')}."
        )
    return int(args.batch)


def train(run: Run, done: int, stop: StopRequest, report: Report) -> bool:
    """All steps after `done`. False if somebody asked to stop; what was done is saved either way."""
    steps = run.args.steps
    if done >= steps:
        report.note(
            f"{done} of {steps} steps are done already, in {run.folder}. For more give a larger "
            f"{as_given('--steps N')}; to start over, {as_given('--fresh')}."
        )
    elif done:
        report.note(f"Continuing after step {done} of {steps}, from {run.checkpoints}.")
    else:
        report.note(f"A new run, kept in {run.folder}.")
    report.note(f"A bigram model of the same text, which sees one token back, has a loss of {run.bigram:.2f}.")
    if run.args.batch is None and run.rows != ROWS:
        report.note(f"{ROWS} rows do not divide among {run.world.size} ranks: a step takes {run.rows}.")
    batches = iter(run.train)
    for step in range(done + 1, steps + 1):
        loss = train_step(run, batches)
        report.step(step, loss=loss, batch_tokens=run.rows * run.args.context)
        stopping = run.engine.any_rank(stop.requested)
        if stopping or step == steps or step % run.args.save_every == 0:
            save(run, step)
        if stopping and step < steps:
            report.note(f"Stopped and saved after step {step}. The same command continues from there.")
            return False
        if step == steps or step % run.args.validate_every == 0:
            report.validation(step, validate(run))
    return True


def train_step(run: Run, batches: Iterator[Tensor]) -> float:
    """One optimizer step; the mean loss over all ranks, which is in the record of the run then."""
    loss = run.engine.train_step((rows[:, :-1], rows[:, 1:]) for rows in batches)
    run.scheduler.step()
    tokens = run.rows * run.args.context // run.engine.data_ranks[1]
    return run.engine.log({"loss": loss}, tokens=tokens)["loss"]


def validate(run: Run) -> float:
    """The mean loss over the same few batches of held-out files, every time."""
    run.validation.seek(0)
    losses = [run.engine.eval_step((rows[:, :-1], rows[:, 1:])).item() for rows in run.validation]
    return run.engine.log({"loss": sum(losses) / len(losses)}, kind="validation")["loss"]


def finish(run: Run, stop: StopRequest, report: Report) -> int:
    """The curve, a sample of what the model writes, and the memory that all this took."""
    report.curve(run.bigram)
    if "pp" in run.engine.mesh.axes:
        report.note("No sample: no rank of a pipeline can run the model by itself.")
    else:
        text = bytearray(PROMPT)
        prompt = [int(token) for token in run.tokens.encode(PROMPT)]
        for token in generate(run.model, prompt, SAMPLE_TOKENS, TEMPERATURE, run.args.seed):
            text += run.tokens.decode(token)
            if run.engine.any_rank(stop.requested):
                return interrupted(stop)
        report.sample(bytes(text))
    report.memory(run.engine.memory())
    return 0


def interrupted(stop: StopRequest) -> int:
    """What a shell reports of a command that was ended by this signal; Ctrl-C, if it reached another rank only."""
    return 128 + (stop.signal or signal.SIGINT)


def save(run: Run, step: int) -> None:
    state = {"job": identity(run), "scheduler": run.scheduler.state_dict(), "data": run.train.state_dict()}
    run.engine.save(run.checkpoints, step=step, state=state)


def resume(run: Run) -> int | None:
    """How many steps the last checkpoint has behind it, everything restored; None for a fresh start."""
    run.engine.claim(run.checkpoints)  # of two jobs in one folder the second is told before it touches anything
    if run.args.fresh and run.world.rank == 0:
        for path in run.checkpoints.glob("[!.]*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    run.world.barrier()  # nobody looks for checkpoints before rank 0 has cleared them away
    resumed = run.engine.resume(run.checkpoints)
    if resumed is None:
        return None
    if not resumed.state:  # this rank has come to others, who have not saved yet: it has got what they have
        return int(resumed.step)
    for name, value in identity(run).items():
        was = resumed.state["job"][name]
        if was != value:
            raise ConfigError(
                f"The run in {run.folder} was started with {name} {was}, not {value}. Give what it was, "
                f"{as_given(f'--{name} {was}')}, or another {as_given('--out FOLDER')}; to start over, "
                f"{as_given('--fresh')}."
            )
    run.scheduler.load_state_dict(resumed.state["scheduler"])
    run.train.load_state_dict(resumed.state["data"])
    return int(resumed.step)


def identity(run: Run) -> dict[str, Any]:
    """What must not change while a run lasts, lest its loss curve be that of two runs."""
    args = run.args
    return {"seed": args.seed, "batch": run.rows, "lr": args.lr, **asdict(run.model.size)}


def load_plan(args: argparse.Namespace) -> sw.Plan:
    """The plan as given, with this job's wishes where it says nothing."""
    plan = sw.load_plan(args.plan, overrides=tuple(args.set))
    job_plan = {**JOB_PLAN, "run": json.dumps(str(folder_of(args)))}
    wishes = (f"{key}={value}" for key, value in job_plan.items() if plan.origin(key) == "default")
    return sw.load_plan(args.plan, overrides=(*wishes, *args.set))


def as_given(option: str) -> str:
    """How to give an option in the words of the command that was used: `make train` takes most of them in ARGS."""
    if os.environ.get("HINTS") != "make":
        return option
    name, _, value = option.removeprefix("--").partition(" ")
    return f"{name.upper()}={value}" if name in ("steps", "out", "plan") else f'ARGS="{option}"'


def lr_share(step: int, steps: int) -> float:
    """Linear warm-up, then half a cosine down to a tenth (Loshchilov and Hutter 2017)."""
    warmup = max(1, round(WARMUP_SHARE * steps))
    if step < warmup:
        return (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    return FINAL_LR_SHARE + (1 - FINAL_LR_SHARE) * 0.5 * (1 + math.cos(math.pi * done))


def parse_arguments() -> argparse.Namespace:
    size = ModelSize()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option = parser.add_argument
    option("--plan", default="zero3", help="a preset or a plan file (default: zero3)")
    option("--set", action="append", default=[], metavar="KEY=VALUE", help="change the plan: precision=fp32")
    option("--steps", type=int, default=800, help="optimizer steps in all (default: 800)")
    option("--batch", type=int, help=f"rows of a step over all ranks (default: {ROWS}, or a few more to divide)")
    option("--lr", type=float, default=8e-3, help="largest learning rate (default: 8e-3)")
    option("--seed", type=int, default=0, help="of weights, batches and sample (default: 0)")
    option("--out", help=f"folder of the run (default: one for each plan, such as {RUNS}/zero3)")
    option("--save-every", type=int, default=200, help="steps between checkpoints (default: 200)")
    option("--validate-every", type=int, default=100, help="steps between validations (default: 100)")
    option("--fresh", action="store_true", help="start over, whatever --out has")
    option("--text", default=stdlib_folder(), help="folder of *.py (default: Python's standard library)")
    for name, value in asdict(size).items():
        option(f"--{name}", type=int, default=value, help=f"of the model (default: {value})")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ConfigError as error:
        sys.exit(f"train.py: {error}")
