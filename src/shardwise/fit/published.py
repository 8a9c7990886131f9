"""Published training runs: rows of a CSV file read as a model, its layout and its hardware, and predictions of them.

    python -m shardwise.fit.published rows.csv --out predicted.csv

The columns are read by name; `COLUMNS` are those without which there is no prediction for any row. What a row leaves
out is taken from `published_models.yaml`, where its model is known by name; where that does not help either, its
prediction is empty, and `predicted_reason` says why. Conventions for what hardly any row gives are in `read_run`.
"""

from __future__ import annotations

import argparse
import csv
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from shardwise.errors import ConfigError, ShardwiseError
from shardwise.fit.hardware import Hardware, hardware
from shardwise.fit.transformer import Attention, Execution, Experts, Recompute, Transformer
from shardwise.fit.transformer_memory import fits, peak_bytes
from shardwise.fit.transformer_step import Job, step_seconds
from shardwise.plan.mesh import MOST_RANKS

Row = Mapping[str, str]
COLUMNS = ("model", "gpu", "gpus", "micro_batch", "seq_len", "tp", "pp")
OPTIONAL = (
    *("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "global_batch_seqs", "gbs_derived", "gpus_per_node"),
    *("interconnect", "dp", "cp", "ep", "vpp", "zero", "offload", "recompute", "precision", "notes", "source"),
)
"""Those that are read where there are any."""
PREDICTED = ("predicted_step_seconds", "predicted_peak_bytes", "predicted_fits", "predicted_reason")
SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "bars"}
MAX_CELL = 1_000_000
MAX_OPS, MAX_LAYERS = 20_000, 4096
"""Larger figures are mistakes. `MAX_OPS` bounds ranks x stages of a pipeline, each of which is timed."""
MAX_PER_NODE, MAX_WIDTH, MAX_VOCAB, MAX_BATCH = 1024, 1_000_000, 10_000_000, 1_000_000
MAX_TOKENS, MIN_HEAD, MIN_LENGTH = 1_000_000_000, 8, 16
"""More tokens in a step, narrower heads and shorter sequences are figures of another column: a batch in tokens, the
width of heads, samples."""
GBITS = 1, 100_000
"""Between what a link or a node sends a second."""
MEMORY_SHARES = 0.5, 1.25
"""What a card may have of its profile's memory: half of it (V100), or what a later one of its name has (H100 96GB)."""
LINKS = (
    r"nvl|nvswitch|xgmi|ib\b|infiniband|roce|rdma|ethernet|efa|slingshot|omni-?\s?path|\bopa|pcie|gb|\d\s*[gt]\b|\d\s*t(?:b|bps)\b"
    r"|cx-?\d|connectx|[ehnx]dr|dgx|hgx|selene|node"
)
"""What words for an interconnect have at least one of: links, their rates, and machines that are known for theirs."""
RATE = re.compile(
    r"(?:(?<![\d.])(?P<times>\d{1,3})\s*x\s*)?(?:(?:ib|infiniband|roce)\s*)?"
    r"(?:(?<![\d.])(?P<rate>\d{1,6}(?:\.\d{1,6})?)\s*(?P<unit>[gt])(?P<kind>bytes?/s|be|bps|bits?/s|bit|b/s|b|)(?![a-z])"
    r"|(?P<port>[ehnx]dr)(?P<own>\d{3})?(?![a-z\d]))"
)
"""A rate, or a generation of InfiniBand, of which ports may have another rate than the usual one (HDR100), perhaps of
several links. Words are in lower case, and rates in bits per second, unless they say `bytes` (`_in_words`)."""
RANGE = r"(?<![a-z\d.])(?:\d+(?:\.\d+)?\s*(?:e|-|\u2013|to\b)|-)\s*\d+(?:\.\d+)?\s*[gt](?:b|$|\s)"
"""Two rates, of which it is unknown which one holds; a power of ten; or one below zero."""
SLOW_UNITS = r"\d\s*[km](?:bps|bits?/s|bytes/s|b/s)"
"""Rates of kilo- and megabits, which are mistakes where devices train together."""
WITHIN_NODES = r"nvl(?:ink|\b)|nvswitch|xgmi|infinity fabric|pci-?e"
"""Links of one node, whose rates are the profile's; what is said of them says nothing of those between nodes."""
TIMES = "\\s*[\u00d7*]\\s*"
COUNTS = {"dual": 2, "two": 2, "quad": 4, "four": 4, "eight": 8}
LINKS_BEHIND = r"(\d{1,6}\s*[gt](?:be|bps|bits?/s|bytes/s|b)\b|[ehnx]dr\d{0,3})\s*\(?x ?(\d{1,3})\b\)?"
"""A rate and, behind it, of how many links."""
BETWEEN_NODES = r"\bib\b|infiniband|roce|rdma|eth|efa|slingshot|omni|\bopa|[ehnx]dr|cx-?\d|connectx|gbe"
PORTS = {"edr": 100, "hdr": 200, "ndr": 400, "xdr": 800}
"""Gbit/s of a port of four lanes, by generation of InfiniBand (InfiniBand Trade Association's roadmap)."""
SLINGSHOT_11 = 200
"""Gbit/s of a network card, of which Perlmutter's and Frontier's nodes have one for each device (NERSC's and OLCF's
documentation)."""
RECOMPUTED = frozenset(
    ("selective", "op", "layer", "norm", "layernorm", "act", "moe", "moe_act", "mlp", "core_attn", "mla_up_proj")
) | {"shared_expert", "shared_experts"}
"""Words for what is recomputed of a layer: those of sources, and Megatron's `recompute_modules`."""
GPUS = (
    (r"gb300", "gb300"),
    (r"b300", "b300"),
    (r"gb200", "gb200"),
    (r"b200|^blackwell", "b200"),
    (r"(?<!g)h200(?!\d)(?!.*nvl\b)", "h200"),
    (r"h100(?!\d)(?!.*(?:nvl|cnx)\b)", "h100-sxm"),
    (r"a100(?![\dx]).*(?<!\d)40(?!\d)", "a100-40"),
    (r"a100(?![\dx])", "a100-80"),
    (r"v100(?!s)", "v100-32"),
    (r"mi300x", "mi300x"),
    (r"l40s", "l40s"),
    (r"(?<!\d)4090(?!\d)(?! ?(?:d\b|laptop|mobile|m\b))", "4090"),
)
"""What names of devices have, and their profile. Others have the chip, and another rate or memory: GH200, H100 NVL,
H100 CNX, H200 NVL, A100X, V100S, RTX 4090 D, RTX PRO 6000 Blackwell, RTX A1000."""
MODERN = ("gb300", "b300", "gb200", "b200", "h200", "h100-sxm", "mi300x", "l40s", "4090")
"""Profiles of devices that also compute in fp8."""
GATED = (
    r"llama|internlm|qwen|mistral|mixtral|gemma|\byi[-_ ]|deepseek|baichuan|olmo|phi-?[34]|smollm|stablelm|command-?r"
    r"|codegemma|vicuna|chatglm|\bglm-?\d|minicpm|granite"
)
"""Families whose multilayer perceptrons are gated (SwiGLU or GeGLU), by their reports."""
NOTHING = frozenset(("", "-", "--", "n/a", "na", "none", "null"))
"""How tables write that a number is not given."""
WITH_EXPERTS = (
    r"moe\b|mixtral|dbrx|switch|glam|deepseek[-_ ]*(?:v[2-9]|r1)|llama[-_ ]*4(?!\d)|grok|kimi|gpt[-_ ]*oss|arctic"
    r"|hunyuan|glm[-_ ]*4\.5|dots\.|[-_ ]a\d+(\.\d+)?b\b|\d+x\d+b\b|\d+e\b"
)
"""What names of models with experts have: the word, a family, or how many parameters are active."""
OTHER_MODELS = (
    r"mamba|rwkv|hyena|jamba|zamba|bamba|samba|retnet|xlstm|griffin|recurrentgemma|falcon[-_ ]*h\d|minimax|\blfm"
    r"|nemotron[-_ ]*(?:h\b|3(?!\d))|qwen3[-_ ]next|\b(?:m|by)?t5|\bul2\b|bart\b|albert|pegasus|nllb|m2m|opus-mt"
    r"|deberta|electra|whisper|wav2vec|hubert|\bvit\b|\bmae\b|dino|swin|resnet|convnext|unet|diffusion|sdxl|flux|\bdit\b"
    r"|\bclip\b|llava|[-_ ]?vl\b|vision|pixtral|paligemma|flamingo|blip|dlrm"
)
"""Names of models that are no stack of equal layers of attention and a multilayer perceptron with one head."""
NVLINK_DOMAIN = 64
"""GPUs of an NVL72 rack that one job uses, of powers of two."""


STAGES = (
    (r"hybrid|hsdp|hpz|mics|zero\s*\+\+|q[gw]z|within (?:a )?node", None),
    (r"shard_grad_op|reshard_after_forward\W*false|fsdp.*(?:zero|stage)[-_ ]?2", 2),
    (r"^full_shard|fsdp(?!.*(?:zero|stage)[-_ ]?[0-2])", 3),
    (r"distributed[-_ ]optimizer", 1),
    (r"^(?:none|no|off|false|ddp|no_shard)$", 0),
)
"""What words for how states are sharded say, the first that is found: the stage of ZeRO which does the same. None does
as states that are sharded within a node and copied between nodes."""
TORCH_FSDP = r"^(?!.*megatron).*(?:fsdp|full_shard|shard_grad_op|reshard_after_forward)"
"""Words for PyTorch's own; Megatron's keeps parameters in the compute dtype beside its master weights."""


def _is_power_of_two(number: int) -> bool:
    return number > 0 and not number & (number - 1)


class UnpricedError(ValueError):
    """Why a row gets no prediction."""


@dataclass(frozen=True)
class Software:
    """What a framework does that rows do not say; `match` is a regular expression for source, model, notes, gpu and
    precision, with spaces between and at the ends.

    `launches`: how many times as long its host needs for each kernel as the profile says. The other fields are those of
    `Execution` and `Job`; `flash1` means the first version of FlashAttention, `flash2` the second on devices that have
    a newer one, `plain_attention` a kernel for each step of it, and `zero` the stage where none is given.
    """

    match: str = ""
    passes: float = 1.0
    launches: float = 1.0
    fused_norm: bool = True
    wide_exchanges: bool = False
    whole_logits: bool = False
    narrow_grads: bool = False
    logit_bytes: float = 10.0
    flash1: bool = False
    flash2: bool = False
    plain_attention: bool = False
    sends_once: bool = False
    overlaps: tuple[str, ...] = ()
    zero: int = 0


@dataclass(frozen=True)
class Run:
    """A published run, as far as its step depends on it. `gpu` names a profile; bandwidths, in bytes per second, and
    the memory of a device are there where a row gives them. `no_memory` says why memory cannot be predicted, if so."""

    job: Job
    gpu: str
    per_node: int
    software: Software
    node_bandwidth: float | None = None
    rank_bandwidth: float | None = None
    memory_bytes: int | None = None
    no_memory: str = ""

    def hardware(self) -> Hardware:
        return hardware_of(self, hardware(self.gpu))


@dataclass(frozen=True)
class Prediction:
    """Of one row. `reason` says why something is empty, or that a run does not fit."""

    step_seconds: float | None = None
    peak_bytes: int | None = None
    fits: bool | None = None
    reason: str = ""

    @property
    def cells(self) -> dict[str, str]:
        values = (
            "" if self.step_seconds is None else f"{self.step_seconds:.6g}",
            "" if self.peak_bytes is None else str(self.peak_bytes),
            "" if self.fits is None else ("yes" if self.fits else "OOM"),
            self.reason,
        )
        return dict(zip(PREDICTED, values, strict=True))


def predict(row: Row) -> Prediction:
    """What `row` takes; never raises for what is in it."""
    try:
        run = read_run(row)
        seconds = _predicted_seconds(run)
        if run.no_memory:
            return Prediction(seconds, reason=run.no_memory)
        peak = peak_bytes(run.job).total
    except (UnpricedError, ShardwiseError) as error:
        return Prediction(reason=" ".join(str(error).split()))
    available = run.hardware().memory_bytes
    does_fit = fits(peak, available)
    reason = "" if does_fit else f"needs {peak / 2**30:.1f} GiB, and a margin, of {available / 2**30:.1f}"
    return Prediction(seconds, int(peak), does_fit, reason)


@lru_cache(maxsize=4096)
def _predicted_seconds(run: Run) -> float:
    """Rows of one run differ in what was measured, and are predicted once."""
    return step_seconds(run.job, run.hardware())


# -- hardware -----------------------------------------------------------------------------------------------


def hardware_of(run: Run, profile: Hardware) -> Hardware:
    """`profile` with what the run says of its machines."""
    changed: dict[str, Any] = {"launch_seconds": profile.launch_seconds * run.software.launches}
    rate, shared = profile.network.bytes_per_second, run.node_bandwidth
    if run.rank_bandwidth is not None:
        rate, shared = run.rank_bandwidth, run.rank_bandwidth * run.per_node
    if shared is not None:
        changed["network"] = profile.network.model_copy(
            update={"bytes_per_second": min(rate, shared), "node_bytes_per_second": shared}
        )
    if run.memory_bytes is not None:
        changed["memory_bytes"] = run.memory_bytes
    return profile.model_copy(update=changed).with_ranks(run.per_node)


def _bandwidths(link: str) -> tuple[float | None, float | None]:
    """Bytes per second of a node and of a rank, where the words say so. Raises `UnpricedError` for none at all, and for
    words that name no link.

    A rate is that of what the words after it name (`per GPU`, `/node`); without such words a node's, if it is that of
    several links, of Ethernet, or at least a terabit per second. Of one other link it is unknown how many a node has,
    and the profile's network is assumed, as where only a link's name is given.
    """
    if link and not re.search(LINKS, link):
        raise UnpricedError(f"interconnect is {link[:40]!r}, which names no link")
    node, rank = None, None
    link = " + ".join(one for one in re.split(r"[+,;&]|\band\b", link) if not _is_within_nodes(one))
    if re.search(SLOW_UNITS, link) or re.search(RANGE, link):
        raise UnpricedError(f"interconnect is {link[:40]!r}, which is no rate between devices that train together")
    rates = list(RATE.finditer(link))
    for found, following in zip(rates, (*(one.start() for one in rates[1:]), len(link)), strict=False):
        gbits = float(found["own"] or PORTS[found["port"]]) if found["port"] else float(found["rate"])
        gbits *= int(found["times"] or 1) * (1000 if found["unit"] == "t" else 1)
        whose, kind = link[found.end() : following], found["kind"] or ""
        gbits *= 8 if kind.startswith("byte") else 1
        is_of_node = found["unit"] == "t" or kind == "be" or (found["times"] and kind not in ("b", "b/s"))
        if re.search(r"(?:/|per )\s*(?:gpu|rank|device)", whose):
            rank = gbits if rank is None else rank
        elif re.search(r"(?:/|per )\s*(?:node|host|server)", whose) or is_of_node:
            node = gbits if node is None else node
    if re.search(r"slingshot[- ]?11", link) and not rates:
        rank = SLINGSHOT_11
    if 0 in (node, rank) or any(found["rate"] and not float(found["rate"]) for found in rates):
        raise UnpricedError(f"interconnect is {link[:40]!r}, over which nothing is sent")
    if any(rate is not None and not GBITS[0] <= rate <= GBITS[1] for rate in (node, rank)):
        raise UnpricedError(f"interconnect is {link[:40]!r}, which is no rate between devices that train together")
    return tuple(None if rate is None else rate * 1e9 / 8 for rate in (node, rank))  # type: ignore[return-value]


def _is_within_nodes(words: str) -> bool:
    return bool(re.search(WITHIN_NODES, words)) and not re.search(BETWEEN_NODES, words)


def _in_words(link: str) -> str:
    """In lower case, with the one letter in words that makes bits of bytes, and numbers of links before their rate:
    `HDR x4` as `4x hdr`, `2*100GbE` and `dual 100GbE` as `2x 100gbe`."""
    link = re.sub(r"(?<=[GT])B(?:/s|ps)\b", "bytes/s", re.sub(r"(?<=[GT])b/s\b", "bps", link)).lower()
    link = re.sub(TIMES, "x ", link)
    link = re.sub(r"\b(dual|two|quad|four|eight)[- ](?=\d|[ehnx]dr)", lambda found: f"{COUNTS[found[1]]}x ", link)
    return re.sub(LINKS_BEHIND, r"\2x \1", link)


# -- rows ---------------------------------------------------------------------------------------------------


def read_run(row: Row) -> Run:
    """The run that a row describes. Raises `UnpricedError` with the reason where the row leaves out what is needed.

    Conventions, where a row gives nothing: heads of size 128; an inner width of 4 times the hidden one, or 8/3 of it
    with SwiGLU; Megatron's padded GPT-2 vocabulary of 51,200, or LLaMA's of 32,000; 8 GPUs on a node; ZeRO stage 1 on
    H100 and later (Megatron's distributed optimizer), 0 before; FlashAttention for LLaMA and MPT, and for all on H100
    and later; no recomputation. Weights are converted to fp8 once a step, for its first micro-batch, as Transformer
    Engine does (`is_first_microbatch`).
    """
    cells = _Cells(row)
    device = cells.text("gpu")
    gpu = _profile(device)
    if re.search("lora", cells.about):
        raise UnpricedError("adapters (LoRA) are not priced: most gradients of weights are left out")
    modern = gpu in MODERN
    model = _model(cells, modern)
    words = f" {cells.about} {device} {cells.precision()} "
    software = next((one for one in software_table() if re.search(one.match, words)), Software())
    sizes = _Sizes.of(cells, model)
    recompute = cells.text("recompute")
    precision = cells.precision()
    if len(set(re.findall(r"(?:bf16|fp16|fp8|fp4)(?![a-z\d])(?! tail)", re.sub(r"\(.*?\)", "", precision)))) > 1:
        raise UnpricedError(f"precision is {precision[:40]!r}, which names several")
    if precision and not re.search("bf16|fp16|fp8|fp4", precision):
        raise UnpricedError(f"precision is {precision[:40]!r}, and prices are for bf16, fp16, fp8 and fp4")
    if gpu == "v100-32" and "bf16" in precision:
        raise UnpricedError(f"precision is {precision[:40]!r}, in which a V100 does not compute")
    if modern and not precision:
        raise UnpricedError("precision is not given, and the device computes in fp8 as well as in bf16")
    how = Execution(
        micro_batch=sizes.micro_batch,
        dtype="fp16" if precision.startswith("fp16") or gpu == "v100-32" else "bf16",
        tp=sizes.tp,
        sequence_parallel=sizes.tp > 1 and _has_sequence_parallel(cells.about, modern),
        cp=sizes.cp,
        ep=sizes.ep,
        expert_axis=sizes.expert_axis,
        expert_tp=sizes.expert_tp,
        recompute=_recompute(recompute),
        attention=_attention(cells, modern, gpu, software),
        passes=software.passes,
        fused_norm=software.fused_norm or "rms kernel" in cells.about,
        wide_exchanges=software.wide_exchanges,
        whole_logits=software.whole_logits,
        logit_bytes=software.logit_bytes,
        dropout=not (cells.is_gated or cells.is_mpt or modern),
        product_dtype=next((narrow for narrow in ("fp8", "fp4") if narrow in precision), ""),
        casts_weights=1 / sizes.num_micro_batches,
        sends_once=software.sends_once or "deepep" in cells.about,
        overlaps=(*software.overlaps, *(("ep",) if "a2a overlap" in cells.about else ())),
    )
    zero = _zero(cells, software, modern)
    job = Job(
        model=model,
        how=how,
        dp=sizes.dp,
        pp=sizes.pp,
        num_chunks=sizes.num_chunks,
        num_micro_batches=sizes.num_micro_batches,
        zero=zero,
        overlaps=modern and zero < 3,
        narrow_grads=software.narrow_grads,
        rests_wide=bool(re.search(TORCH_FSDP, cells.text("zero"))),
        offloads=_offloads(cells.text("offload")),
    )
    link = _in_words(cells.written("interconnect"))
    given_per_node = cells.number("gpus_per_node") or 8
    if given_per_node > MAX_PER_NODE:
        raise UnpricedError(f"gpus_per_node is {given_per_node}, and no node has more than {MAX_PER_NODE}")
    per_node = NVLINK_DOMAIN if "nvl72" in link else given_per_node
    memory = re.search(r"(?<!\d)(\d{1,5}) ?gi?b", device)
    _check_memory(device, gpu, int(memory[1]) if memory else None)
    return Run(
        job,
        gpu,
        per_node,
        software,
        *_bandwidths(link),
        memory_bytes=int(memory[1]) * 2**30 if memory else None,
        no_memory="" if recompute else "recompute is not given, on which memory depends",
    )


def _profile(device: str) -> str:
    """The profile of `device`. Raises `UnpricedError` without one, for several devices, and for cards whose links are
    PCIe where the profile's are NVLink."""
    if not device:
        raise UnpricedError("gpu is not given")
    found = [name for pattern, name in GPUS if re.search(pattern, device)]
    is_other = re.search("pcie|pci-e", device) and found[:1] not in (["l40s"], ["4090"])
    if not found or is_other or ("grace" in device and found[0] == "h100-sxm"):
        raise UnpricedError(f"there is no profile of the device {device[:40]!r}")
    if len(set(re.findall(r"[abhv]\d00(?!\d)", re.sub(r"\(.*?\)", "", device)))) > 1:
        raise UnpricedError(f"gpu is {device[:40]!r}, which names several devices")
    if re.search(r"\bmig\b|\dg\.\d+gb|vgpu", device):
        raise UnpricedError(f"gpu is {device[:40]!r}, a part of a device")
    return found[0]


def _check_memory(device: str, gpu: str, num_gib: int | None) -> None:
    """Raise `UnpricedError` where a card has a memory that none of its name has, or one that was made for a single
    machine, with other rates (Leonardo's A100 64GB)."""
    if num_gib is None:
        return
    least, most = (share * hardware(gpu).memory_bytes / 2**30 for share in MEMORY_SHARES)
    if not least <= num_gib <= most or (gpu.startswith("a100") and num_gib == 64):
        raise UnpricedError(f"gpu is {device[:40]!r}, and there is no profile of one with {num_gib} GB")


class _Cells:
    """A row, read by column, with what is known of its model by name."""

    def __init__(self, row: Row) -> None:
        self._row = row
        self.about = " ".join(self._of(column) for column in ("source", "model", "notes"))
        self.family = self._of("model")
        self.known = _known_model(self.family)
        self.is_mpt = "mpt" in self.family
        self.is_gated = bool(self.known.get("gated") or re.search(GATED, self.family))

    def written(self, column: str) -> str:
        value = self._row.get(column)
        return value.strip() if isinstance(value, str) else ""

    def _of(self, column: str) -> str:
        return self.written(column).lower()

    def text(self, column: str) -> str:
        return self._of(column)

    def number(self, column: str) -> int | None:
        text = self._of(column)
        if text in NOTHING:
            return None
        if re.fullmatch(r"\d{1,3}(?:,\d{3})+", text):
            text = text.replace(",", "")
        elif column == "seq_len" and re.fullmatch(r"\d{1,4} ?k", text) and _is_power_of_two(int(text.rstrip("k "))):
            text = str(1024 * int(text.rstrip("k ")))
        try:
            value = float(text.replace("_", "?"))
        except ValueError:
            raise UnpricedError(f"{column} is {text[:40]!r}, which is not a number") from None
        if not 1 <= value <= 1e9 or value != int(value):
            raise UnpricedError(f"{column} is {text[:40]!r}, which is not a whole number from 1 on")
        return int(value)

    def precision(self) -> str:
        """As it is written, with one word for each dtype."""
        text = self._of("precision").replace("bfloat16", "bf16").replace("float16", "fp16").replace("float8", "fp8")
        return "fp16" if text == "half" else text

    def shape(self, column: str) -> int | None:
        """The row's own figure, or that of the model of this name."""
        text = self._of(column)
        given = None if column == "ffn" and text.startswith("moe") else self.number(column)
        return given or self.known.get(column)

    def needed(self, column: str, value: int | None) -> int:
        if value is None:
            raise UnpricedError(f"{column} is not given")
        return value


def _model(cells: _Cells, modern: bool) -> Transformer:
    known, is_gated = cells.known, cells.is_gated
    if re.search(OTHER_MODELS, cells.family):
        raise UnpricedError(
            f"{cells.family[:40]!r} is no stack of equal layers of attention, and others are not priced"
        )
    in_words = re.search(WITH_EXPERTS, cells.family) or re.search(r"\d experts\b", cells.about)
    says_experts = in_words is not None or cells.text("ffn").startswith("moe")
    if says_experts and not known.get("experts"):
        raise UnpricedError(f"nothing is known of the experts of {cells.family[:40]!r}")
    layers = cells.needed("layers", cells.shape("layers"))
    hidden = cells.needed("hidden", cells.shape("hidden"))
    seq_len = cells.needed("seq_len", cells.shape("seq_len"))
    if layers > MAX_LAYERS or hidden > MAX_WIDTH or not MIN_LENGTH <= seq_len <= 100_000_000:
        raise UnpricedError(f"{layers} layers of width {hidden} at {seq_len} tokens are no model")
    heads = cells.shape("heads") or max(1, hidden // 128)
    kv_heads = cells.shape("kv_heads") or heads
    is_uneven = hidden % heads and cells.shape("heads") and not known.get("head_size")
    is_narrow = hidden < MIN_HEAD * heads and not known.get("head_size")
    if not kv_heads <= heads <= hidden or heads % kv_heads or is_uneven or is_narrow:
        raise UnpricedError(f"{heads} heads, {kv_heads} of keys and values, of width {hidden} are no model")
    in_notes = re.search(r"(\d{1,4})k vocab", cells.about)
    vocab = cells.number("vocab") or (int(in_notes[1]) * 1024 if in_notes else known.get("vocab"))
    vocab = vocab or (32_000 if is_gated else 51_200)
    ffn = cells.shape("ffn") or (-(-8 * hidden // 3 // 256) * 256 if is_gated else 4 * hidden)
    experts = known.get("experts")
    if ffn > MAX_WIDTH or vocab > MAX_VOCAB:
        raise UnpricedError(f"an inner width of {ffn} and {vocab} words are no model")
    if layers > hidden or (ffn < hidden and not experts):
        raise UnpricedError(f"{layers} layers of width {hidden}, {ffn} inside, are no model; are columns swapped?")
    return Transformer(
        num_layers=layers,
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        ffn=ffn,
        vocab=vocab,
        seq_len=seq_len,
        head_size=known.get("head_size") or 0,
        gated=is_gated,
        tied=cells.is_mpt or not (is_gated or modern),  # MPTForCausalLM has no other head
        causal="bert" not in cells.family,
        learned_positions=not is_gated,
        rotary=is_gated,
        experts=Experts(**experts) if experts else None,
        q_rank=known.get("q_rank") or 0,
        kv_rank=known.get("kv_rank") or 0,
        window=known.get("window") or 0,
        predicts_more=0 if re.search("w/o mtp", cells.family) else known.get("predicts_more") or 0,
    )


@dataclass(frozen=True)
class _Sizes:
    dp: int
    tp: int
    pp: int
    cp: int
    ep: int
    expert_tp: int
    num_chunks: int
    micro_batch: int
    num_micro_batches: int

    @property
    def expert_axis(self) -> str:
        """Where no expert is split, experts lie next to each other on the ranks that share a sample, as in Megatron
        (Liu et al., arXiv:2504.14960), so that tokens seldom leave a node."""
        rest, axes = self.ep, ["ep"]
        for axis, size in (("tp", self.tp), ("sp", self.cp)) if self.expert_tp == 1 else ():
            if rest % size:
                break
            rest //= size
            axes += [axis] if size > 1 else []
        return "+".join(axes) if self.dp % rest == 0 else "ep" if self.dp % self.ep == 0 else "ep+tp"

    @classmethod
    def of(cls, cells: _Cells, model: Transformer) -> _Sizes:
        """Raises `UnpricedError` for sizes that are missing, or do not agree."""
        gpus = cells.needed("gpus", cells.number("gpus"))
        given_dp = cells.number("dp")
        tp, pp = (cells.number(axis) or (1 if given_dp is not None else None) for axis in ("tp", "pp"))
        tp, pp = cells.needed("tp", tp), cells.needed("pp", pp)
        cp, ep, chunks = (cells.number(axis) or 1 for axis in ("cp", "ep", "vpp"))
        if gpus > MOST_RANKS or pp * pp * chunks > MAX_OPS:
            raise UnpricedError(f"{gpus} GPUs, pp {pp} and vpp {chunks} are more than anything that is timed here")
        if pp > model.num_layers:
            raise UnpricedError(f"pp {pp} stages have {model.num_layers} layers")
        if model.seq_len < cp:
            raise UnpricedError(f"cp {cp} ranks share {model.seq_len} tokens")
        if gpus % (tp * pp * cp):
            raise UnpricedError(f"{gpus} GPUs are no multiple of tp {tp} x pp {pp} x cp {cp}")
        dp = gpus // (tp * pp * cp)
        if given_dp is not None and given_dp != dp:
            raise UnpricedError(f"dp {given_dp} x tp {tp} x pp {pp} x cp {cp} is not {gpus} GPUs")
        if model.num_heads % tp:
            raise UnpricedError(f"tp {tp} does not divide {model.num_heads} heads")
        if model.ffn % tp:
            raise UnpricedError(f"tp {tp} does not divide an inner width of {model.ffn}")
        if ep > 1 and model.experts is None:
            raise UnpricedError(f"ep is {ep}, but nothing is known of the model's experts")
        if (dp * tp) % ep:
            raise UnpricedError(f"ep {ep} does not divide dp {dp} x tp {tp}")
        micro = cells.needed("micro_batch", cells.number("micro_batch"))
        batch = cells.number("global_batch_seqs") or cells.number("gbs_derived")
        if batch is not None and (batch > MAX_BATCH or batch * model.seq_len > MAX_TOKENS):
            raise UnpricedError(f"global_batch_seqs {batch} is no batch of sequences of {model.seq_len} tokens")
        count, rest = divmod(cells.needed("global_batch_seqs", batch), dp * micro)
        if rest or not count:
            raise UnpricedError(f"global_batch_seqs {batch} is no multiple of dp {dp} x micro_batch {micro}")
        if chunks > 1 and pp == 1:
            chunks = 1
        split = re.search(r"etp=(\d{1,3})", cells.about)
        expert_tp = math.gcd(int(split[1]), tp) if split and int(split[1]) else 1
        return cls(dp, tp, pp, cp, ep, expert_tp, chunks, micro, count)


def _zero(cells: _Cells, software: Software, modern: bool) -> int:
    given = cells.text("zero")
    if re.search("offload|infinity", given) and cells.text("offload") in NOTHING:
        raise UnpricedError(f"zero is {given[:40]!r}, and offload does not say what is off the device")
    is_named, by_name = next(((True, stage) for pattern, stage in STAGES if re.search(pattern, given)), (False, None))
    if by_name is not None:
        return by_name
    if is_named:
        raise UnpricedError(f"zero is {given[:40]!r}, which names no stage")
    said = given or " ".join(re.findall(r"deepspeed zero \d+", cells.about))
    said = re.sub(r"\(.*?\)|(?<=\d)\.0(?!\d)", "", said)
    named = re.findall(r"(?<![\d.-])[0-3](?![\d.]|e\d)", re.sub(r"(zero|stage)-", r"\1 ", said))
    if (given and not named) or given.startswith("?") or len(set(named)) > 1:
        raise UnpricedError(f"zero is {given[:40]!r}, which names {'several stages' if named else 'no stage'}")
    return next(map(int, named), 1 if modern else software.zero)


def _recompute(given: str) -> Recompute:
    if given in ("full", "none", "no", "off", "false", "0", ""):
        return "full" if given == "full" else "none"
    if not RECOMPUTED.issuperset(re.split(r"[\s,]+", given)):
        raise UnpricedError(f"recompute is {given[:40]!r}, and not full, none, selective or parts of a layer")
    return "selective"


def _offloads(given: str) -> bool:
    if given in NOTHING or given in ("no", "off", "false"):
        return False
    other = r"nvme|disk|ssd|activation|param|weight|model|\d|%|half|partial|\b(?:no|not|without)\b"
    if "cpu" not in given or re.search(other, given):
        raise UnpricedError(f"offload is {given[:40]!r}, and only states that go to the cpu are priced")
    return True


def _attention(cells: _Cells, modern: bool, gpu: str, software: Software) -> Attention:
    about = cells.about
    if "kernel=torch" in about or software.plain_attention:
        return "plain"
    if "kernel=fused" in about:
        return "fused"
    if "flash" in about or ((cells.is_gated or cells.is_mpt or modern) and gpu != "v100-32"):
        if software.flash1 or "flash_attentionv1" in about:
            return "flash1_of_3" if modern else "flash1"
        return "flash2" if software.flash2 and modern else "flash"
    return "fused"


def _has_sequence_parallel(about: str, modern: bool) -> bool:
    if re.search("sequence_parallel=true|with sequence parallel|with sp", about):
        return True
    return modern and "no sp" not in about


@lru_cache
def _models() -> tuple[tuple[re.Pattern[str], dict[str, Any]], ...]:
    return tuple((re.compile(one["match"]), one) for one in _listed("published_models.yaml", "models"))


@lru_cache
def software_table() -> tuple[Software, ...]:
    """The frameworks that are known, the first that matches counts."""
    listed = _listed("published_software.yaml", "software")
    return tuple(Software(**one | {"overlaps": tuple(one.get("overlaps", ()))}) for one in listed)


def _listed(name: str, key: str) -> list[dict[str, Any]]:
    text = (files("shardwise.fit") / name).read_text(encoding="utf-8")
    found: list[dict[str, Any]] = yaml.safe_load(text)[key]
    return found


def _known_model(name: str) -> dict[str, Any]:
    return next((known for pattern, known in _models() if pattern.search(name)), {})


# -- the file -----------------------------------------------------------------------------------------------


def read_rows(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """The header of a CSV file, and its rows. Raises `ConfigError` where it is no such file."""
    csv.field_size_limit(MAX_CELL)
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, strict=True)
            header = reader.fieldnames = [name.strip() for name in reader.fieldnames or ()]
            twice = sorted({column for column in header if column and header.count(column) > 1})
            if twice:
                raise ConfigError(
                    f"{path} has the column {', '.join(twice)} twice, and rows cannot say which one counts. Leave one."
                )
            missing = [column for column in COLUMNS if column not in header]
            if missing:
                raise ConfigError(
                    f"{path} has no column {', '.join(missing)} in its first line. The columns are those of "
                    f"published runs: {', '.join(COLUMNS)}, ...{_other_separator(header)}"
                )
            for column in header:
                meant = re.sub(r"[\s-]+", "_", column.lower())
                if meant in (*COLUMNS, *OPTIONAL) and meant not in header:
                    raise ConfigError(f"{path} has the column {column!r}, which is read only if it is named {meant!r}.")
            rows = list(_checked(path, reader))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path} cannot be read as a CSV file: {error}") from None
    return header, rows


def _other_separator(header: Sequence[str]) -> str:
    """A hint, where the whole first line is one cell with another separator in it."""
    found = next((name for mark, name in SEPARATORS.items() if len(header) == 1 and mark in header[0]), None)
    return "" if found is None else f" Cells are separated by commas, and here by {found}."


def _checked(path: Path, reader: csv.DictReader[str]) -> Iterator[dict[str, str]]:
    for row in reader:
        if None in row:
            raise ConfigError(f"Line {reader.line_num} of {path} has more cells than the first line has columns.")
        yield {key: value or "" for key, value in row.items()}


def write_predictions(source: Path, out: Path) -> tuple[int, int]:
    """Write the rows of `source` with predictions to `out`. Returns how many rows there are, and how many have one."""
    header, rows = read_rows(source)
    predictions = [predict(row) for row in rows]
    kept = [column for column in header if column not in PREDICTED]
    try:
        with out.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [*kept, *PREDICTED], extrasaction="ignore")
            writer.writeheader()
            writer.writerows({**row, **one.cells} for row, one in zip(rows, predictions, strict=True))
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error}") from None
    return len(rows), sum(one.step_seconds is not None for one in predictions)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m shardwise.fit.published", description=__doc__.splitlines()[0])
    parser.add_argument("rows", type=Path, help="a CSV file of published runs")
    parser.add_argument("--out", type=Path, required=True, help="where to write them with predictions")
    given = parser.parse_args(arguments)
    try:
        num_rows, num_predicted = write_predictions(given.rows, given.out)
    except ShardwiseError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{given.out}: {num_predicted} of {num_rows} rows have a step time.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
