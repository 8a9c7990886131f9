"""Published training runs: rows of a CSV file read as models, layouts and hardware."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

import yaml

from shardwise.fit.hardware import Hardware, hardware
from shardwise.fit.transformer import Execution, Experts, Transformer
from shardwise.fit.transformer_step import Job

Row = Mapping[str, str]


class Unpriced(ValueError):
    """Why a row gets no prediction."""


@dataclass(frozen=True)
class Software:
    """What a framework does that rows do not say."""

    match: str
    passes: float = 1.0
    fused_norm: bool = True
    wide_exchanges: bool = False
    whole_logits: bool = False
    narrow_grads: bool = False
    flash1: bool = False
    launches: float = 1.0


SOFTWARE = (
    Software("aleph-alpha", 1.3, fused_norm=False, wide_exchanges=True, whole_logits=True, narrow_grads=True),
    Software("mosaicml", 1.0, flash1=True),
    Software("internlm", 1.5, fused_norm=False),
    Software("torchtitan.*compile", 1.4),
    Software("torchtitan", 2.5, fused_norm=False),
    Software("", 1.4),
)

@dataclass(frozen=True)
class Run:
    """A published run, as far as its step depends on it. `gpu` names a profile; bandwidths, in bytes per second, and
    the memory of a device are there where a row gives them."""

    job: Job
    gpu: str
    per_node: int
    software: Software
    node_bandwidth: float | None = None
    rank_bandwidth: float | None = None
    memory_bytes: int | None = None

    def hardware(self) -> Hardware:
        return hardware_of(self, hardware(self.gpu))


def hardware_of(run: Run, profile: Hardware) -> Hardware:
    """`profile` with what the run says of its machines."""
    network = profile.network
    changed: dict[str, Any] = {"launch_seconds": profile.launch_seconds * run.software.launches}
    if run.node_bandwidth is not None:
        one = min(network.bytes_per_second, run.node_bandwidth)
        changed["network"] = network.model_copy(
            update={"bytes_per_second": one, "node_bytes_per_second": run.node_bandwidth}
        )
    if run.rank_bandwidth is not None:
        changed["network"] = network.model_copy(
            update={"bytes_per_second": run.rank_bandwidth, "node_bytes_per_second": run.rank_bandwidth * run.per_node}
        )
    if run.memory_bytes is not None:
        changed["memory_bytes"] = run.memory_bytes
    return profile.model_copy(update=changed).with_ranks(run.per_node)


GPUS = (
    (r"gb300|b300|gb200|b200|blackwell", "b200"),
    (r"h200", "h200"),
    (r"h100", "h100-sxm"),
    (r"a100.?40", "a100-40"),
    (r"a100", "a100-80"),
    (r"v100", "v100-32"),
)


def read_run(row: Row) -> Run:
    """The run that a row describes. Raises `Unpriced` with the reason where the row leaves out what is needed."""
    known = _known_model(row.get("model", ""))

    def number(*columns: str) -> int | None:
        for column in columns:
            text = (row.get(column) or "").strip()
            if text:
                try:
                    value = float(text)
                except ValueError:
                    raise Unpriced(f"{column} is {text[:40]!r}, not a number") from None
                if not 1 <= value <= 1e12 or value != int(value):
                    raise Unpriced(f"{column} is {text[:40]!r}, not a whole number above 0")
                return int(value)
        return None

    def shape(column: str) -> int | None:
        text = (row.get(column) or "").strip()
        if column == "ffn" and not text.isdigit():
            return known.get(column)
        return number(column) or known.get(column)

    def needed(value: int | None, what: str) -> int:
        if value is None:
            raise Unpriced(f"{what} is not given")
        return value

    text = " ".join((row.get(key) or "") for key in ("source", "model", "notes")).lower()
    family = (row.get("model") or "").lower()
    gpu_text = (row.get("gpu") or "").lower()
    gpu = next((name for pattern, name in GPUS if re.search(pattern, gpu_text)), None)
    if gpu is None:
        raise Unpriced(f"there is no profile of the device {gpu_text!r}" if gpu_text else "gpu is not given")
    layers, hidden = needed(shape("layers"), "layers"), needed(shape("hidden"), "hidden")
    seq_len = needed(shape("seq_len"), "seq_len")
    is_gated = bool(known.get("gated")) or bool(re.search(r"llama|internlm|qwen|mistral|mixtral", family))
    is_mpt = "mpt" in family
    heads = shape("heads") or max(1, hidden // 128)
    default_ffn = -(-8 * hidden // 3 // 256) * 256 if is_gated else 4 * hidden
    vocab = number("vocab") or _vocab_in_notes(text) or known.get("vocab") or (32000 if is_gated else 51200)
    experts = known.get("experts")
    model = Transformer(
        num_layers=layers,
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=shape("kv_heads") or heads,
        ffn=shape("ffn") or default_ffn,
        vocab=vocab,
        seq_len=seq_len,
        head_size=known.get("head_size") or 0,
        gated=is_gated,
        tied=not is_gated,
        causal="bert" not in family,
        learned_positions=not is_gated and not is_mpt,
        experts=Experts(**experts) if experts else None,
        q_rank=known.get("q_rank") or 0,
        kv_rank=known.get("kv_rank") or 0,
    )
    num_gpus = needed(number("gpus"), "gpus")
    tp, pp, cp = number("tp") or 1, number("pp") or 1, number("cp") or 1
    for column in ("tp", "pp"):
        if not (row.get(column) or "").strip() and not (row.get("dp") or "").strip():
            raise Unpriced(f"{column} is not given")
    if num_gpus % (tp * pp * cp):
        raise Unpriced(f"{num_gpus} GPUs are no multiple of tp {tp} x pp {pp} x cp {cp}")
    dp = num_gpus // (tp * pp * cp)
    given = number("dp")
    if given is not None and given != dp:
        raise Unpriced(f"dp {given} x tp {tp} x pp {pp} x cp {cp} is not {num_gpus} GPUs")
    micro = needed(number("micro_batch"), "micro_batch")
    batch = number("global_batch_seqs", "gbs_derived")
    batch = needed(batch, "global_batch_seqs")
    count = batch / (dp * micro)
    if count != int(count) or count < 1:
        raise Unpriced(f"global_batch_seqs {batch} is no multiple of dp {dp} x micro_batch {micro}")
    precision = (row.get("precision") or "").lower()
    modern = gpu[0] in "hb"
    narrow = "fp8" if re.search(r"fp8|float8", precision) else "fp4" if "fp4" in precision else ""
    software = next(one for one in SOFTWARE if re.search(one.match, text))
    attention = _attention(text, is_gated or is_mpt or modern, gpu)
    if attention == "flash" and (software.flash1 or "flash_attentionv1" in text):
        attention = "flash1"
    recompute = (row.get("recompute") or "none").lower()
    ep = number("ep") or 1
    if ep > 1 and model.experts is None:
        raise Unpriced(f"ep is {ep}, but nothing is known of the model's experts")
    if (dp * tp) % ep:
        raise Unpriced(f"ep {ep} does not divide dp {dp} x tp {tp}")
    sp = _has_sequence_parallel(text, modern) and tp > 1
    how = Execution(
        micro_batch=micro,
        dtype="fp16" if precision.startswith("fp16") or gpu == "v100-32" else "bf16",
        tp=tp,
        sequence_parallel=sp,
        cp=cp,
        ep=ep,
        recompute="full" if recompute == "full" else "none" if recompute == "none" else "selective",
        attention=attention,
        passes=software.passes,
        fused_norm=software.fused_norm or "rms kernel" in text,
        wide_exchanges=software.wide_exchanges,
        whole_logits=software.whole_logits,
        dropout=not is_gated and not is_mpt and not modern,
        product_dtype=narrow,
        expert_axis="ep" if dp % ep == 0 else "ep+tp",
    )
    zero = (row.get("zero") or "").lower()
    stage = 3 if "fsdp" in zero else next((int(one) for one in re.findall(r"[0-3]", zero)[:1]), 0)
    job = Job(
        model=model,
        how=how,
        dp=dp,
        pp=pp,
        num_chunks=number("vpp") or 1,
        num_micro_batches=int(count),
        zero=stage,
        overlaps=modern and stage < 3,
        narrow_grads=software.narrow_grads,
        offloads="cpu" in (row.get("offload") or "").lower(),
    )
    link = (row.get("interconnect") or "").lower()
    per_node = 64 if "nvl72" in link else number("gpus_per_node") or 8
    given_memory = re.search(r"(\d+) ?gi?b", gpu_text)
    return Run(
        job, gpu, per_node, software, *_bandwidths(link), int(given_memory[1]) * 2**30 if given_memory else None
    )


def _bandwidths(link: str) -> tuple[float | None, float | None]:
    """Bytes per second of a node and of a rank, where the words say so."""
    if found := re.search(r"(\d+)x\s*(?:ib)?\s*(\d+)\s*gb(?:ps|/s)?.*per node", link):
        return int(found[1]) * int(found[2]) * 1e9 / 8, None
    if found := re.search(r"(\d+)\s*gbps(?:/| per )node", link):
        return int(found[1]) * 1e9 / 8, None
    if found := re.search(r"(\d+)\s*gb/s .*per gpu", link):
        return None, int(found[1]) * 1e9 / 8
    return None, None


def _attention(text: str, prefers_flash: bool, gpu: str) -> Any:
    if "kernel=torch" in text:
        return "plain"
    if "kernel=fused" in text:
        return "fused"
    if "flash" in text:
        return "flash"
    return "flash" if prefers_flash and gpu != "v100-32" else "fused"


def _has_sequence_parallel(text: str, modern: bool) -> bool:
    if "sequence_parallel=true" in text or "with sequence parallel" in text or "with sp" in text:
        return True
    return modern and "no sp" not in text


def _vocab_in_notes(text: str) -> int | None:
    found = re.search(r"(\d+)k vocab", text)
    return int(found[1]) * 1024 if found else None


@lru_cache
def _models() -> tuple[tuple[re.Pattern[str], dict[str, Any]], ...]:
    listed = yaml.safe_load((files("shardwise.fit") / "models.yaml").read_text(encoding="utf-8"))["models"]
    return tuple((re.compile(one["match"]), one) for one in listed)


def _known_model(name: str) -> dict[str, Any]:
    lowered = name.strip().lower()
    return next((known for pattern, known in _models() if pattern.search(lowered)), {})
