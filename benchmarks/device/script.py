"""One script of `scripts`: `python -m benchmarks.device.script NAME FOLDER`, as a user would write it, for any device.

It trains a small Llama as the plain loop on the same device does, and writes how far the losses are apart to
`row.json`. Allowed is a multiple of what rounding does to the plain loop, measured by giving it the rows in another
order; more in bf16, whose casts integrations may place otherwise than the plain loop does.
"""

from __future__ import annotations

import copy
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import shardwise as sw
from benchmarks.device.models import FIFTH, TINY, Batch, llama, tokens_of
from benchmarks.results_file import write_result

NUM_STEPS, ROWS = 6, 4
RATE = 1e-2
FACTOR = {"fp32": 16.0, "bf16": 16.0}
FLOOR = {"fp32": 5e-6, "bf16": 5e-3}
"""Relative: no two kernels agree better."""


@dataclass(frozen=True)
class Job:
    work: Callable[[Path], dict[str, Any]]
    needs: str = ""


def device() -> torch.device:
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def model() -> Any:
    return llama(TINY, torch.device("cpu")).to(device())


def rows() -> list[dict[str, Tensor]]:
    """One sample each."""
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randint(0, TINY.vocab, (NUM_STEPS * ROWS, TINY.seq), generator=generator)
    return [{"input_ids": one, "labels": one.clone()} for one in drawn]


def batches() -> Iterator[Batch]:
    samples = rows()
    for first in range(0, len(samples), ROWS):
        some = samples[first : first + ROWS]
        yield {name: torch.stack([one[name] for one in some]).to(device()) for name in some[0]}


def sgd(of: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(of.parameters(), lr=RATE, momentum=0.9)


def plain(precision: str = "fp32", order: int = 1) -> list[float]:
    """Losses of the plain loop; in bf16 with fp32 masters by hand, under the rows' `order`."""
    masters = model()
    optimizer, losses = sgd(masters), []
    for batch in batches():
        computing = masters if precision == "fp32" else copy.deepcopy(masters).to(torch.bfloat16)
        loss = computing(**{name: value[::order] if order > 0 else value.flip(0) for name, value in batch.items()}).loss
        loss.backward()
        if computing is not masters:
            for mine, its in zip(masters.parameters(), computing.parameters(), strict=True):
                mine.grad = None if its.grad is None else its.grad.float()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def beside_plain(losses: Sequence[float], precision: str = "fp32") -> dict[str, Any]:
    twin, other = plain(precision), plain(precision, order=-1)
    rounding = max(abs(a - b) / abs(b) for a, b in zip(other, twin, strict=True))
    apart = max(abs(a - b) / abs(b) for a, b in zip(losses, twin, strict=True))
    allowed = max(FACTOR[precision] * rounding, FLOOR[precision])
    if apart > allowed:
        raise AssertionError(f"losses {list(losses)}, the plain loop's {twin}: {apart:.2e}, {allowed:.2e} allowed")
    return {"apart": apart, "allowed": allowed}


def trainer(folder: Path, precision: str = "fp32", plan: Any = "zero3") -> dict[str, Any]:
    from transformers import TrainingArguments

    from shardwise.integrations.transformers import Trainer

    mine = model()
    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"), max_steps=NUM_STEPS, per_device_train_batch_size=ROWS, logging_steps=1,
        lr_scheduler_type="constant", learning_rate=RATE, max_grad_norm=0.0, save_strategy="steps", save_steps=3,
        report_to=[], disable_tqdm=True, bf16=precision == "bf16", use_cpu=device().type == "cpu",
    )  # fmt: skip
    data = InOrder()
    told = Trainer(mine, arguments, train_dataset=data, eval_dataset=data, shardwise=plan, optimizers=(sgd(mine), None))
    told._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(data)
    told.train()
    losses = [line["loss"] for line in told.state.log_history if "loss" in line]
    return beside_plain(losses, precision) | {"eval_loss": told.evaluate()["eval_loss"]}


class InOrder(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return NUM_STEPS * ROWS

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return rows()[number]


def accelerate(folder: Path) -> dict[str, Any]:
    from shardwise.integrations.accelerate import Accelerator

    accelerator = Accelerator(plan="zero3")
    mine = model()
    loader = torch.utils.data.DataLoader(InOrder(), batch_size=ROWS)
    prepared, optimizer, loader = accelerator.prepare(mine, sgd(mine), loader)
    losses = []
    for batch in loader:
        loss = prepared(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(prepared.parameters(), 1e9)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    accelerator.save_state(str(folder / "state"))
    accelerator.load_state(str(folder / "state"))
    accelerator.end_training()
    return beside_plain(losses)


def deepspeed(folder: Path, zero: dict[str, Any], precision: str = "fp32") -> dict[str, Any]:
    import shardwise.integrations.deepspeed as ds

    mine = model()
    config = {"train_micro_batch_size_per_gpu": ROWS, "zero_optimization": zero, "gradient_clipping": 0.0}
    config |= {"bf16": {"enabled": precision == "bf16"}}
    engine, *_ = ds.initialize(model=mine, optimizer=sgd(mine), config=config)
    losses = []
    for batch in batches():
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.save_checkpoint(str(folder / "checkpoints"))
    engine.load_checkpoint(str(folder / "checkpoints"))
    return beside_plain(losses, precision)


def horovod(_: Path) -> dict[str, Any]:
    import shardwise.integrations.horovod.torch as hvd

    hvd.init()
    mine = model()
    hvd.broadcast_parameters(mine.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(sgd(mine), named_parameters=mine.named_parameters())
    losses = []
    for batch in batches():
        loss = mine(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(hvd.allreduce(loss.detach(), name="loss")))
    hvd.shutdown()
    return beside_plain(losses)


def lightning(folder: Path, plan: str = "shardwise_zero3") -> dict[str, Any]:
    try:
        import lightning.pytorch as pl

        import shardwise.integrations.lightning  # the strategies' names
    except ImportError:
        import pytorch_lightning as pl

        import shardwise.integrations.pytorch_lightning  # noqa: F401  # the strategies' names

    losses: list[float] = []

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = llama(TINY, torch.device("cpu"))

        def training_step(self, batch: Batch, _: int) -> Tensor:
            loss: Tensor = self.model(**batch).loss
            losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self)

    loader = torch.utils.data.DataLoader(InOrder(), batch_size=ROWS)
    told = pl.Trainer(
        devices=1, strategy=plan, max_epochs=1, enable_progress_bar=False, logger=False,
        default_root_dir=str(folder), enable_model_summary=False, use_distributed_sampler=False,  # which shuffles
    )  # fmt: skip
    told.fit(Module(), loader)
    return beside_plain(losses)


def engine_steps(engine: sw.Engine) -> list[float]:
    """Losses of the engine's own loop, which logs them."""
    losses = []
    for batch in batches():
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        engine.log({"loss": loss}, tokens=batch["input_ids"].numel())
        losses.append(loss.item())
    return losses


def auto(folder: Path) -> dict[str, Any]:
    mine = model()
    plan = {"preset": "auto", "run": str(folder / "run")}
    with sw.shard(mine, plan, optimizer=sgd(mine), batch=next(batches())) as engine:
        return beside_plain(engine_steps(engine)) | {"plan": str(engine.plan.preset)}


def recorded(folder: Path) -> dict[str, Any]:
    """A run with record and trace: rank 0 predicts its step by the profile of the device's name."""
    from shardwise.cli.main import main

    mine = model()
    plan = {"preset": "zero3", "run": str(folder / "run"), "verify": 2, "clip_grad_norm": 1e9}
    with sw.shard(mine, plan, optimizer=sgd(mine)) as engine:
        row = beside_plain(engine_steps(engine))
    main(["report", str(folder / "run")])
    main(["top", str(folder / "run"), "--once"])
    return row | {"files": sorted(path.name for path in (folder / "run").iterdir())}


def samplers(folder: Path) -> dict[str, Any]:
    """Weights that are streamed and published equal those that train, and what is sampled agrees with the trainer."""
    from transformers import AutoModelForCausalLM

    mine = model()
    with sw.shard(mine, {"preset": "zero3", "precision": "bf16"}, optimizer=sgd(mine)) as engine:
        engine_steps(engine)
        whole = engine.state_dict()
        streamed = {name: tensor.clone() for name, tensor in engine.weights(dtype="fp32")}
        wrong = [name for name, one in streamed.items() if not torch.equal(one.cpu(), whole[name].cpu())]
        version = engine.publish(folder / "weights", dtype="bf16")
        found = sw.published(folder / "weights", timeout=10)
        assert found is not None
        loaded: Any = AutoModelForCausalLM.from_pretrained(found.path, dtype=torch.bfloat16)
        sampler = loaded.to(device())
        found.acknowledge("sampler")
        prompt = next(batches())["input_ids"][:, :8]
        with torch.no_grad():
            tokens = sampler.generate(prompt, max_new_tokens=16, do_sample=False, pad_token_id=0)
            log_probs = sampler(tokens).logits[:, :-1].float().log_softmax(-1)
            log_probs = log_probs.gather(-1, tokens[:, 1:, None])[..., 0]
        log_probs = nn.functional.pad(log_probs, (1, 0))  # of the first token there is none
        counted = torch.ones_like(tokens, dtype=torch.bool)
        counted[:, 0] = False
        apart = engine.mismatch({"input_ids": tokens, "log_probs": log_probs, "counted": counted}, version=version)
        with engine.inference():
            here = mine.generate(prompt, max_new_tokens=16, do_sample=False, pad_token_id=0)
        shared = Path("/dev/shm") / f"shardwise-device-{os.getpid()}"
        engine.publish(shared, dtype="fp32", wait=False)
        engine.wait_for_publish()
        beside = sw.published(shared, reader="sampler")
        assert beside is not None
        there = beside.tensors()
        wrong += [name for name, one in streamed.items() if not torch.equal(one.cpu(), there[name])]
        sw.unpublish(shared)
    if wrong:
        raise AssertionError(f"streamed weights differ from the engine's: {wrong[:4]}")
    same = float((here == tokens).float().mean())
    return {"apart": 0.0, "mismatch": str(apart), "num_tensors": len(streamed), "same_tokens": same}


def generated(_: Path) -> dict[str, Any]:
    """Greedy tokens of a sharded model in inference equal the plain model's."""
    prompt = next(batches())["input_ids"][:, :8]
    with torch.no_grad():
        expected = model().generate(prompt, max_new_tokens=16, do_sample=False, pad_token_id=0)
    told = {}
    for preset in ("ddp", "zero3", "zero3-offload"):
        mine = model()
        with sw.shard(mine, preset, optimizer=sgd(mine)) as engine, engine.inference():
            found = mine.generate(prompt, max_new_tokens=16, do_sample=False, pad_token_id=0)
        told[preset] = float((found == expected).float().mean())
    if min(told.values()) < 1:
        raise AssertionError(f"shares of tokens that are the plain model's: {told}")
    return {"apart": 0.0}


def adapters(folder: Path) -> dict[str, Any]:
    """LoRA on a frozen base in bf16, merged on the way out, beside peft's own merge."""
    from peft import LoraConfig, get_peft_model

    mine = get_peft_model(llama(TINY, torch.device("cpu")), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    mine.to(device())
    optimizer = torch.optim.AdamW([one for one in mine.parameters() if one.requires_grad], lr=1e-2)
    with sw.shard(mine, "zero3", optimizer=optimizer) as engine:
        losses = engine_steps(engine)
        engine.save_pretrained(folder / "merged", merge_adapters=True)
        streamed = {name: tensor.cpu().clone() for name, tensor in engine.weights()}
        engine.close()
    merged = mine.merge_and_unload().state_dict()
    far = max(float((streamed[name] - merged[name].cpu()).abs().max()) for name in streamed if name in merged)
    if len(set(losses)) < NUM_STEPS or far > 1e-5:
        raise AssertionError(f"losses {losses}; merged weights {far:.1e} apart")
    return {"apart": far, "losses": losses}


def fitted(_: Path) -> dict[str, Any]:
    """A rehearsal, and activations that are treated so that a step fits."""
    mine = model()
    with sw.shard(mine, "zero3", optimizer=sgd(mine)) as engine:
        most = engine.rehearse(next(batches())).total
        chosen = engine.fit_activations(next(batches()), int(1.2 * most))
        return beside_plain(engine_steps(engine)) | {"promised": most, "chosen": str(chosen)}


def chunked(_: Path) -> dict[str, Any]:
    """Logits in chunks: the losses of whole ones; with many words, a device's peaks beside the promised ones."""
    mine = model()
    with sw.shard(mine, {"preset": "zero3", "loss": "chunked"}, optimizer=sgd(mine)) as engine:
        row = beside_plain(engine_steps(engine))
    if device().type == "cpu":
        return row
    size = replace(FIFTH, vocab=131_072)
    for loss in ("whole", "chunked"):
        large = llama(size, device())
        plan = {"preset": "zero3", "precision": "bf16", "loss": loss}
        with sw.shard(large, plan, optimizer=sgd(large)) as engine:
            batch = tokens_of(size, device())
            promised = engine.rehearse(batch).total
            seconds = []
            for _step in range(4):
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                start = time.perf_counter()
                engine.backward(engine(**batch).loss)
                engine.step()
                torch.cuda.synchronize()
                seconds.append(time.perf_counter() - start)
            peak = torch.cuda.max_memory_allocated()
        row[loss] = {"promised": promised, "peak": peak, "over": round(peak / promised, 4), "seconds": min(seconds)}
        del large, engine
        torch.cuda.empty_cache()
    return row


def only_generating(_: Path) -> dict[str, Any]:
    """Greedy tokens by DeepSpeed's `init_inference`, and logits of weights in 8 bits, beside the plain model's."""
    import shardwise.integrations.deepspeed as ds

    prompt = next(batches())["input_ids"][:, :8]
    plain_model = model().eval()
    with torch.no_grad():
        expected = plain_model.generate(prompt, max_new_tokens=16, do_sample=False, pad_token_id=0)
        logits = plain_model(prompt).logits
    engine = ds.init_inference(model(), dtype=torch.float32)
    found = engine.generate(prompt, max_new_tokens=16, do_sample=False, pad_token_id=0)
    if not torch.equal(found, expected):
        raise AssertionError(f"{found} instead of {expected}")
    narrow = sw.load_for_inference(model=model(), weights="int8", dtype=torch.float32)
    with torch.no_grad():
        apart = float((narrow(prompt).logits - logits).norm() / logits.norm())
    if apart > 0.02:
        raise AssertionError(f"logits of weights in 8 bits are {apart:.1%} apart")
    return {"apart": apart}


JOBS = {
    "Trainer, fp32": Job(trainer, "transformers"),
    "Trainer, bf16": Job(lambda folder: trainer(folder, "bf16"), "transformers"),
    "Trainer, offload": Job(lambda folder: trainer(folder, plan="zero3-offload"), "transformers"),
    "Accelerate": Job(accelerate, "accelerate"),
    "DeepSpeed's names, stage 3": Job(lambda folder: deepspeed(folder, {"stage": 3})),
    "DeepSpeed's names, stage 2 offloaded, bf16": Job(
        lambda folder: deepspeed(folder, {"stage": 2, "offload_optimizer": {"device": "cpu"}}, "bf16")
    ),
    "Horovod's names": Job(horovod),
    "Lightning": Job(lightning, "pytorch_lightning"),
    "auto": Job(auto),
    "record, verify, report": Job(recorded),
    "weights for samplers": Job(samplers),
    "generate": Job(generated),
    "LoRA, merged": Job(adapters, "peft"),
    "activations to fit": Job(fitted),
    "logits in chunks": Job(chunked),
    "only generating": Job(only_generating),
}


def main() -> None:
    name, folder = sys.argv[1], Path(sys.argv[2])
    os.chdir(folder)
    write_result(folder / "row.json", JOBS[name].work(folder))


if __name__ == "__main__":
    main()
