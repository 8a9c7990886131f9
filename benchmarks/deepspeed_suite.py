"""DeepSpeed's own unit tests on shardwise's `deepspeed`: `python -m benchmarks.deepspeed_suite CHECKOUT`.

CHECKOUT is a clone of DeepSpeed's repository on this disk, in which nothing is written; nothing is fetched. Each file
runs in a process of its own (`deepspeed_suite_plugin.py`), on CPUs. Prints versions, and counts of tests by what became
of them and why. `--results FOLDER` keeps one JSON object for each test, in a file for each of DeepSpeed's, written as
tests end; a later run with the same folder goes on with what is not there, and `--read FOLDER` counts what is. With
`--write FILE` writes them with the versions as `benchmarks/results/deepspeed-suite-*.json` has them. With
`--each-test N` at most N parametrisations of each test run, drawn by a hash of their names; the
others count as not drawn. With `--fp32`, which is for tests that compare bf16 with DDP's to the last bit (`--again
fails`), nothing is in bf16 or fp16; such results count apart.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from benchmarks.machine import header
from benchmarks.results_file import write_result
from shardwise.integrations.deepspeed import facade
from shardwise.integrations.deepspeed.facade import VERSION

LEFT_OUT = {
    "autotuning": "its tuner",
    "checkpoint/test_autotp": "rewriting of Transformers' models by its tensor parallelism",
    "compile": "passes of its compiler",
    "compression": "quantization in training",
    "hybrid_engine": "kernels for inference",
    "inference": "inference",
    "linear": "quantized base weights",
    "module_inject": "rewriting of Transformers' models by its tensor parallelism",
    "model_parallelism": "rewriting of Transformers' models by its tensor parallelism",
    "ops": "CUDA kernels, and its build of them",
    "profiling": "its FLOPs profiler",
    "runtime/compile": "its compiler",
    "runtime/comm": "compressed collectives",
    "runtime/half_precision/onebit": "compressing optimizers",
    "runtime/rollout": "servers for generation",
    "runtime/tensor_parallel": "rewriting of Transformers' models by its tensor parallelism",
    "runtime/zenflow": "another update rule",
    "sequence_parallelism": "its attention layers",
    "sequence": "kernels",
    "ulysses_alst": "its attention layers",
    "v1/compile": "passes of its compiler",
    "v1/moe/test_autoep": "rewriting of Transformers' models",
    "v1/nvme": "its own disk I/O",
    "v1/ops": "kernels",
    "v1/pin_memory": "its own pinned memory",
}
"""Folders and files that test parts of DeepSpeed which have no counterpart here, and what they test."""

_FILE_SECONDS = 3600
_COMMAND_LINE = """#!/bin/sh
exec {python} -c 'import sys; from shardwise.cli.main import main; sys.exit(main(["deepspeed", *sys.argv[1:]]))' "$@"
"""
PASSED, IN_FP32, SKIPPED, REFUSED, INTERNALS = "passed", "passed in fp32", "skipped", "refused", "reads internals"
ACCEPTED, OURS, NOT_DRAWN = "accepts more", "fails", "not drawn"
VERDICTS = (PASSED, IN_FP32, SKIPPED, REFUSED, INTERNALS, ACCEPTED, OURS, NOT_DRAWN)
"""What becomes of a test. `IN_FP32`: in bf16 it fails, by rounding. `REFUSED`: shardwise names what it does not
support. `INTERNALS`: the test uses what DeepSpeed does not document as its interface. `ACCEPTED`: DeepSpeed refuses
what works here. `OURS`: anything else."""
_INTERNAL_WORDS = re.compile(
    r"""(?<=[.'"])ds_[a-z]\w*|\b(pre|post)_bwd_fn\b|\bbit16_groups\w*|\bzero3_linear_wrap\b|\baccel_path_logs\b|"""
    r"""\bcall_counts\b|\bdeepspeed_experts\b|accelerator\.__path__|\bnumel\(\) == 0|\blinear_bk\b|"""
    r"""\bconvert_to_zero_parameters\b"""
)
"""What DeepSpeed leaves on parameters, modules and optimizers, and what tests count and log of its own functions."""
_INTERNALS_OF = {
    "test_nvtx.py::test_instrument_w_nvtx": "which accelerator deepspeed.utils.nvtx has imported",
    "::test_coalesce_issues_fewer_collectives": "calls of deepspeed.comm from its own implementation",
    "test_pipe_module.py::TestPipeModuleSequential": "which layers a PipelineModule has before initialize()",
}
"""What tests look at whose failing line does not show it, by a part of their names: these replace or count functions
that DeepSpeed calls, and sum the sizes of layers over ranks before they are divided."""
_STAND_IN = re.compile(
    r"<class 'benchmarks\.deepspeed_suite_plugin\.(deepspeed\.[\w.]+)'>|"
    r"Expected a BaseException type, but got '(deepspeed\.[\w.]+)'|_StandIn"
)
_OTHER_DEVICES = ("module 'torch.cpu' has no attribute", "need torch >=", "Cannot access accelerator device when none")
_REFUSALS = ("ConfigError", "StateError", "ModelError", "CheckpointError", "DataError")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.deepspeed_suite", description=__doc__)
    parser.add_argument("checkout", type=Path, help="a clone of DeepSpeed's repository")
    parser.add_argument("--only", default="", help="a regular expression for the paths of test files")
    parser.add_argument("--all", action="store_true", help="also what tests parts that shardwise does not have")
    parser.add_argument("--files-at-once", type=int, default=2)
    parser.add_argument("--seconds", type=int, default=60, help="after which a test on several ranks counts as hanging")
    parser.add_argument("--each-test", type=int, default=0, help="parametrisations to draw of each test; 0 for all")
    parser.add_argument("--results", type=Path, help="a folder for the results")
    parser.add_argument("--again", nargs="*", default=[], choices=VERDICTS, help="of --results, what to run again")
    parser.add_argument("--fp32", action="store_true", help="run nothing in bf16 or fp16")
    parser.add_argument("--read", type=Path, help="count the results of an earlier run")
    parser.add_argument("--write", type=Path, help="a file for the counts")
    parser.add_argument("--note", default="", help="a note for --write")
    parser.add_argument("--each", action="store_true", help="list the tests of each cause")
    options = parser.parse_args()
    checkout, begun = options.checkout.resolve(), header(options.note)
    print(versions(checkout))
    if options.read is not None:
        results = [one for path in sorted(options.read.rglob("*.jsonl")) for one in _lines(path)]
    else:
        with tempfile.TemporaryDirectory() as folder:
            kept = Path(folder) if options.results is None else options.results.resolve()
            results = _run_all(checkout, kept, options)
    print(summary(results, each=options.each))
    if options.write is not None:
        write_result(options.write, {**begun, "tested": versions(checkout), **counted(results)})


def versions(checkout: Path) -> str:
    """The versions of what is tested and what tests it."""
    theirs = (checkout / "version.txt").read_text().strip()
    packages = " ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "pytest"))
    return f"tests of DeepSpeed {theirs} on shardwise's interface of DeepSpeed {VERSION}; {packages}"


def files_to_run(checkout: Path, *, only: str = "", everything: bool = False) -> list[Path]:
    """The test files to run, relative to the folder `tests`."""
    folder = checkout / "tests" / "unit"
    found = sorted(path.relative_to(folder) for path in folder.rglob("test_*.py"))
    kept = [path for path in found if everything or not any(_is_within(path, part) for part in LEFT_OUT)]
    return [Path("unit") / path for path in kept if re.search(only, path.as_posix())]


def _is_within(path: Path, part: str) -> bool:
    return path.as_posix().startswith(part if "test_" in part else f"{part}/")


def _run_all(checkout: Path, folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    files = files_to_run(checkout, only=options.only, everything=options.all)
    results: list[dict[str, Any]] = []
    with ThreadPoolExecutor(options.files_at_once) as pool:
        running = {}
        for path in files:
            record = folder / path.with_suffix(".jsonl")
            record.parent.mkdir(parents=True, exist_ok=True)
            _forget(record, {NOT_DRAWN, *options.again})
            running[pool.submit(_run, checkout, path, record, options)] = path
        for done in as_completed(running):
            counts = Counter(verdict(one)[0] for one in done.result())
            print(f"{running[done]}: {', '.join(f'{count} {name}' for name, count in counts.items())}", flush=True)
            results += done.result()
    return results


def _forget(record: Path, verdicts: set[str]) -> None:
    """Leave in a file of results what has other `verdicts`: what is there is not run again."""
    kept = [one for one in _lines(record) if verdict(one)[0] not in verdicts] if record.exists() else []
    record.write_text("".join(json.dumps(one) + "\n" for one in kept))


def _run(checkout: Path, path: Path, record: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The results of one file, in a process of its own."""
    root = Path(__file__).resolve().parent.parent
    with tempfile.TemporaryDirectory() as folder:
        command_line = Path(folder) / "deepspeed"
        command_line.write_text(_COMMAND_LINE.format(python=sys.executable))
        command_line.chmod(0o755)
        paths = (str(root), *filter(None, [os.environ.get("PYTHONPATH")]))
        environment = {
            **os.environ,
            "PATH": os.pathsep.join((folder, os.environ.get("PATH", ""))),
            "PYTHONPATH": os.pathsep.join(paths),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "LOCAL_SIZE": "4",  # the devices that DeepSpeed counts on a CPU
            "HF_HUB_OFFLINE": "1",
            "DEEPSPEED_SUITE_RESULTS": str(record),
            "DEEPSPEED_SUITE_SECONDS": str(options.seconds),
            "DEEPSPEED_SUITE_EACH_TEST": str(options.each_test),
            "DEEPSPEED_SUITE_FP32": str(int(options.fp32)),
        }
        plugin = ["-p", "benchmarks.deepspeed_suite_plugin", "-p", "no:cacheprovider", "-p", "no:randomly"]
        limits = [f"--timeout={2 * options.seconds}", f"--basetemp={folder}/tmp"]
        kinds = ["-o", "addopts=", "-m", "not nightly"]  # those that DeepSpeed runs one by one, too
        command = [sys.executable, "-m", "pytest", *plugin, *limits, *kinds, "-q", str(path)]
        place = checkout / "tests"
        try:
            ended = subprocess.run(
                command, cwd=place, env=environment, capture_output=True, text=True, check=False, timeout=_FILE_SECONDS
            )
            is_done, words = ended.returncode in (0, 1, 2, 5), (ended.stdout + ended.stderr)[-1500:]
        except subprocess.TimeoutExpired:
            is_done, words = False, f"It took more than {_FILE_SECONDS} s."
        if not is_done:
            crash = {"test": str(path), "outcome": "failed", "type": "Crash", "message": words, "trace": words}
            with record.open("a") as file:
                file.write(json.dumps(crash) + "\n")
        return _lines(record)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def verdict(result: dict[str, Any]) -> tuple[str, str]:
    """What became of a test, and its cause in a few words."""
    if result["outcome"] == NOT_DRAWN:
        return NOT_DRAWN, result["test"].partition("[")[0]
    if result["outcome"] == "passed":
        return (IN_FP32, result["test"].partition("[")[0]) if "precision" in result else (PASSED, "")
    if result["outcome"] != "failed":
        message = result.get("message", "")
        found = re.search(r"'(\w+)' object has no attribute '(ds_\w+)'", message)
        return (SKIPPED, message[:110]) if found is None else (INTERNALS, ".".join(found.groups()))
    kind, message = result["type"].rpartition(".")[2], " ".join(result["message"].split())
    if kind == "InternalsError":
        return INTERNALS, message
    if stand_in := _STAND_IN.search(message):
        return INTERNALS, next(filter(None, stand_in.groups()), "a number of DeepSpeed's own parts")
    if package := re.search(r"No package metadata was found for The '(\w+)", message):
        return SKIPPED, f"needs the package {package[1]}"
    if kind == "ModuleNotFoundError" and (package := re.search(r"No module named '(?!deepspeed)([\w.]+)'", message)):
        return SKIPPED, f"needs the package {package[1]}"
    if (kind, message[:13]) == ("Failed", "DID NOT RAISE") or (kind, message[:9]) == ("AssertionError", "Expected "):
        return ACCEPTED, result["test"].partition("[")[0]
    if any(words in message for words in _OTHER_DEVICES):
        return SKIPPED, "needs another device than a CPU"
    if kind == "SystemExit":
        return REFUSED, "by a sentence of the command line"
    if kind == "AssertionError" and "Regex pattern did not match" in message:
        return REFUSED, f"in other words: {message.partition('Actual message: ')[2][:90]}"
    if kind in ("ImportError", "ModuleNotFoundError", "AttributeError") and (name := _name_in(message)):
        return INTERNALS, name
    for part, what in _INTERNALS_OF.items():
        if part in result["test"]:
            return INTERNALS, what
    line = _failing_line(result["trace"]) or result["trace"]
    named = re.search(r"isinstance\(.+, (\w+)\)", line)
    if kind == "AssertionError" and named and not any(named[1] in content for content in facade._modules().values()):
        return INTERNALS, f"the class {named[1]}"
    if word := _INTERNAL_WORDS.search(line + message if kind == "KeyError" else line):
        return INTERNALS, word[0]
    words = re.sub(r"\d+", "N", message)[:110]
    return (REFUSED if kind in _REFUSALS else OURS), f"{kind}: {words}"


def _failing_line(trace: str) -> str:
    """The last line of one of DeepSpeed's test files in a traceback."""
    lines = trace.splitlines()
    places = [index for index, line in enumerate(lines[:-1]) if "/tests/unit/" in line and "unit/common.py" not in line]
    return lines[places[-1] + 1] if places else ""


def _name_in(message: str) -> str | None:
    """What an error says is not there."""
    patterns = (
        r"^([\w .()]+?) is not supported by shardwise",
        r"cannot import name '(\w+)' from '([\w.]+)'",
        r"module '(deepspeed[\w.]*)' has no attribute '(\w+)'",
        r"No module named '(deepspeed[\w.]*)'",
        r"'([\w.]+)' object has no attribute '(\w+)'",
        r"type object '(\w+)' has no attribute '(\w+)'",
        r"^(\w+) ?\(.*\) has no attribute '(\w+)'",
    )
    for pattern in patterns:
        if found := re.search(pattern, message):
            return ".".join(found.groups())
    return None


def counted(results: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Counts by verdict, by file, and by cause."""
    totals = Counter(dict.fromkeys(VERDICTS, 0))
    files: dict[str, Counter[str]] = {}
    causes: dict[str, Counter[str]] = {}
    for one in results:
        name, cause = verdict(one)
        totals[name] += 1
        files.setdefault(one["test"].partition("::")[0], Counter())[name] += 1
        if name in (OURS, IN_FP32, ACCEPTED, REFUSED, INTERNALS, SKIPPED):
            causes.setdefault(name, Counter())[cause] += 1
    return {
        "tests": totals,
        "files": files,
        "causes": {name: dict(ones.most_common()) for name, ones in causes.items()},
    }


def summary(results: Iterable[dict[str, Any]], *, each: bool = False) -> str:
    """Counts by verdict, then by cause."""
    causes: dict[tuple[str, str], list[str]] = {}
    for one in results:
        causes.setdefault(verdict(one), []).append(one["test"])
    totals = Counter(dict.fromkeys(VERDICTS, 0))
    for (name, _), tests in causes.items():
        totals[name] += len(tests)
    lines = [f"{sum(totals.values())} tests: {', '.join(f'{count} {name}' for name, count in totals.items())}"]
    for name in (OURS, IN_FP32, ACCEPTED, REFUSED, INTERNALS, SKIPPED):
        lines.append(f"\n{name}:")
        ordered = sorted((item for item in causes.items() if item[0][0] == name), key=lambda item: -len(item[1]))
        for (_, cause), tests in ordered:
            lines.append(f"{len(tests):5}  {cause}")
            lines += [f"         {test}" for test in tests] if each else []
    return "\n".join(lines)


if __name__ == "__main__":
    main()
