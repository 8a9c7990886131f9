"""A worker is killed (`kill -9`): how long until those that are left have committed a step, and what was lost.

Every library trains the same small model on as many ranks. A process of the benchmark reads what ranks commit, kills
one, and looks for the first step that all survivors have committed with fewer ranks.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from benchmarks.elastic_rank import PLANS
from benchmarks.fresh import GRACE_SECONDS, ROOT, RunError, environment, launcher
from benchmarks.machine import header
from benchmarks.results_file import write_result
from benchmarks.show import show_figures

RANKS = 4
PARTS = ("kills", "curve", "steady", "others")
"""Of the benchmark: how long others stand when a rank is killed, by how much losses deviate, what a step costs to be
able to lose one, and how long other libraries stand."""
FOREVER = 10**6
CALM_STEPS = 20
"""Before each kill."""
PATIENCE_SECONDS = 120.0
NAMES = {
    "shardwise": "shardwise, --elastic",
    "gpt": "shardwise, --elastic, a GPT",
    "gpt-4": "shardwise, --elastic, a GPT",
    "torchft": "torchft",
    "torchrun": "torchrun, restarted",
    "horovod": "Horovod Elastic",
}
SCRIPT = str(ROOT / "benchmarks" / "elastic_rank.py")
Line = dict[str, Any]


@dataclass
class Job:
    """One library's ranks, while they run."""

    form: str
    folder: Path
    preset: str = "zero3"
    steps: int = FOREVER
    elastic: bool = True
    ranks: int = RANKS
    processes: list[subprocess.Popen[str]] = field(default_factory=list)
    _read: dict[Path, int] = field(default_factory=dict)
    lines: list[Line] = field(default_factory=list)
    lighthouse: Any = None

    def start(self) -> None:
        env = environment(on_cpu=True) | {"OMP_NUM_THREADS": "1"}
        for command, more in _commands(self):
            said = (self.folder / f"output-{len(self.processes)}.txt").open("w")
            self.processes.append(
                subprocess.Popen(command, env=env | more, cwd=ROOT, stdout=said, stderr=subprocess.STDOUT, text=True)
            )

    def look(self) -> list[Line]:
        """What has been committed since the last look."""
        found: list[Line] = []
        for path in self.folder.glob("*.jsonl"):
            with path.open() as stream:
                stream.seek(self._read.get(path, 0))
                text = stream.read()
            whole = text[: text.rfind("\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole.encode())
            found += [json.loads(line) for line in whole.splitlines()]
        self.lines += found
        return found

    def wait(self, what: str, is_so: Any, seconds: float = PATIENCE_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while not is_so():
            if time.monotonic() > deadline:
                raise RunError(f"{NAMES[self.form]}: {what} not after {seconds:.0f} s; {self._last_status()}")
            time.sleep(0.02)
            self.look()

    def end(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self.processes:
            try:
                process.wait(GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self.lighthouse is not None:
            self.lighthouse.shutdown()

    def _last_status(self) -> str:
        texts = [path.read_text().strip().splitlines()[-1:] for path in sorted(self.folder.glob("output-*.txt"))]
        return " ".join(line for lines in texts for line in lines)[:300]


def main(args: argparse.Namespace, console: Console) -> int:
    num_kills = args.rounds or (3 if args.quick else 10)
    result: dict[str, Any] = header(args.note) | {"benchmark": "elastic", "ranks": RANKS, "forms": {}, "not_run": {}}
    file, parts = args.out / "elastic.json", args.parts or PARTS
    plans = ("zero3", "dp x tp") if args.quick else ("ddp", "zero1", "zero3", "zero3-offload", *PLANS)
    for preset in plans if "kills" in parts else ():
        job = Job("shardwise", _folder(), preset, ranks=_ranks_of(preset))
        result["forms"][f"shardwise, {preset}"] = _killed(job, num_kills)
        write_result(file, result)
        console.print(_said(preset, result["forms"][f"shardwise, {preset}"]), markup=False)
    if "curve" in parts:
        result["curve"] = _curve("zero3", 3)
    result["steady"] = {}
    for name, job_of in _STEADY.items() if "steady" in parts else ():
        result["steady"][name] = _steady(job_of, args.rounds or (3 if args.quick else 7))
        write_result(file, result)
    others = (("torchft", num_kills), ("torchrun", 3), ("horovod", 1)) if "others" in parts else ()
    for form, most in others:
        why = _why_not(form)
        if why:
            result["not_run"][form] = why
        else:
            try:
                result["forms"][form] = _killed(Job(form, _folder()), min(most, num_kills))
            except RunError as error:
                result["not_run"][form] = str(error)
        write_result(file, result)
    _show(result, console)
    console.print(f"\n{file}", markup=False)
    return 0


def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="shardwise-bench-"))


def _commands(job: Job) -> list[tuple[list[str], dict[str, str]]]:
    """What is started, with what besides in the environment."""
    script = [SCRIPT, job.form, str(job.folder), str(job.steps), job.preset]
    if job.form in ("shardwise", "gpt", "gpt-4"):
        elastic = ["--elastic", f"{job.ranks // 2}:{job.ranks}", "--retries", "1000"] if job.elastic else []
        return [([*launcher(job.ranks), *elastic, *script], {})]
    if job.form == "torchrun":
        run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "100"]
        # without it torch 2.13 does not come back: restarted ranks read the addresses of dead ones
        return [([*run, "--nproc-per-node", str(RANKS), *script], {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})]
    if job.form == "horovod":
        hosts = job.folder / "hosts.sh"
        hosts.write_text("#!/bin/sh\necho localhost:2\necho 127.0.0.1:2\n")
        hosts.chmod(0o755)
        command = str(Path(sys.executable).with_name("horovodrun"))
        run = [
            command,
            "-np",
            str(RANKS),
            "--min-np",
            "2",
            "--host-discovery-script",
            str(hosts),
            "--gloo",
            "--gloo-timeout-seconds",
            "5",
        ]
        return [([*run, sys.executable, "-P", *script], {})]  # without -P `horovod` is the benchmark of that name
    os.environ.setdefault("RUST_LOG", "error")
    from torchft.coordination import LighthouseServer

    if job.lighthouse is None:
        job.lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1)
    address = job.lighthouse.address()
    number = len(job.processes)
    groups = range(number, number + 1) if number else range(RANKS)
    return [([sys.executable, *script], {"REPLICA_GROUP_ID": str(n), "TORCHFT_LIGHTHOUSE": address}) for n in groups]


def _why_not(form: str) -> str:
    module = {"torchft": "torchft", "horovod": "horovod.torch"}.get(form)
    if module is None:
        return ""
    found = subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True, text=True, check=False)
    return "" if found.returncode == 0 else f"not installed here: {(found.stderr.strip().splitlines() or ['?'])[-1]}"


# -- being killed -------------------------------------------------------------------------------------------


def _killed(job: Job, num_kills: int) -> dict[str, Any]:
    """Kill a rank, see the others go on, let it come back, and once more."""
    kills: list[dict[str, float]] = []
    job.start()
    try:
        for number in range(num_kills):
            start = len(job.lines)
            job.wait("all ranks train", lambda start=start: _calm(job.lines[start:], job.ranks))
            kills.append(_one_kill(job, number))
            if job.form == "torchft":
                job.start()
            if job.form == "horovod":  # the whole host of the dead is left out for good
                break
        if job.form == "shardwise":
            start = len(job.lines)
            job.wait("all ranks train", lambda: _calm(job.lines[start:], job.ranks))
    finally:
        job.end()
    pauses = _pauses_of_growth(job.lines, job.ranks) if job.form in ("shardwise", "torchft") else []
    return {
        "kills": kills,
        "median_seconds": median(one["seconds"] for one in kills),
        "worst_seconds": max(one["seconds"] for one in kills),
        "lost_steps": max(one["lost_steps"] for one in kills),
        "grow_pauses": pauses,
        "step_seconds": _step_seconds(job.lines),
    }


def _calm(lines: Sequence[Line], num_ranks: int) -> bool:
    """Whether all ranks have taken some steps together."""
    steps: dict[int, int] = {}
    for line in lines:
        if line["size"] == num_ranks:
            steps[line["pid"]] = steps.get(line["pid"], 0) + 1
    return len([count for count in steps.values() if count >= CALM_STEPS]) >= num_ranks


def _one_kill(job: Job, number: int) -> dict[str, float]:
    """From the signal until every survivor has committed a step without the dead one."""
    all_ranks = job.ranks
    latest = {line["pid"]: line for line in job.lines[-all_ranks * CALM_STEPS :] if line["size"] == all_ranks}
    pids = sorted(latest)
    victim = pids[number % len(pids)]
    seen = len(job.lines)
    before = time.time()
    os.kill(victim, signal.SIGKILL)

    def after() -> dict[int, Line]:
        """By process: its first step in what came after."""
        first: dict[int, Line] = {}
        for line in job.lines[seen:]:
            is_new = line["pid"] not in latest if job.form == "torchrun" else line["size"] < all_ranks
            if is_new and line["time"] > before:
                first.setdefault(line["pid"], line)
        return first

    num_left = {"torchrun": all_ranks, "horovod": all_ranks // 2}.get(job.form, all_ranks - _num_leaving(job))
    job.wait("the survivors go on", lambda: len(after()) >= num_left)
    first = after().values()
    done = max(line["step"] for line in job.lines if line["pid"] in latest and line["size"] == all_ranks)
    again = min(one["step"] for one in first)
    moments = [float(one["at"] if "at" in one else one["time"]) for one in first]
    return {"seconds": max(moments) - before, "lost_steps": max(0, done - again + 1)}


def _ranks_of(preset: str) -> int:
    """As many as its mesh has, if that is given."""
    mesh = PLANS.get(preset, {}).get("mesh")
    return RANKS if mesh is None else math.prod(mesh.values())


def _num_leaving(job: Job) -> int:
    """The ranks that leave when one is lost: its replica group."""
    mesh = PLANS.get(job.preset, {}).get("mesh", {})
    return math.prod(size for axis, size in mesh.items() if axis != "dp")


def _pauses_of_growth(lines: Sequence[Line], num_ranks: int) -> list[float]:
    """Between the last step of fewer ranks and the first of all, by a process that was there before."""
    by_process: dict[int, list[Line]] = {}
    for line in lines:
        by_process.setdefault(line["pid"], []).append(line)
    longest: dict[int, float] = {}
    for own in by_process.values():
        for one, other in pairwise(own):
            if one["size"] < num_ranks == other["size"]:
                longest[other["step"]] = max(longest.get(other["step"], 0.0), other["time"] - one["time"])
    return list(longest.values())


def _step_seconds(lines: Sequence[Line]) -> float:
    pid = lines[0]["pid"]
    times = [line["time"] for line in lines if line["pid"] == pid]
    return median(b - a for a, b in pairwise(times)) if len(times) > 2 else 0.0


# -- the loss, and the cost of being able to ----------------------------------------------------------------


def _curve(preset: str, num_kills: int) -> dict[str, float]:
    """How far the losses of a run with kills are from those of one without, by step; and how far those of one rank less
    are, undisturbed, which sum in another order."""
    calm, fewer = (
        Job("shardwise", _folder(), preset, steps=(num_kills + 1) * 400, elastic=False, ranks=ranks)
        for ranks in (RANKS, RANKS - 1)
    )
    for job in (calm, fewer):
        job.start()
        try:
            job.wait("the run ends", lambda job=job: job.processes[0].poll() is not None, 600)
        finally:
            job.end()
        job.look()
    killed = Job("shardwise", _folder(), preset)
    _killed(killed, num_kills)
    steps = {line["step"] for line in killed.lines} & {line["step"] for line in calm.lines}
    return {
        "steps": len(steps),
        "largest_relative": _deviation(killed, calm, steps),
        "with_fewer_ranks": _deviation(fewer, calm, steps),
    }


def _deviation(one: Job, other: Job, steps: set[int]) -> float:
    """The largest relative difference of their losses at `steps`."""
    expected = {line["step"]: float(line["loss"]) for line in other.lines}
    found = [(float(line["loss"]), expected[line["step"]]) for line in one.lines if line["step"] in steps]
    return max(abs(loss - of_other) / of_other for loss, of_other in found)


def _steady(job_of: Callable[[bool], Job], num_rounds: int) -> dict[str, Any]:
    """Seconds of a step with and without `--elastic`, in turns, each first in every second round; `over` is the median
    of the rounds' ratios, minus 1. So is `over_cpu`, of the processor time of all ranks, which depends less on what
    else the machine does."""
    found: dict[bool, list[float]] = {False: [], True: []}
    cpu: dict[bool, list[float]] = {False: [], True: []}
    for number in range(num_rounds):
        for elastic in (False, True) if number % 2 == 0 else (True, False):
            job = job_of(elastic)
            job.start()
            try:
                job.wait("the run ends", lambda job=job: job.processes[0].poll() is not None)
            finally:
                job.end()
            job.look()
            found[elastic].append(_step_seconds(job.lines))
            cpu[elastic].append(_step_cpu_seconds(job.lines))
    every = {"all_plain_seconds": found[False], "all_elastic_seconds": found[True]}
    every |= {"all_plain_cpu_seconds": cpu[False], "all_elastic_cpu_seconds": cpu[True]}
    both = {"plain_seconds": median(found[False]), "elastic_seconds": median(found[True])}
    return {**both, "over": _over(found), "over_cpu": _over(cpu), **every}


def _over(found: dict[bool, list[float]]) -> float:
    return median(one / other for one, other in zip(found[True], found[False], strict=True)) - 1


def _step_cpu_seconds(lines: Sequence[Line]) -> float:
    """Of all ranks together: the mean over steps, without the first of each, in which threads are started and memory
    is mapped."""
    by_process: dict[int, list[float]] = {}
    for line in lines:
        by_process.setdefault(line["pid"], []).append(line["cpu"])
    return sum((own[-1] - own[1]) / (len(own) - 2) for own in by_process.values())


def _steady_job(form: str, preset: str, steps: int, ranks: int) -> Callable[[bool], Job]:
    return lambda elastic: Job(form, _folder(), preset, steps, elastic, ranks)


_STEADY = {
    f"zero3, {RANKS} ranks": _steady_job("shardwise", "zero3", 300, RANKS),
    "zero1, 2 ranks, GPT small": _steady_job("gpt", "zero1", 12, 2),
    "zero3, 2 ranks, GPT small": _steady_job("gpt", "zero3", 12, 2),
    "zero3, 2 ranks, GPT small, 4 micro-batches a step": _steady_job("gpt-4", "zero3", 8, 2),
}


# -- what people read ---------------------------------------------------------------------------------------


def _said(name: str, found: dict[str, Any]) -> str:
    return f"{name}: {found['median_seconds']:.2f} s, worst {found['worst_seconds']:.2f} s"


def _show(result: dict[str, Any], console: Console) -> None:
    rows = []
    for name, found in result["forms"].items():
        pauses = found["grow_pauses"]
        rows.append(
            [
                NAMES.get(name, name),
                str(len(found["kills"])),
                f"{found['median_seconds']:.2f} s",
                f"{found['worst_seconds']:.2f} s",
                str(found["lost_steps"]),
                f"{median(pauses):.2f} s" if pauses else "-",
                f"{found['step_seconds'] * 1e3:.1f} ms",
            ]
        )
    headings = ["", "kills", "until a step", "worst", "steps lost", "pause to grow", "step"]
    show_figures(f"kill -9 of one of {RANKS} ranks", headings, rows, console)
    if "curve" in result:
        curve = result["curve"]
        console.print(
            f"losses of {curve['steps']} steps: {curve['largest_relative']:.1e} from those of an undisturbed run, "
            f"relative; those of one rank less, undisturbed, {curve['with_fewer_ranks']:.1e}"
        )
    if "steady" in result:
        for name, found in result["steady"].items():
            console.print(
                f"{name}: a step of {found['plain_seconds'] * 1e3:.1f} ms takes {found['over']:+.1%} elastic, "
                f"{found['over_cpu']:+.1%} of processor time"
            )
    for form, why in result["not_run"].items():
        console.print(f"{NAMES[form]}: not run; {why}", markup=False)
