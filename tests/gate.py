"""What has to pass before anything lands: `make test`, then of the slower tests those that a change touches, the most
relevant first, for as long as there is time. `.ci/run` runs it; tests/pure/test_gate.py tests it.

python3 -m tests.gate               # run it
python3 -m tests.gate --dry-run     # what it would run, and why
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[1]
LANDED = ".ci/landed"
"""Names a commit of the main branch that had passed everything. Who lands something may move it; an older one only
makes changes larger."""

TOTAL_MINUTES, MORE_MINUTES = 22.0, 15.0
"""No test begins later than this after the start, nor later than this after the end of `make test`: what has begun by
then has three minutes to end in, so that all takes at most 25."""
SETUP = {"extras": (".venv-extras/.made", 6.0), "zoo": (".venv-vision/.made", 7.0)}
"""The stamp of an environment, and the minutes that making it takes. With less time left it is not begun."""

# Which tests a path concerns, besides tests that are changed themselves and those that use a changed helper. Names of
# tests are relative to tests/. The longest of the fitting beginnings counts; every room of the package has one, and
# what none fits is like "src/".
EVERY_PLAN = (
    *("ranks/test_late_early.py", "ranks/test_feature_pairs.py", "ranks/test_random_models.py"),
    *("ranks/test_split_random.py", "ranks/test_plain_loops.py", "ranks/test_loops*.py", "ranks/test_presets.py"),
    *("ranks/test_models.py", "ranks/test_checkpoint.py", "extras/test_trainer.py", "extras/test_zoo.py"),
)
PACKAGES = ("extras/test_environment.py", "extras/test_release.py")
ELASTIC = (
    *("*/test_lost_*", "*/test_smaller*", "*/test_elastic*", "*/test_repl*", "ranks/test_buddies.py"),
    *("faults/*", "cluster/*"),
)
DISK = ("*/test_disk*", "*/*_memory.py", "*/test_tier*", "ranks/test_slow_disk.py")
TOUCHES: dict[str, tuple[str, ...]] = {
    "src/": EVERY_PLAN,
    "src/shardwise/runtime/codec": ("ranks/test_codes.py", "*/test_feed*", "*/test_*wires.py", "extras/test_codec*"),
    "src/shardwise/runtime/activations": ("*/test_activation*", "ranks/test_pipeline_memory.py", *DISK),
    "src/shardwise/fit": ("pure/test_clock.py", "pure/test_hardware.py", "pure/test_counted_work.py", *EVERY_PLAN),
    "src/shardwise/fit/calibrate": (
        "pure/test_calibrate.py",
        "pure/test_hardware.py",
        "ranks/test_budget.py",
        "ranks/test_fitting.py",
    ),
    "src/shardwise/checkpoint": ("*/test_checkpoint*", "*/test_sav*", "*/test_re*", "ranks/test_edited*", *ELASTIC),
    "src/shardwise/cli": ("pure/test_cli.py", "*/test_doctor*", "extras/test_report_page.py", "cluster/test_command*"),
    "src/shardwise/comm/": ("ranks/test_comm.py", "ranks/test_between*", "ranks/test_shared*", *EVERY_PLAN, *ELASTIC),
    "src/shardwise/comm/transport/mpi": ("*/test_*mpi*",),
    "src/shardwise/errors.py": EVERY_PLAN,
    "src/shardwise/inference.py": ("ranks/test_load_for_inference.py", "*/test_*inference*", "extras/test_vllm*"),
    "src/shardwise/memory": (*EVERY_PLAN, *DISK, "ranks/test_shared_*"),
    "src/shardwise/parallel/": (*EVERY_PLAN, "ranks/test_conversions.py"),
    "src/shardwise/parallel/chunked_logits": ("ranks/test_chunked_logits.py", "ranks/test_cut_logits.py"),
    "src/shardwise/parallel/fp8": ("*/test_fp8.py", "ranks/test_conversions.py"),
    "src/shardwise/plan": (*EVERY_PLAN, "ranks/test_refusals.py", "pure/test_placement.py"),
    "src/shardwise/program": (*EVERY_PLAN, "pure/test_*program*", "pure/test_*schedule*"),
    "src/shardwise/runtime": EVERY_PLAN,
    "src/shardwise/sharded": EVERY_PLAN,
    "src/shardwise/system": (*EVERY_PLAN, *ELASTIC),
    "src/shardwise/testing.py": EVERY_PLAN,
    "src/shardwise/version.py": PACKAGES,
    "src/shardwise/data": ("*/test_data*", "ranks/test_uneven*", "ranks/test_loops*.py"),
    "src/shardwise/elastic": ELASTIC,
    "src/shardwise/engine.py": (*EVERY_PLAN, *ELASTIC),
    "src/shardwise/parallel/experts": (
        "ranks/test_expert*",
        "ranks/test_lost_experts.py",
        "ranks/test_lost_groups.py",
        "ranks/test_deepspeed_moe.py",
        "extras/test_expert_models.py",
    ),
    "src/shardwise/checkpoint/formats": (
        "*/test_format*",
        "ranks/test_checkpoint_conv*",
        "ranks/test_weights.py",
        "pure/test_hostile*",
    ),
    "src/shardwise/checkpoint/own_rows": ("*/test_published_*", "ranks/test_samplers.py"),
    "src/shardwise/checkpoint/publish": ("*/test_published_*", "ranks/test_samplers.py"),
    "src/shardwise/init": ("*/test_deferred*", "*/test_loading*", "*/test_larger*", "extras/test_deepspeed_loading.py"),
    "src/shardwise/integrations/": ("extras/test_integration_docs.py", "extras/test_takeover.py", "extras/test_wrap*"),
    "src/shardwise/integrations/accelerate": (
        "extras/test_accelerate.py",
        "extras/test_takeover.py",
        "extras/test_diff*",
    ),
    "src/shardwise/integrations/verl.py": ("extras/test_verl.py",),
    "src/shardwise/integrations/vllm": ("extras/test_vllm*",),
    "src/shardwise/integrations/deepspeed": (
        "*/test_deepspeed*",
        "*/test_as_deepspeed.py",
        "extras/test_hf_deepspeed.py",
    ),
    "src/shardwise/integrations/fabric": ("extras/test_fabric.py",),
    "src/shardwise/integrations/hf_": ("extras/test_hf*", "extras/test_trainer.py"),
    "src/shardwise/integrations/horovod": ("*/test_*horovod*", "cluster/test_command_lines.py"),
    "src/shardwise/integrations/lightning": ("extras/test_lightning.py", "extras/test_fabric.py"),
    "src/shardwise/integrations/mpi": ("*/test_*mpi*",),
    "src/shardwise/integrations/peft": ("*/test_adapters*", "extras/test_prompt_learning.py", "extras/test_trainer.py"),
    "src/shardwise/integrations/ray": ("extras/test_ray.py",),
    "src/shardwise/integrations/tr": (
        *("extras/test_trainer.py", "extras/test_trl*", "extras/test_stages.py", "extras/test_takeover.py"),
    ),
    "src/shardwise/launch": ("*/test_launch*", "extras/test_other_launchers.py", "cluster/*"),
    "src/shardwise/launch/elastic": ELASTIC,
    "src/shardwise/launch/places/k8s": ("extras/test_k8s*", "*/test_pods.py"),
    "src/shardwise/launch/places/mpi": ("*/test_*mpi*",),
    "src/shardwise/launch/places/slurm": ("cluster/test_*slurm.py",),
    "src/shardwise/observe": ("*/test_run_*", "ranks/test_timeline.py", "extras/test_tr[ac]*", "extras/test_report*"),
    "src/shardwise/optim": ("*/test_*optim*", "ranks/test_ada*", "ranks/test_unsplit*", "extras/test_*adafactor.py"),
    "src/shardwise/parallel/pipeline": (
        "ranks/test_pipeline*",
        "ranks/test_models_in_stages.py",
        "ranks/test_lost_stages.py",
        "ranks/test_lost_groups.py",
        "ranks/test_sequence_in_stages.py",
        "ranks/test_inference*",
    ),
    "src/shardwise/optim/precision": (
        "ranks/test_fp*",
        "ranks/test_exact*",
        "ranks/test_quantized*",
        "extras/test_bits*",
        *EVERY_PLAN,
    ),
    "src/shardwise/sharded/engine_report": ("*/test_run_*", "extras/test_report_page.py"),
    "src/shardwise/parallel/sequence": ("ranks/test_sequence*", "ranks/test_head_counts.py"),
    "src/shardwise/system/telemetry": ("extras/test_trackers.py",),
    "src/shardwise/parallel/tensor/": (
        "ranks/test_tensor_*",
        "ranks/test_split*",
        "ranks/test_head*",
        "extras/test_tensor*",
    ),
    "src/shardwise/system/disk": (*DISK, "ranks/test_host*"),
    "src/shardwise/sharded/unfreezing": ("ranks/test_unfreez*", "ranks/test_frozen*"),
    "tests/": (),
    "tests/extras/requirements.txt": PACKAGES,
    "tests/extras/vision.txt": ("extras/test_zoo.py",),
    "docs/": (
        "ranks/test_docs.py",
        "extras/test_site.py",
        "extras/test_integration_docs.py",
        "extras/test_tutorial.py",
    ),
    "README.md": ("ranks/test_docs.py", "extras/test_release.py", "extras/test_site.py"),
    "mkdocs.yml": ("extras/test_site.py",),
    "examples/": ("processes/test_main_job.py", "extras/test_tutorial.py"),
    "benchmarks/": ("pure/test_bench_parts.py",),
    "Dockerfile": ("extras/test_image.py",),
    "pyproject.toml": PACKAGES,
    "constraints.txt": PACKAGES,
    "Makefile": PACKAGES[:1],
    "CHANGELOG.md": (),
    ".": (),
}


@dataclass(frozen=True)
class Check:
    """A `make` target and which files of tests it runs: all that it has, if there are none."""

    target: str
    files: tuple[str, ...] = ()

    def command(self, *more: str) -> list[str]:
        return ["make", self.target, *([f"TESTS={' '.join(self.files)}"] if self.files else []), *more]


def checks(changed: Iterable[str] | None, tests: Mapping[str, str]) -> list[Check]:
    """What to run after `make test`, the most relevant first. `changed` are paths from the root, None if they are not
    known, which is taken for all; `tests` are the texts of all Python files of tests/ by their paths."""
    files = [path for path in tests if Path(path).name.startswith("test_")]
    if changed is None:
        return _by_target(files, tests)
    changed = sorted(changed)
    itself = [path for path in files if path in changed]
    concerned = [path for path in files if any(_concerns(one, path) for one in changed)]
    by_helper: set[str] = set().union(*(_users(one, tests) for one in changed if one in tests and one.count("/") > 1))
    users = [path for path in files if path in by_helper]
    earlier: set[str] = set()
    result = []
    for group in (itself, concerned, users):
        result += _by_target([path for path in group if path not in earlier], tests)
        earlier.update(group)
    return result


def _concerns(changed: str, test: str) -> bool:
    beginning = max((one for one in TOUCHES if changed.startswith(one)), key=len, default="src/")
    return any(fnmatch(test, f"tests/{pattern}") for pattern in TOUCHES[beginning])


def _users(changed: str, tests: Mapping[str, str]) -> set[str]:
    """Which files name a helper of theirs, or name one that does."""
    found, new = set(), {changed}
    while new:
        names = {Path(path).stem for path in new if not Path(path).name.startswith("test_") and "conftest" not in path}
        new = {path for path, text in tests.items() if path not in found and any(_names(text, name) for name in names)}
        found |= new
    return found


def _names(text: str, helper: str) -> bool:
    return f"import {helper}" in text or f"from {helper} " in text or f"{helper}.py" in text or f".{helper} " in text


def _by_target(files: Iterable[str], tests: Mapping[str, str]) -> list[Check]:
    found: dict[str, list[str]] = {"thorough": [], "extras": [], "zoo": [], "test-cluster": []}
    for path in sorted(files):
        if path.startswith("tests/extras/"):
            found["zoo" if path.endswith("/test_zoo.py") else "extras"].append(path)
        elif path.startswith("tests/cluster/"):
            found["test-cluster"].append(path)
        elif any(word in tests[path] for word in ("thorough_only", "sampled", "varies", "THOROUGH", "drawn")):
            found["thorough"].append(path)
    return [Check(target, tuple(paths)) for target, paths in found.items() if paths]


def changed_paths(git: Callable[..., str], landed: str) -> tuple[list[str] | None, str]:
    """What has changed, and since when: since this branch left origin's main or, on main itself, since the commit
    `landed`. None where neither is known: in a shallow clone, say. `git` runs a command; "" means that it failed."""
    head = git("rev-parse", "HEAD")
    for why, name in (("origin/main", "origin/main"), (LANDED, landed)):
        base = git("merge-base", "HEAD", name) if name else ""
        if base and base != head:
            paths = git("diff", "--name-only", "--no-renames", base).split("\n")
            return [path for path in paths if path], f"since {base[:12]} ({why})"
    return None, f"unknown: HEAD is origin's main, and its history has no commit that {LANDED} names"


def share_until(now: float, end: float, num_left: int) -> float:
    """When the last test of the next of `num_left` checks may begin: it has half of what time is left, the last all."""
    return now + max(end - now, 0.0) / min(num_left, 2)


def passes(check: Check, run: Callable[[list[str]], bool], said: list[str], *more: str) -> bool:
    """Whether it does, at once or, what failed, alone: that is a defect until it is explained, so it is said."""
    if run(check.command(*more)):
        return True
    print(f"make {check.target} failed. What failed is run once more, alone:", flush=True)
    if not run(check.command("AGAIN=1")):
        return False
    said.append(f"make {check.target}: a test failed beside others and passed alone; see its output above.")
    return True


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


def _run(command: list[str]) -> bool:
    return subprocess.run(command, cwd=ROOT, check=False).returncode == 0


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python3 -m tests.gate", description="What has to pass before anything lands."
    )
    minutes = float(os.environ.get("GATE_MINUTES", TOTAL_MINUTES))
    parser.add_argument("--minutes", type=float, default=minutes, help="after which no test begins (GATE_MINUTES)")
    parser.add_argument("--dry-run", action="store_true", help="only print what would be run")
    options = parser.parse_args(words)
    started = time.time()

    landed = ROOT / LANDED
    paths, since = changed_paths(_git, landed.read_text().strip() if landed.exists() else "")
    tests = {str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / "tests").rglob("*.py")}
    more = checks(paths, tests)
    print(f"Changes {since}{'' if paths is None else f': {len(paths)} files'}. What runs after make test:")
    for check in more:
        print(f"  {shlex.join(check.command())}")
    sys.stdout.flush()
    if options.dry_run:
        return 0

    said: list[str] = []
    if not passes(Check("test"), _run, said):
        return 1
    end = min(started + 60 * options.minutes, time.time() + 60 * MORE_MINUTES)
    for place, check in enumerate(more):
        stamp, setup_minutes = SETUP.get(check.target, ("", 0.0))
        setup = 0.0 if (ROOT / stamp).exists() else 60 * setup_minutes
        now = time.time()
        if now + setup >= end:
            said.append(f"Left out, as there was no time: {shlex.join(check.command())}")
            continue
        until = min(end, share_until(now, end, len(more) - place) + setup)
        if not passes(check, _run, said, f"TESTS_UNTIL={until:.0f}"):
            return 1
    print("\n".join([*said, f"Took {(time.time() - started) / 60:.0f} minutes."]), flush=True)
    version = (
        "import platform, torch; print('Ran with Python', platform.python_version(), 'and torch', torch.__version__)"
    )
    return 0 if _run([".venv/bin/python", "-c", version]) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
