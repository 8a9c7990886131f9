"""`deepspeed --autotuning tune|run`: stage and micro-batch are predicted when the first forward begins, written, and
trained with."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from twins import batches

import shardwise as sw
from shardwise.errors import ConfigError
from shardwise.integrations.deepspeed import autotuning
from shardwise.integrations.deepspeed.autotuning import MICRO, OPTIMAL, STEPS, VARIABLE, WHOLE, Settings, TunedJob
from shardwise.integrations.deepspeed.initialization import initialize
from shardwise.testing import run_ranks
from tests.models import Transformer
from tests.thorough import thorough_only

ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}


def tuned(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """What two ranks write, which end without a step."""
    section = {"results_dir": str(folder / "results"), "exps_dir": str(folder / "exps"), **config.pop("autotuning", {})}
    start = Transformer()
    replicas = [copy.deepcopy(start) for _ in range(2)]
    x, y = batches(1)[0]

    def rank(world: sw.World) -> None:
        model = replicas[world.rank]
        engine, *_ = initialize(model=model, config={**ADAMW, **config, "autotuning": section}, world=world)
        with pytest.raises(SystemExit) as ended:
            engine(*(part.chunk(world.size)[world.rank] for part in (x, y)))
        assert ended.value.code == 0
        assert engine.global_steps == 0

    run_ranks(2, rank)
    return json.loads((folder / "results" / OPTIMAL).read_text())


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1")


def test_stage_and_size_are_chosen_by_the_metric(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    section = {"enabled": True, "max_train_micro_batch_size_per_gpu": 8, "metric": "throughput"}
    (tmp_path / "most").mkdir()
    most = tuned(tmp_path / "most", {MICRO: "auto", STEPS: 2, "gradient_clipping": 1.0, "autotuning": section})
    assert (most[MICRO], most[STEPS], most[WHOLE]) == (8, 2, 32)
    assert most["gradient_clipping"] == 1.0
    assert "autotuning" not in most
    tried = sorted(path.name for path in (tmp_path / "most" / "exps").iterdir())
    assert len(tried) == 4 * 4
    assert f"z{most['zero_optimization']['stage']}_gas2_tmbspg8" in tried
    assert "samples/s" in capsys.readouterr().out
    quick = tuned(tmp_path / "quick", {MICRO: "auto", "autotuning": {**section, "metric": "latency"}})
    assert quick[MICRO] == 1


@thorough_only("slow; smaller tests beside it cover the same code")
def test_what_the_config_says_is_kept(tmp_path: Path) -> None:
    fixed = tuned(tmp_path, {WHOLE: 16, "zero_optimization": {"stage": 2, "overlap_comm": True}})
    assert fixed["zero_optimization"] == {"stage": 2, "overlap_comm": True}
    assert fixed[MICRO] * fixed[STEPS] * 2 == fixed[WHOLE] == 16
    few = {"max_train_batch_size": 8, "tuner_num_trials": 3}
    bounded = tuned(tmp_path / "bounded", {MICRO: "auto", "autotuning": few})
    assert bounded[WHOLE] <= 8
    assert len(list((tmp_path / "bounded" / "exps").iterdir())) == 3


def refused(config: dict[str, Any]) -> str:
    """What both ranks say."""
    replicas = [Transformer() for _ in range(2)]

    def rank(world: sw.World) -> str:
        engine, *_ = initialize(model=replicas[world.rank], config={**ADAMW, MICRO: "auto", **config}, world=world)
        with pytest.raises(ConfigError) as raised:
            engine(*batches(1)[0])
        return str(raised.value)

    first, second = run_ranks(2, rank)
    assert first == second
    return first


@thorough_only("slow; smaller tests beside it cover the same code")
def test_results_that_cannot_be_written_are_an_error_of_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    section = {"exps_dir": str(tmp_path / "taken"), "max_train_micro_batch_size_per_gpu": 1}
    assert str(tmp_path / "taken") in refused({"autotuning": section})


def test_what_fits_no_device_is_listed_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotuning, "_limits", lambda *_: autotuning.Limits(2**20))
    said = refused({})
    assert said.startswith("autotuning: no stage and micro-batch fits:\n  stage 0, micro-batch 1 x 1: ")
    assert "MiB too much" in said
    assert "leave none to be tried" in refused({"autotuning": {"max_train_batch_size": 1}})


def test_every_field_is_honoured_or_explained() -> None:
    section = {name: default for name, (default, _) in autotuning.AUTOTUNING.items()}
    settings = Settings.of({"autotuning": {**section, "fastt": True}})
    told = {note.partition(":")[0].removeprefix("autotuning.") for note in settings.notes}
    honoured = {"results_dir", "exps_dir", "overwrite", "metric", "tuner_num_trials", "arg_mappings"}
    honoured |= {f"{bound}_{size}" for bound in ("min", "max") for size in ("train_batch_size", MICRO)}
    assert told == {*section, "fastt"} - honoured
    for wrong in ({"metric": "loss"}, {"tuner_num_trials": 0}, {"arg_mappings": {"a": 1}}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            Settings.of({"autotuning": wrong})


def test_the_command_gets_the_config_and_mapped_arguments(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    section = {"results_dir": str(tmp_path / "out"), "arg_mappings": {STEPS: "--steps"}}
    file.write_text(json.dumps({"autotuning": section}))
    job = TunedJob.of(["train.py", "--steps=1", f"--deepspeed_config={file}", "--lr", "1"])
    with pytest.raises(ConfigError, match="ended before a forward that trains"):
        job.tuned_command()
    job.optimal.parent.mkdir()
    job.optimal.write_text(json.dumps({MICRO: 4, STEPS: 2}))
    assert job.tuned_command() == ("train.py", "--steps=2", f"--deepspeed_config={job.optimal}", "--lr", "1")
    trainer = TunedJob.of(["train.py", "--per_device_train_batch_size", "1", "--deepspeed", str(file)])
    words = ("train.py", "--per_device_train_batch_size", "4", "--deepspeed", str(job.optimal), "--steps", "2")
    assert trainer.tuned_command() == words
    with pytest.raises(ConfigError, match="--deepspeed_config FILE"):
        TunedJob.of(["train.py", "--deepspeed"])
