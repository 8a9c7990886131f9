"""Lightning's Fabric on our engine, compared with its own DDP strategy."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import fabric_jobs as jobs
import pytest
from lightning.fabric.strategies import STRATEGY_REGISTRY
from rank_processes import begin, on_ranks
from test_lightning import same

from shardwise.integrations.fabric import ShardwiseStrategy

pytestmark = pytest.mark.timeout(600)


def test_a_loop_and_its_checkpoints(tmp_path: Path) -> None:
    """Under several plans and with split models, compared with DDP, also from each other's checkpoints."""
    folder = str(tmp_path)
    plain = on_ranks(2, jobs.by_ddp, folder)
    ours = on_ranks(2, jobs.by_plans, folder)
    cut = on_ranks(4, jobs.split, folder)
    staged = on_ranks(4, jobs.in_stages, folder)
    assert len(plain[0][0]["losses"]) == 24 // 2
    for rank in range(4):
        expected, resumed = plain[rank // 2]
        found, again, other = cut[rank]
        same(found, expected, "losses", "norms", "state")
        for run in (again, other):
            same(run, resumed, "losses", "norms", "state")
        assert again["rest"] == ["more"]
        found, again = staged[rank]
        expected, resumed = plain[rank % 2]
        same(found, expected, "losses", "norms", "state")
        same(again, plain[rank // 2][1], "losses", "norms", "state")
    for rank in range(2):
        expected, resumed = plain[rank]
        found, again, single, from_theirs = ours[rank]
        same(found, expected, "losses", "norms", "state")
        same(single, expected, "losses", "norms", "state")
        for run in (again, from_theirs):
            same(run, resumed, "losses", "norms", "state")
        assert again["rest"] == ["more"]
    assert (tmp_path / "ours.ckpt" / "meta.pt").is_file()
    assert (tmp_path / "single.ckpt").is_file()
    back = on_ranks(2, jobs.theirs_again, folder)[0]
    same(back, plain[0][1], "losses", "norms", "state")


def test_precisions() -> None:
    over_fp32 = {"preset": "zero3", "precision": "fp32"}
    plain = begin(2, jobs.precisions, [(None, "bf16-mixed"), (None, "32-true")])
    ours = on_ranks(2, jobs.precisions, [(over_fp32, "bf16-mixed"), ("zero2", "bf16-true"), ("zero2", "16-mixed")])[0]
    mixed, full = plain()[0]
    same(ours[0], mixed, "losses", within=1e-3)
    for run, dtype in zip(ours[1:], ("torch.bfloat16", "torch.float16"), strict=True):
        assert run["dtype"] == dtype
        same(run, full, "losses", "norms", within=0.1)


REFUSED = {
    "clipping": "clip_grad_norm 1.0, but with Fabric the training loop does this",
    "ddp's own": "find_unused_parameters= is for DistributedDataParallel",
    "state": "state_dict_type is 'some'",
    "precision": "precision '64-true' is not supported with Fabric",
    "a second optimizer": "is already sharded with another optimizer",
    "no model": "has the optimizer 'optimizer' without its model",
    "no state": "has the sharded models 'model'",
    "missing": "has no 'step'",
    "not finite": "The norm of the gradients is (nan|inf)",
}


def refusals(folder: str) -> dict[str, str]:
    found = {}
    for what in REFUSED:
        try:
            jobs.refused(what, folder)
        except Exception as error:
            found[what] = str(error)
    return found


def test_refused(tmp_path: Path) -> None:
    found = on_ranks(1, refusals, str(tmp_path))[0]
    for what, sentence in REFUSED.items():
        assert re.search(sentence, found.get(what, "nothing"), re.DOTALL), (what, found.get(what))


def test_strategies_have_the_names_of_presets() -> None:
    strategy = STRATEGY_REGISTRY.get("shardwise_zero3_kept")
    assert isinstance(strategy, ShardwiseStrategy)
    assert strategy.plan.preset == "zero3-kept"


SCRIPT = """
    import json, sys
    from {package} import Fabric
    import torch
    fabric = Fabric(accelerator="cpu", devices=8, strategy="{strategy}")
    fabric.launch()
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 1)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    rows = torch.arange(32.0).sin().reshape(8, 4)
    loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(rows, batch_size=2))
    losses = []
    for batch in loader:
        loss = model(batch).square().mean()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(fabric.all_reduce(loss.detach()).item())
    if fabric.is_global_zero:
        told = [losses, type(fabric.strategy).__name__, fabric.world_size]
        open(sys.argv[1], "w").write(json.dumps(told))
"""


@pytest.mark.parametrize("package", ["lightning", "lightning_fabric"])
def test_an_unmodified_script(package: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("\n".join(line[4:] for line in SCRIPT.format(package=package, strategy="ddp").splitlines()))
    command = ["-m", "shardwise", "launch", "--nproc", "2", "--shardwise", "zero2", str(script), str(tmp_path / "told")]
    here = str(Path(__file__).parent)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": here}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    losses, strategy, size = json.loads((tmp_path / "told").read_text())
    assert (strategy, size, len(losses)) == ("ShardwiseStrategy", 2, 2)
    assert losses[1] < losses[0]
