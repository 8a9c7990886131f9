"""What the tiers under a step give: a disk beside `dd`, AdamW on the host beside DeepSpeed's, and both at once.

The disk is that of `--folder`. Everything is timed in turns, and quoted as ratios of neighbours in time.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console

from benchmarks.fresh import ROOT, RunError, run_ranks
from benchmarks.machine import header
from benchmarks.results_file import write_result
from benchmarks.show import show_figures
from benchmarks.summary import TOLERANCE
from benchmarks.turns import standings
from shardwise.fit.calibrate.disk import Grid, best_of, bounded, measure_disk
from shardwise.optim.disk_states import DiskStates
from shardwise.optim.host_adam import AdamTensors, HostAdam
from shardwise.system.disk import BufferPool, DiskFile, IoQueue, SystemCalls, TierFolder
from shardwise.system.machine import num_cores
from shardwise.system.neighbours import Neighbours
from shardwise.system.telemetry import Timeline, hidden_share
from shardwise.system.units import format_bytes

DD_BLOCK = 16 * 2**20
Times = dict[str, list[float]]


def main(args: argparse.Namespace, console: Console) -> int:
    """Exit status 1 if the disk is slower than 0.85 of `dd`, or an engine trains otherwise than the others."""
    rounds = args.rounds or (2 if args.quick else 3)
    file_bytes = bounded(2**26 if args.quick else 2**30, SystemCalls().free_bytes(Path(args.folder)))
    result: dict[str, Any] = header(args.note) | {"benchmark": "tiers", "rounds": rounds, "bytes": file_bytes}
    neighbours = Neighbours()
    folder = Path(args.folder).resolve()
    torch.set_num_threads(num_cores())
    few = Grid((2**20, 2**22), (1, 8), 2**26, 0.2)
    best = best_of(measure_disk(folder, few if args.quick else Grid((2**20, 2**22, 2**24), (4, 8, 16), 2**29, 0.4)))
    result["setting"] = {"depth": best.depth, "block_bytes": best.block_bytes}
    result["disk"] = _race_disk(folder, file_bytes, IoQueue(best.depth, best.block_bytes), rounds)
    result["adam"] = [_race_adam(threads, args.quick) for threads in sorted({1, num_cores()})]
    numel = 2**20 if args.quick else 2**25
    result["overlap"] = _overlap(folder, numel, IoQueue(best.depth, best.block_bytes), rounds)
    result["engines"] = _race_engines(folder, file_bytes, rounds, args.quick)
    result["others_cores"] = neighbours.cores()
    file = write_result(args.out / "tiers.json", result)
    _show(result, console)
    console.print(f"\n{file}", markup=False)
    is_fast = min(result["disk"]["dd / ours"].values()) >= 0.85
    return 0 if is_fast and not result["engines"]["wrong"] else 1


OURS_AND_PEERS = {
    "shardwise-offload": "deepspeed-2 cpu",
    "shardwise-zero3-offload": "deepspeed-3 cpu",
    "shardwise-infinity": "deepspeed-3 nvme",
}


def _race_engines(folder: Path, file_bytes: int, rounds: int, quick: bool) -> dict[str, Any]:
    """Steps of engines in turns; what the disk does in a step of ours; and `dd` over as many bytes, just after."""
    size, steps = ("tiny", 2) if quick else ("few-tokens", 2)
    place = folder / "shardwise-bench-engines"
    options = [f"--size={size}", f"--folder={place}", f"--rounds={rounds}", f"--steps={steps}"]
    try:
        ranks = run_ranks("benchmarks.tiers_rank", options, num_ranks=2, timeout_seconds=900)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    peers = [name for pair in OURS_AND_PEERS.items() for name in pair]
    rows = standings([rank["turns"] for rank in ranks], peers)
    right = next(row.loss for row in rows if row.engine == "by hand, host")
    wrong = [row.engine for row in rows if abs(row.loss - right) > TOLERANCE["fp32"] * abs(right)]
    dd = _dd_seconds(folder, max(DD_BLOCK, min(file_bytes, sum(rank["disk"]["bytes"] for rank in ranks) // 2)), rounds)
    return {
        "size": size,
        "turns": [rank["turns"] for rank in ranks],
        "summary": [row._asdict() for row in rows],
        "wrong": wrong,
        "trouble": ranks[0]["trouble"],
        "disk": [rank["disk"] for rank in ranks],
        "slow": [rank["slow"] for rank in ranks],
        "dd_bytes_per_second": dd,
    }


def _dd_seconds(folder: Path, num_bytes: int, rounds: int) -> float:
    """Bytes a second of `dd` that writes a file past the page cache, and reads it."""
    path = folder / "shardwise-bench-dd"
    try:
        calls = _dd(path, num_bytes)
        times = _in_turns(calls, rounds)
    finally:
        path.unlink(missing_ok=True)
    moved = max(1, num_bytes // DD_BLOCK) * min(DD_BLOCK, num_bytes)
    return 2 * moved / (median(times["write"]) + median(times["read"]))


def _race_disk(folder: Path, file_bytes: int, queue: IoQueue, rounds: int) -> dict[str, Any]:
    """The same zeros through both, in files whose space has been taken and written once."""
    place = TierFolder(folder)
    theirs = folder / "shardwise-bench-dd"
    try:
        file = place.create("bench", file_bytes, queue)
        pool = BufferPool(2, min(2**26, file.num_bytes))
        buffers = [pool.take(), pool.take()]
        dd = _dd(theirs, file.num_bytes)
        times = _in_turns(
            {
                "dd write": dd["write"],
                "ours write": lambda: _through(file.write, file.num_bytes, buffers),
                "dd read": dd["read"],
                "ours read": lambda: _through(file.read, file.num_bytes, buffers),
            },
            rounds,
        )
    finally:
        theirs.unlink(missing_ok=True)
        place.close()
        queue.close()
    ratios = {verb: _ratio(times, f"dd {verb}", f"ours {verb}") for verb in ("write", "read")}
    return {"seconds": times, "dd / ours": ratios}


def _dd(path: Path, num_bytes: int) -> dict[str, Callable[[], None]]:
    count = max(1, num_bytes // DD_BLOCK)
    block = min(DD_BLOCK, num_bytes)

    def run(*words: str) -> None:
        command = ["dd", f"bs={block}", f"count={count}", "status=none", *words]
        subprocess.run(command, check=True, capture_output=True)

    run("if=/dev/zero", f"of={path}", "oflag=direct")
    return {
        "write": lambda: run("if=/dev/zero", f"of={path}", "oflag=direct", "conv=notrunc"),
        "read": lambda: run(f"if={path}", "of=/dev/null", "iflag=direct"),
    }


def _through(move: Callable[[int, torch.Tensor], Any], num_bytes: int, buffers: Sequence[torch.Tensor]) -> None:
    """The whole file, two buffers under way at once."""
    under_way: list[Any] = []
    for number, start in enumerate(range(0, num_bytes, len(buffers[0]))):
        if len(under_way) == len(buffers):
            under_way.pop(0).wait()
        under_way.append(move(start, buffers[number % len(buffers)][: num_bytes - start]))
    for pending in under_way:
        pending.wait()


def read_through(file: DiskFile, buffers: Sequence[torch.Tensor]) -> None:
    """The whole file, and nothing else."""
    _through(file.read, file.num_bytes, buffers)


def _race_adam(threads: int, quick: bool) -> dict[str, Any]:
    """In a process of its own: how many threads OpenMP has is said before it starts."""
    env = {**os.environ, "OMP_NUM_THREADS": str(threads), "DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "benchmarks.host_adam", str(threads), str(2**20 if quick else 2**24)]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RunError(f"AdamW on the host with {threads} threads: {done.stderr.strip()[-500:]}")
    figures: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return figures


def _overlap(folder: Path, numel: int, queue: IoQueue, rounds: int) -> list[dict[str, Any]]:
    """A step with masters and moments on the disk; the same reads and writes alone; and the same updates alone.

    Once as it is, and once with each slice updated so often that it takes longer than the disk does: after the first
    time a slice lies in a cache, so how often that is has to be found.
    """
    place = TierFolder(folder)
    adam = HostAdam(max(1, num_cores()))
    try:
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], fused=True)
        group = optimizer.param_groups[0]
        states = DiskStates(place, "overlap", torch.zeros(numel), optimizer, group, queue)
        file, pool = states.file, BufferPool(3, states.buffer_bytes)
        grad = torch.randn(numel).bfloat16()
        views = file.views(0, torch.zeros(states.buffer_bytes, dtype=torch.uint8))

        def update(repeats: int, index: int, views: dict[str, torch.Tensor]) -> None:
            start, stop = file.bounds(index)
            param, *moments = (views[key][: stop - start] for key in ("param", "exp_avg", "exp_avg_sq"))
            for _ in range(repeats):
                adam.update([AdamTensors(param, grad[start:stop], *moments)], group, step=3)

        def update_all(repeats: int) -> None:
            for index in range(file.num_slices):
                update(repeats, index, views)

        def race(repeats: int) -> dict[str, Any]:
            calls: dict[str, Callable[[], None]] = {
                "step": lambda: file.update(pool, partial(update, repeats)),
                "disk alone": lambda: file.update(pool, _nothing),
                "update alone": lambda: update_all(repeats),
            }
            times = _in_turns(calls, rounds)
            timeline = Timeline()
            timeline.start()
            file.update(pool, partial(update, repeats), timeline)
            hidden = hidden_share(timeline.stop())
            return {"repeats": repeats, "seconds": times, "bytes": file.num_bytes, "hidden": hidden}

        first = race(1)
        wanted, repeats = 1.5 * median(first["seconds"]["disk alone"]), 2
        while (took := _in_turns({"updates": partial(update_all, repeats)}, 1)["updates"][0]) < wanted:
            repeats = max(repeats + 1, round(repeats * wanted / took))
        return [first, race(repeats)]
    finally:
        adam.close()
        place.close()
        queue.close()


def _nothing(index: int, views: dict[str, torch.Tensor]) -> None:
    """In the place of an update."""


def _in_turns(calls: Mapping[str, Callable[[], Any]], rounds: int) -> Times:
    """Seconds of each call in each round; a first round is not timed."""
    times: Times = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            if number:
                times[name].append(time.perf_counter() - started)
    return times


def _ratio(times: Times, one: str, other: str) -> float:
    """Of neighbours in time."""
    return median(a / b for a, b in zip(times[one], times[other], strict=True))


def _show(result: dict[str, Any], console: Console) -> None:
    num_bytes, setting = result["bytes"], result["setting"]
    others = f"; others used {result['others_cores']:.1f} cores" if result["others_cores"] else ""
    title = f"disk, {format_bytes(num_bytes)}, {setting['depth']} x {format_bytes(setting['block_bytes'])}{others}"
    rows = [[name, f"{format_bytes(num_bytes / median(times))}"] for name, times in result["disk"]["seconds"].items()]
    rows += [[f"{verb}: ours over dd", f"{ratio:.2f}"] for verb, ratio in result["disk"]["dd / ours"].items()]
    show_figures(title, ["what", "/s"], rows, console)
    for race in result["adam"]:
        rows = [
            [name, f"{race['seconds'][name] * 1000:.1f}", f"{race['cpu_seconds'][name] * 1000:.1f}"]
            + [f"{race[kind].get(name, 1.0):.2f}" for kind in ("ratios", "cpu_ratios")]
            for name in race["seconds"]
        ]
        title = f"AdamW on the host, {race['numel']:,} elements, threads: {race['threads']}"
        show_figures(title, ["what", "ms", "CPU ms", "ms over ours", "CPU over ours"], rows, console)
        if race["trouble"]:
            console.print(f"DeepSpeedCPUAdam: {race['trouble']}", markup=False)
    for overlap in result["overlap"]:
        rows = [[name, f"{median(seconds) * 1000:.0f}"] for name, seconds in overlap["seconds"].items()]
        rows.append(["of the disk's time hidden", f"{overlap['hidden']:.2f}"])
        title = f"states on disk, {format_bytes(overlap['bytes'])}, updates of each slice: {overlap['repeats']}"
        show_figures(title, ["what", "ms"], rows, console)
    _show_engines(result["engines"], console)


def _show_engines(race: dict[str, Any], console: Console) -> None:
    names = [row["engine"] for row in race["summary"]]
    rows = []
    for row in race["summary"]:
        peer = OURS_AND_PEERS.get(row["engine"], "")
        over = [f"{row[kind][peer]:.2f}" if peer in row[kind] else "" for kind in ("over", "cpu_over")]
        times = [f"{row[kind] * 1000:.0f}" for kind in ("step_seconds", "passes_seconds", "cpu_seconds")]
        wrong = "other loss" if row["engine"] in race["wrong"] else ""
        rows.append([row["engine"], *times, *over, peer if peer in names else "", wrong])
    columns = ["engine", "ms/step", "passes", "CPU ms", "over peer", "CPU over", "peer", ""]
    show_figures(f"GPT {race['size']}, fp32, 2 ranks, off the device", columns, rows, console)
    for name, why in race["trouble"].items():
        console.print(f"{name}: {why}", markup=False)
    both = zip(race["disk"][0]["seconds"], race["disk"][1]["seconds"], strict=True)
    ours = sum(rank["bytes"] for rank in race["disk"]) / median(max(pair) for pair in both)
    rows = [["states of a step, ours", f"{format_bytes(ours)}"], ["dd", f"{format_bytes(race['dd_bytes_per_second'])}"]]
    rows.append(["ours over dd", f"{ours / race['dd_bytes_per_second']:.2f}"])
    show_figures("disk in a step of shardwise-infinity, read and written", ["what", "/s"], rows, console)
    for title, found in (
        ("AdamW", race["disk"][0]),
        (f"NAdam {race['slow'][0]['repeats']} times over", race["slow"][0]),
    ):
        hidden, seconds = median(found["hidden"]), median(found["update_seconds"])
        console.print(f"\nrank 0, {title}: {hidden:.0%} of the disk's time hidden by {seconds:.2f} s of updates")
        if "hidden_in_step" in found:  # not in older results
            in_step = median(found["hidden_in_step"])
            console.print(f"of a whole step's, {in_step:.0%}: forwards and backwards hide it too")
        if "not_waited_for" in found:
            console.print(f"the rank did not wait for the disk in {median(found['not_waited_for']):.0%} of its time")
        for line in found["picture"]:
            console.print(line, markup=False, soft_wrap=True)
