"""Lightning's Trainer on our engine, compared with its own DDP strategy."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning_jobs as jobs
import pytest
import torch
from lightning.pytorch.strategies import StrategyRegistry
from rank_processes import begin, on_ranks

from shardwise.integrations.lightning import ShardwiseStrategy
from shardwise.integrations.lightning_parts.settings import PRESETS
from shardwise.plan.placement import PRESETS as KNOWN

pytestmark = pytest.mark.timeout(600)

SCRIPT = Path(__file__).with_name("lightning_script.py")


def same(found: Any, expected: Any, *names: str, within: float = 1e-5) -> None:
    for name in names:
        if name in ("state", "averaged", "again"):
            assert found[name].keys() == expected[name].keys()
            for key, value in expected[name].items():
                assert torch.tensor(found[name][key]).sub(torch.tensor(value)).abs().max() < within, (name, key)
        elif isinstance(expected[name], list) and expected[name] and isinstance(expected[name][0], list):
            torch.testing.assert_close(torch.tensor(found[name]), torch.tensor(expected[name]), atol=within, rtol=0)
        else:
            assert found[name] == pytest.approx(expected[name], abs=within), name


def test_everything_that_a_trainer_does(tmp_path: Path) -> None:
    folder, theirs = str(tmp_path / "ours"), str(tmp_path / "theirs")
    plain = on_ranks(2, jobs.by_ddp, theirs)
    ours = on_ranks(2, jobs.by_plans, folder, theirs)
    assert len(plain[0][0]["losses"]) == 24
    for rank in range(2):
        (run, again, other), (expected, resumed) = ours[rank], plain[rank]
        same(run, expected, "losses", "norms", "metrics", "state", "predicted", "rate", "steps")
        for name in ("val", "test"):
            assert run[name][0] == pytest.approx(expected[name][0], abs=1e-5)
        same(again, resumed, "losses", "state", "rate")
        same(other, resumed, "losses", "state", "rate")
        assert Path(run["best"]).name == Path(expected["best"]).name
    assert Path(ours[0][0]["best"], "meta.pt").is_file()
    assert Path(ours[0][0]["last"]).resolve().is_dir()

    alone, beside, from_ours, from_theirs = on_ranks(1, jobs.alone, folder, theirs)[0]
    same(alone, beside, "losses", "state", "rate")
    same(from_ours, from_theirs, "losses", "state")
    weights = jobs.Module.load_from_checkpoint(f"{folder}/weights.ckpt")
    expected_weights = jobs.Module.load_from_checkpoint(f"{theirs}/weights.ckpt")
    same({"state": jobs.values(weights)}, {"state": jobs.values(expected_weights)}, "state")


def test_ranks_that_share_in_a_model(tmp_path: Path) -> None:
    """Ranks along tp get the same batches, and everything equals a run on half as many ranks with whole models."""
    folder, theirs = str(tmp_path / "ours"), str(tmp_path / "theirs")
    plain = on_ranks(2, jobs.by_ddp, theirs)
    ours = on_ranks(4, jobs.split, folder, theirs)
    for rank in range(4):
        (run, again, other), (expected, resumed) = ours[rank], plain[rank // 2]
        same(run, expected, "losses", "norms", "metrics", "state", "predicted", "rate", "steps")
        for name in ("val", "test"):
            assert run[name][0] == pytest.approx(expected[name][0], abs=1e-5)
        same(again, resumed, "losses", "state", "rate")
        same(other, resumed, "losses", "state", "rate")
    *_, from_ours, from_theirs = on_ranks(1, jobs.alone, folder, theirs)[0]
    same(from_ours, from_theirs, "losses", "state")
    weights = jobs.Module.load_from_checkpoint(f"{folder}/weights.ckpt")
    expected_weights = jobs.Module.load_from_checkpoint(f"{theirs}/weights.ckpt")
    same({"state": jobs.values(weights)}, {"state": jobs.values(expected_weights)}, "state")


def test_ranks_that_have_stages(tmp_path: Path) -> None:
    """Everything equals a run on half as many ranks with whole models, and one rank goes on from the checkpoint."""
    folder, theirs = str(tmp_path / "ours"), str(tmp_path / "theirs")
    plain = begin(2, jobs.by_ddp, theirs)
    ours = on_ranks(4, jobs.staged, folder)
    expectations = plain()
    for rank in range(4):
        (run, again), (expected, resumed) = ours[rank], expectations[rank % 2]
        same(run, expected, "losses", "norms", "metrics", "state", "predicted", "rate", "steps")
        for name in ("val", "test"):
            assert run[name][0] == pytest.approx(expected[name][0], abs=1e-5)
        same(again, resumed, "losses", "state", "rate")
    assert Path(ours[0][0]["best"], "meta.pt").is_file()
    found, beside = on_ranks(1, jobs.alone_from, folder, theirs)[0]
    same(found, beside, "losses", "state", "rate")


@pytest.mark.parametrize(
    ("axis", "plan"),
    [
        ("pp", {"preset": "zero1", "mesh": {"pp": 2}}),
        ("sp", {"preset": "zero3", "mesh": {"dp": 1, "sp": 2}}),
    ],
)
def test_ranks_that_share_in_a_sample(axis: str, plan: dict[str, Any], tmp_path: Path) -> None:
    """Models in a module are called in stages; or each has a part of the tokens."""
    wait = begin(1, jobs.shared, axis, None, str(tmp_path))
    found = on_ranks(2, jobs.shared, axis, plan, str(tmp_path))
    alone = wait()[0]
    assert len(alone["losses"]) == 6
    for run in found:
        same(run, alone, "losses", "state")


def test_ranks_that_share_in_experts(tmp_path: Path) -> None:
    wait = begin(2, jobs.shared, "ep", None, str(tmp_path))
    found = on_ranks(2, jobs.shared, "ep", {"preset": "zero2", "mesh": {"ep": 2}}, str(tmp_path))
    for run, apart in zip(found, wait(), strict=True):
        same(run, apart, "losses", "state")
        assert "is split along ep, which cannot be undone" in run["error"]


def test_precisions(tmp_path: Path) -> None:
    over_fp32 = {"preset": "zero3", "precision": "fp32"}
    folder = str(tmp_path)
    plain = begin(2, jobs.several, [(None, "bf16-mixed", folder), (None, "32-true", folder)])
    ours = [(over_fp32, "bf16-mixed", folder), ("zero2", "bf16-true", folder), ("zero2", "16-mixed", folder)]
    found = on_ranks(2, jobs.several, ours)[0]
    mixed, full = plain()[0]
    same(found[0], mixed, "losses", within=1e-3)
    for run, dtype in zip(found[1:], ("torch.bfloat16", "torch.float16"), strict=True):
        assert run["dtype"] == dtype
        same(run, full, "losses", within=0.1)


def test_a_trainer_may_fit_twice(tmp_path: Path) -> None:
    """The first engine, when it is collected, leaves the world to the second one."""
    plain = begin(2, jobs.fitted_twice, None, str(tmp_path / "plain"))
    ours = on_ranks(2, jobs.fitted_twice, "zero3", str(tmp_path / "ours"))
    for found, expected in zip(ours, plain(), strict=True):
        same(found, expected, "losses", "val", "state")


def test_two_optimizers_by_hand(tmp_path: Path) -> None:
    plain = begin(2, jobs.by_hand, None, str(tmp_path))
    (tmp_path / "ours").mkdir()
    ours = on_ranks(2, jobs.by_hand, "zero3", str(tmp_path / "ours"))[0]
    same(ours, plain()[0], "losses", "state", "counts")


def test_averaged_weights_and_uneven_batches(tmp_path: Path) -> None:
    wait = begin(2, jobs.averaged, None, str(tmp_path))
    (tmp_path / "ours").mkdir()
    ours = on_ranks(2, jobs.averaged, "zero3", str(tmp_path / "ours"))
    plain = wait()
    for rank in range(2):
        same(ours[rank], plain[rank], "val", "averaged", "again", "losses", "predicted")
    assert [len(run["predicted"]) for run in ours] == [2, 5]


REFUSED = {
    "ddp's own": "find_unused_parameters= is for DistributedDataParallel",
    "spawn": "start_method='spawn' starts ranks",
    "a hook": r"ddp_comm_hook is bf16_compress_hook, .*Leave it out, with its state, and set wire: \{grad: bf16\}",
    "axes": "state_dict_type='full' .* the plan's mesh has pp",
    "state": "state_dict_type is 'sharded_'",
}
REFUSED_AT_SETUP = {
    "batch norms": "sync_batchnorm=True is not supported",
    "accumulation": "accumulate 4 .* accumulate_grad_batches of Trainer is 1",
    "clipping": r"clip_grad_norm 2.0 .* gradient_clip_val of Trainer is 1.0",
    "precision": "precision fp16, but Lightning is set to bf16",
    "double": "precision '64-true' is not supported",
    "scaler": "GradScaler with custom settings",
    "compiled": "was passed to torch.compile",
    "cut short": "is a folder without meta.pt",
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_before_there_is_a_trainer(what: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=REFUSED[what]):
        jobs.refused(what, str(tmp_path))


def refusals(folder: str) -> dict[str, str]:
    found = {}
    for what in REFUSED_AT_SETUP:
        try:
            jobs.refused(what, folder)
        except Exception as error:
            found[what] = str(error)
    return found


def test_refused_when_it_begins(tmp_path: Path) -> None:
    found = on_ranks(1, refusals, str(tmp_path))[0]
    for what, sentence in REFUSED_AT_SETUP.items():
        assert re.search(sentence, found.get(what, "nothing"), re.DOTALL), (what, found.get(what))


def test_blocks_are_unfrozen_by_basefinetuning(tmp_path: Path) -> None:
    """DDP would not sum gradients of what was frozen when it was wrapped, so one process is what counts."""
    begun = begin(1, jobs.finetuned, None, str(tmp_path / "theirs"), batch_size=4)
    ours = on_ranks(2, jobs.finetuned, "zero3", str(tmp_path / "ours"))[0]
    full = on_ranks(2, jobs.finetuned, "zero2", str(tmp_path / "full"), state_dict_type="full")[0]
    plain = begun()[0]
    for run, num_norms in (("at once", 18), ("resumed", 6)):
        same(ours[run], plain[run], "norms", "state", "groups")
        same(full[run], plain[run], "norms", "state", "groups")
        assert (len(plain[run]["groups"]), len(plain[run]["norms"])) == (3, num_norms)


def test_strategies_have_the_names_of_presets() -> None:
    assert set(PRESETS) == set(KNOWN)
    strategy = StrategyRegistry.get("shardwise_zero3_kept")
    assert isinstance(strategy, ShardwiseStrategy)
    assert strategy.plan.preset == "zero3-kept"
    assert StrategyRegistry.get("shardwise").plan.preset == "zero3"


def script(*words: str) -> None:
    """The unmodified script, on the ranks that run this."""
    sys.argv = [str(SCRIPT), *words]
    runpy.run_path(str(SCRIPT), run_name="__main__")


def test_scripts_that_lightning_or_a_launcher_starts(tmp_path: Path) -> None:
    files = {name: tmp_path / f"{name}.json" for name in ("plain", "itself", "taken")}
    wait = begin(2, script, str(files["plain"]), "lightning.pytorch", "ddp")
    launch = ["-m", "shardwise", "launch", "--nproc", "2", "--shardwise", "zero2"]
    commands = [
        [str(SCRIPT), str(files["itself"]), "lightning.pytorch", "shardwise_zero3"],
        [*launch, str(SCRIPT), str(files["taken"]), "pytorch_lightning"],
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    for command in commands:
        words = [sys.executable, *command]
        done = subprocess.run(words, capture_output=True, text=True, timeout=560, check=False, env=environment)
        assert done.returncode == 0, done.stderr[-3000:]
    wait()
    told = {name: json.loads(file.read_text()) for name, file in files.items()}
    assert told["plain"]["strategy"] == "DDPStrategy"
    for name in ("itself", "taken"):
        assert (told[name]["strategy"], told[name]["world"]) == ("ShardwiseStrategy", 2)
        assert told[name]["losses"] == pytest.approx(told["plain"]["losses"], abs=1e-5)
        for key, value in told["plain"]["weights"].items():
            torch.testing.assert_close(torch.tensor(told[name]["weights"][key]), torch.tensor(value))
