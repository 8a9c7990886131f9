"""A model whose training does not fit on the card, its states on the host; and states on a disk, beside `dd`.

The model is as large as the card, the host's memory and the time at hand bear: with 80 GB and AdamW it is larger than
the card from 5 billion parameters on (16 bytes each), for which the host needs 100 GB and this part a minute.
"""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.device.models import FIFTH, TINY
from benchmarks.device.offload import offloaded
from benchmarks.device.rows import Rows
from benchmarks.device.speed import num_params_of
from benchmarks.llama import LlamaSize

WIDE = LlamaSize(1, 4096, 11_008, 32, 8, 32_000, 2048, 4)
STATE_BYTES = 16
"""Of a parameter under AdamW in bf16: itself and its gradient, fp32 master and two moments."""
HOST_BYTES = 20
"""Of a parameter; measured with 1 billion on the H200's host, libraries included."""
MADE_BYTES = 4
"""Of a parameter on the card while the model is made, in fp32."""
SECONDS_PER_BILLION = 14
"""Made, moved to the host, a first step that touches all memory, three steps, and one that is profiled; measured
there."""
DD_BYTES = 1 << 31


def largest(card_bytes: int, host_bytes: int, seconds: float) -> LlamaSize:
    """A Llama a tenth larger than the card; smaller if the host's free memory or the time bears no such. Pure."""
    most = min(
        1.1 * card_bytes / STATE_BYTES, 0.9 * card_bytes / MADE_BYTES, 0.9 * host_bytes / HOST_BYTES,
        seconds / SECONDS_PER_BILLION * 1e9,
    )  # fmt: skip
    one, two = (num_params_of(replace(WIDE, num_blocks=num)) for num in (1, 2))
    return replace(WIDE, num_blocks=max(1, int((most - one) // (two - one)) + 1))


def larger_than_the_card(rows: Rows) -> dict[str, Any]:
    if not rows.is_real:
        return offloaded(rows, TINY, {"preset": "offload", "activations": "recompute"})
    card = torch.cuda.get_device_properties(rows.device).total_memory
    size = largest(card, psutil.virtual_memory().available // rows.world.size, rows.seconds_left)
    state_bytes = STATE_BYTES * num_params_of(size)
    sizes = {"state_bytes": state_bytes, "card_bytes": card, "is_larger_than_the_card": state_bytes > card}
    return sizes | offloaded(rows, size, {"preset": "offload", "activations": "recompute"})


def dd(folder: Path, num_bytes: int) -> dict[str, Any]:
    """GB/s of `dd` past the page cache, in blocks of up to 16 MiB, writing and then reading."""
    file, block = folder / "dd", min(num_bytes, 16 << 20)
    blocks = [f"bs={block}", f"count={num_bytes // block}"]
    rates: dict[str, Any] = {}
    for name, words in (
        ("write", ["if=/dev/zero", f"of={file}", "oflag=direct"]),
        ("read", [f"if={file}", "of=/dev/null", "iflag=direct"]),
    ):
        start = time.perf_counter()
        subprocess.run(["dd", *words, *blocks], check=True, capture_output=True)
        rates[f"{name}_gb"] = num_bytes / (time.perf_counter() - start) / 1e9
    file.unlink()
    return rates


def with_disk(work: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """What `work` returns, and the bytes that this process has read from disks and written to them meanwhile."""
    before = psutil.Process().io_counters()
    row = dict(work())
    after = psutil.Process().io_counters()
    return row | {
        "disk_read_bytes": after.read_bytes - before.read_bytes,
        "disk_written_bytes": after.write_bytes - before.write_bytes,
    }


def deepspeed_offload(rows: Rows) -> dict[str, Any]:
    """Of the 1 B model of `offload`. DeepSpeed compiles its Adam for the host when it is first used."""
    import deepspeed as ds

    from benchmarks.device.models import ONE_BILLION, llama, tokens_of
    from benchmarks.engines import LEARNING_RATE

    size = ONE_BILLION if rows.is_real else TINY
    batch = tokens_of(size, rows.device, rows.world.rank)
    model = llama(size, rows.device)
    adam = ds.ops.adam.DeepSpeedCPUAdam(model.parameters(), lr=LEARNING_RATE)
    config = {
        "train_micro_batch_size_per_gpu": size.batch,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
    }
    engine: Any
    engine, *_ = ds.initialize(model=model, optimizer=adam, config=config)
    seconds = []
    for _ in range(5):
        rows.synchronize()
        start = time.perf_counter()
        engine.backward(engine(**batch).loss)
        engine.step()
        rows.synchronize()
        seconds.append(time.perf_counter() - start)
    return {"all_seconds": seconds, "step_seconds": sorted(seconds[2:])[1]}


def run(rows: Rows) -> None:
    with tempfile.TemporaryDirectory(prefix="shardwise-device-") as name:
        folder = Path(name)
        rows.measure("dd, O_DIRECT", lambda: dd(folder, DD_BYTES if rows.is_real else 1 << 20))
        few = FIFTH if rows.is_real else TINY
        infinity = {"preset": "infinity", "disk": name}
        rows.measure(
            "0.2 B infinity",
            lambda: with_disk(lambda: offloaded(rows, few, infinity)),
            needs_seconds=15 if rows.is_real else 0,
        )
    rows.measure(
        "larger than the card, offload, recomputed",
        lambda: larger_than_the_card(rows),
        needs_seconds=30 if rows.is_real else 0,
    )
    rows.compare_if_installed("1 B by DeepSpeed's ZeRO-Offload", "deepspeed", lambda: deepspeed_offload(rows))
