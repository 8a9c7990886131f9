"""Ray Train on our engine, on a real cluster of one machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray_jobs as jobs
from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from tests.thorough import sampled

ray = pytest.importorskip("ray")
pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),  # Ray's own
]
STEPS = 8
SAMPLES = range(8)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    paths = [str(Path(__file__).parent), *filter(None, sys.path)]
    variables = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    ray.init(
        num_cpus=3, include_dashboard=False, _node_ip_address="127.0.0.1", object_store_memory=80 * 2**20,
        runtime_env={"env_vars": variables}, log_to_driver=False, configure_logging=False,
    )  # fmt: skip
    yield
    ray.shutdown()


def fit(folder: Path, workers: int, *, failures: int = 0, name: str = "run", **config: Any) -> Any:
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    trainer = TorchTrainer(
        jobs.trained,
        train_loop_config={"plan": "zero3", "steps": STEPS, "mark": str(folder / "mark"), **config},
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(
            name=name,
            storage_path=str(folder),
            failure_config=FailureConfig(max_failures=failures),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    )
    return trainer.fit()


def test_a_worker_fails_and_all_go_on(cluster: None, tmp_path: Path) -> None:
    expected = jobs.plain(STEPS)
    result = fit(tmp_path, 2, failures=1, fails_at=5)
    assert (tmp_path / "mark").exists()
    assert "Rank 1 raised ValueError: a bad batch" in (tmp_path / "mark.letter").read_text()
    assert result.metrics["losses"] == pytest.approx(expected, abs=1e-5)
    assert result.metrics["size"] == 2
    kept = sorted(path.name for path in (tmp_path / "run").glob("checkpoint-*"))
    assert kept == ["checkpoint-00000006", "checkpoint-00000008"]
    assert Path(result.checkpoint.path, "shardwise", "step-00000008").is_dir()

    alone = fit(tmp_path, 1, plan="zero1", steps=STEPS + 4)  # the same run, by another number of workers
    assert alone.metrics["losses"] == pytest.approx(jobs.plain(STEPS + 4), abs=1e-5)
    assert alone.metrics["size"] == 1


def test_workers_that_share_in_a_model(cluster: None, tmp_path: Path) -> None:
    """Along tp they get the same batches, along dp different ones; each run resumes the previous checkpoint."""
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    def run(plan: Any) -> dict[str, Any]:
        trainer = TorchTrainer(
            jobs.shared, train_loop_config={"plan": plan, "epochs": 1}, scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(name="shared", storage_path=str(tmp_path)),
        )  # fmt: skip
        found: dict[str, Any] = trainer.fit().metrics
        return found

    cut = {"preset": "zero1", "mesh": {"dp": 1, "tp": 2}, "tensor": {"plan": {"0": "column", "2": "row"}}}
    first = run(cut)
    assert first["losses"] == pytest.approx(jobs.plain_epochs(1), abs=1e-5)
    assert first["sampler"] == "SequentialSampler"
    assert first["numel"] < sum(param.numel() for param in jobs.net().parameters())
    again = run(cut)
    assert again["losses"] == pytest.approx(jobs.plain_epochs(2), abs=1e-5)
    apart = run("zero3")  # two batches at a time: half as many steps in an epoch
    assert (len(apart["losses"]), apart["sampler"]) == (8 + 2, "DistributedSampler")


@sampled
@pytest.mark.parametrize(
    ("model", "mesh", "dealt"),
    [
        ("llama", {"dp": 1, "sp": 2}, 1),  # each worker has half of the tokens of each row
        ("mixtral", {"dp": 1, "ep": 2}, 2),  # and half of the experts, and rows of its own
        ("llama", {"pp": 2, "dp": 1}, 1),  # and half of the layers
    ],
    ids=("sp", "ep", "pp"),
)
def test_workers_that_share_in_a_language_model(
    cluster: None, tmp_path: Path, model: str, mesh: dict[str, int], dealt: int
) -> None:
    """Like one plain process; then zero3, with separate rows per worker, resumes the checkpoint of pipeline stages."""
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    def run(plan: dict[str, Any], steps: int) -> dict[str, Any]:
        config = {"plan": plan, "model": model, "steps": steps, "staged": "pp" in plan.get("mesh", {})}
        trainer = TorchTrainer(
            jobs.language, train_loop_config=config, scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(name="language", storage_path=str(tmp_path)),
        )  # fmt: skip
        found: dict[str, Any] = trainer.fit().metrics
        return found

    expected = jobs.plain_language(model, 6)
    shared = run({"preset": "zero1", "mesh": mesh} | ({"accumulate": 2} if "pp" in mesh else {}), 4)
    assert shared["losses"] == pytest.approx(expected[:4], abs=1e-5)
    assert shared["dealt"] == dealt
    whole = sum(param.numel() for param in jobs.language_model(model).parameters())
    assert (shared["numel"] < whole) == ("sp" not in mesh)
    if "pp" in mesh:
        assert run({"preset": "zero3"}, 2)["losses"] == pytest.approx(expected, abs=1e-5)


def test_the_loop_of_the_page(cluster: None, tmp_path: Path) -> None:
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    page = (Path(__file__).parents[2] / "docs" / "ray.md").read_text()
    names: dict[str, Any] = {"build": jobs.Summed, "batch_of": jobs.batch, "__name__": "page"}
    exec(page.partition("```python\n")[2].partition("```")[0], names)
    told = RunConfig(name="page", storage_path=str(tmp_path))
    config = {"lr": 0.01, "steps": 2}
    trainer = TorchTrainer(
        names["loop"], train_loop_config=config, scaling_config=ScalingConfig(num_workers=1), run_config=told
    )
    result = trainer.fit()
    assert result.metrics["loss"] > 0
    assert Path(result.checkpoint.path, "shardwise", "step-00000002").is_dir()


def test_outside_of_a_worker() -> None:
    from shardwise.errors import ConfigError
    from shardwise.integrations.ray import shard

    with pytest.raises(ConfigError, match="was called outside of a worker of Ray Train"):
        shard(jobs.net(), "zero3")


def dealt(monkeypatch: pytest.MonkeyPatch, **how: Any) -> DataLoader[Any]:
    """A loader of eight samples as the first of two shards has it."""
    from shardwise.integrations.ray import prepare_data_loader

    monkeypatch.setattr(ray.train.torch, "prepare_data_loader", lambda loader, **_: loader)
    engine: Any = SimpleNamespace(data_ranks=(0, 2))
    return prepare_data_loader(engine, DataLoader(SAMPLES, batch_size=2, **how))


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_shuffled_loader_stays_one(shuffle: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler: Any = dealt(monkeypatch, shuffle=shuffle).sampler
    assert (sampler.num_replicas, sampler.rank, sampler.shuffle) == (2, 0, shuffle)


@pytest.mark.parametrize(
    "sampler",
    [
        WeightedRandomSampler([1.0] * 8, 8),
        SubsetRandomSampler(range(4)),
        RandomSampler(SAMPLES, replacement=True),
        RandomSampler(SAMPLES, num_samples=4),
    ],
    ids=lambda sampler: type(sampler).__name__,
)
def test_a_sampler_that_would_be_replaced_is_refused(sampler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwise.errors import ConfigError

    with pytest.raises(ConfigError, match=rf"The loader's {type(sampler).__name__} chooses samples by itself"):
        dealt(monkeypatch, sampler=sampler)
