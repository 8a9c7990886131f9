"""Rows of published runs: what was measured, which rows were fitted on, and of which regime a run is."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from shardwise.fit.published import Run, UnpricedError, read_run
from shardwise.fit.transformer_step import Job

FITTED: Mapping[str, Callable[[Mapping[str, str]], bool] | None] = {
    # a part of the source: which of its rows, or all of them. Everything else is reported only.
    "ground_truth_single": lambda row: row["layers"] in ("12", "20"),
    "llama_13B_bfloat16_64_GPUs_all_runs": None,
    "A100 80GB with 1600 Gbps": None,
    "InternEvo doc/en/train_performance.md (FLOPS": None,
    "tr3m-1B3.md": None,
    "experiments/gpt2.md": lambda row: row["model"] != "GPT-2 52B",
    "performance_benchmarks.md (NeMo 24.07)": None,
    "llama3_h100_202412_torchtitan.md": lambda row: "Table 1" in row["source"] or "Table 2" in row["source"],
    "Megatron-Bridge": lambda row: row["model"] == "LLAMA3_70B",
    "nanotron/docs": lambda row: row["model"] == "Llama-like 3.57B",
}


@dataclass(frozen=True)
class Published:
    """A run, its first row, and everything that was measured of it, by metric."""

    row: Mapping[str, str]
    measured: Mapping[str, str]
    run: Run | None
    reason: str = ""

    @property
    def source(self) -> str:
        return re.sub(r"(gpt2\.md|tr3m-1B3\.md):\d+", r"\1", self.row["source"])

    @property
    def is_fitted(self) -> bool:
        return any(
            name in self.row["source"] and (chosen is None or chosen(self.row)) for name, chosen in FITTED.items()
        )

    def number(self, *metrics: str) -> float | None:
        for metric in metrics:
            try:
                return float(self.measured[metric])
            except (KeyError, ValueError):
                continue
        return None

    @property
    def step_seconds(self) -> float | None:
        """Measured, or converted from what was: throughputs by the batch, FLOP rates by the formula of the source."""
        if self.run is None:
            return None
        job = self.run.job
        given = self.number("s/step")
        if given is not None:
            return given
        tokens = job.num_sequences * job.model.seq_len
        by_tokens = self.number("tok/s/GPU")
        if by_tokens is not None:
            return tokens / (by_tokens * job.world_size)
        by_samples = self.number("samples/s", "samples/s total")
        if by_samples is not None:
            return job.num_sequences / by_samples
        rate = self.number("TFLOPs/GPU")
        if rate is not None and re.search("megatron|azure", self.row["source"].lower()):
            return _narayanan_flops(job) / (rate * 1e12 * job.world_size)
        share = self.number("MFU%")
        if share is not None and "nanotron" in self.row["source"]:
            return _palm_flops(job) / (share / 100 * 989.5e12 * job.world_size)
        return None

    @property
    def fits(self) -> bool | None:
        """Whether it ran."""
        said = self.measured.get("fits", "").lower()
        if said:
            return None if "fail" in said else said.startswith(("yes", "fits"))
        ran = self.step_seconds is not None or any("memory" in metric for metric in self.measured)
        return True if ran and "analytical" not in self.row["evidence"] else None


def read_published(path: Path) -> Iterator[Published]:
    """The runs of a file: rows of one `run_id` and source."""
    rows: dict[tuple[str, str], tuple[dict[str, str], dict[str, str]]] = {}
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            rows.setdefault((row["run_id"], row["source"]), (dict(row), {}))[1][row["metric"]] = row["value"]
    for row, measured in rows.values():
        try:
            yield Published(row, measured, read_run(row))
        except UnpricedError as error:
            yield Published(row, measured, None, str(error))


def _narayanan_flops(job: Job) -> float:
    """Of a step with recomputation (Narayanan et al., arXiv:2104.04473, equation 3)."""
    model = job.model
    size = model.num_layers * model.hidden**2
    rest = 1 + model.seq_len / (6 * model.hidden) + model.vocab / (16 * model.num_layers * model.hidden)
    return 96.0 * job.num_sequences * model.seq_len * size * rest


def _palm_flops(job: Job) -> float:
    """6N + 12 L H Q T for each token (Chowdhery et al., arXiv:2204.02311, appendix B)."""
    model = job.model
    each = 6.0 * model.num_params + 12.0 * model.num_layers * model.query_width * model.seq_len
    return each * job.num_sequences * model.seq_len
