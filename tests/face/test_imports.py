"""What `import shardwise` brings in beyond torch. Time would depend on the machine, and modules are what takes it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from shardwise.cli.main import COMMANDS
from tests.patience import PATIENCE
from tests.thorough import sampled

SCRIPT = """
import json, sys
{first}
before = set(sys.modules)
import shardwise
{then}
print(json.dumps(sorted(set(sys.modules) - before)))
"""

COLLECTIONS = "import gc; collections = []; gc.callbacks.append(lambda *what: collections.append(what))"

FOR_PEOPLE = {"rich", "yaml", "matplotlib", "safetensors", "transformers", "asyncio", "http", "unittest"}
"""What only some commands and functions need."""
UNUSED = {"tomllib", "torch._dynamo", "torch.distributed.checkpoint"}
"""What the engine does without until somebody asks for it: a plan file, a graph, a checkpoint of others."""


def brought_in(first: str, then: str) -> list[str]:
    script = SCRIPT.format(first=first, then=then)
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE, check=True)
    found: list[str] = json.loads(run.stdout)
    return found


def test_to_shard_a_model_takes_little_beyond_torch() -> None:
    """330 modules of our own and 40 of pydantic took half of torch's own time (0.44 beside 0.87 s of processor time);
    290 took 0.93 of that. Each package more would be felt by every rank of every job. Pipelines, split layers and
    sequences, our own optimizers and a change of plan are loaded by those who use them. Garbage, of which torch has
    much to look through, is not looked for meanwhile."""
    then = "shardwise.shard; assert gc.isenabled() and len(collections) < 5"
    found = brought_in(f"import torch; {COLLECTIONS}", then)
    packages = {name.partition(".")[0] for name in found if not name.startswith("_")}
    others = packages - {"shardwise", *sys.stdlib_module_names}
    assert others <= {
        "pydantic",
        "pydantic_core",
        "annotated_types",
        "typing_inspection",
        "typing_extensions",
        "psutil",
    }
    assert not packages & FOR_PEOPLE
    assert not UNUSED & set(found)
    assert not [name for name in found if name.startswith(("shardwise.cli", "shardwise.launch", "shardwise.observe"))]
    assert len([name for name in found if not name.startswith("shardwise")]) < 80, found
    rare = ("parallel.pipeline", "parallel.tensor.regions", "parallel.sequence.parallel", "optim.muon")
    assert not {f"shardwise.{name}" for name in rare} & set(found)
    assert len(found) <= 380, "see `python -X importtime`"


@pytest.mark.parametrize("then", ["", "import shardwise.launch.worker, shardwise.launch"])
def test_what_has_not_been_asked_for_yet_costs_nothing(then: str) -> None:
    """A rank's first lines, too, leave torch to the script."""
    packages = {name.partition(".")[0] for name in brought_in("", then)}
    assert packages - sys.stdlib_module_names == {"shardwise"}


@sampled
@pytest.mark.parametrize("verb", ["launch", "deepspeed", "horovodrun", "accelerate"])
def test_the_launcher_reports_mistakes_before_torch_is_imported(verb: str) -> None:
    assert "torch" not in brought_in("", f"import shardwise.cli.main, shardwise.cli.{verb}")


def test_doctor_needs_nothing_of_the_engine() -> None:
    """On a busy machine that would take it another quarter of what importing torch takes."""
    found = brought_in("import torch", "import shardwise.cli.torch_facts, shardwise.cli.loopback_rank")
    ours = {name.split(".")[1] for name in found if name.startswith("shardwise.")}
    assert ours <= {"cli", "errors", "system", "version"}


HEAVY = {"torch", "numpy", "matplotlib", "safetensors", "pandas", "transformers", "accelerate", "mpi4py"}
"""What no command needs to print its help: each takes a tenth of a second or more."""
PLANS = {"pydantic", "yaml"}
"""What reads plans. `explain` has options for what a plan may say."""


@sampled
@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_imports_nothing_that_takes_long(command: str | None) -> None:
    words = ["--help"] if command is None else [command, "--help"]
    then = (
        "import contextlib, io; from shardwise.cli.main import main\n"
        f"with contextlib.redirect_stdout(io.StringIO()) as told: assert main({words}) == 0\n"
        "assert 'usage' in told.getvalue()"
    )
    packages = {name.partition(".")[0] for name in brought_in("", then)}
    assert not packages & (HEAVY if command == "explain" else HEAVY | PLANS)
