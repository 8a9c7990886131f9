"""Published runs: rows read as jobs, predictions, and a command for files of rows."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.fit import clock
from shardwise.fit.hardware import hardware
from shardwise.fit.operations import Work, Worked, flops_of, work_of_blocks
from shardwise.fit.published import PREDICTED, UnpricedError, hardware_of, main, predict, read_run, software_table
from shardwise.fit.transformer import SLOWER, Execution, Experts, Layers, Transformer
from shardwise.fit.transformer_memory import peak_bytes
from shardwise.fit.transformer_step import Job, rank_programs, stages_of, step_seconds, time_job
from shardwise.program import Block

GPT_175B = Transformer(96, 12288, 96, 96, 4 * 12288, 51200, 2048)
SMALL = Transformer(4, 256, 4, 4, 1024, 1024, 128)
KORTHIKANTI = {  # arXiv:2205.05198, table 5: 18.13 s with full recomputation, 13.75 s with selective
    "source": "Korthikanti 2022 Table 5",
    "model": "gpt3-175B",
    "layers": "96",
    "hidden": "12288",
    "heads": "96",
    "seq_len": "2048",
    "global_batch_seqs": "64",
    "micro_batch": "1",
    "gpu": "A100-80GB",
    "gpus": "64",
    "gpus_per_node": "8",
    "dp": "1",
    "tp": "8",
    "pp": "8",
    "vpp": "3",
    "zero": "0",
    "recompute": "full",
    "precision": "fp16",
}


def row(**changed: str) -> dict[str, str]:
    return {**KORTHIKANTI, **changed}


def job(*, tp: int = 1, dp: int = 1, pp: int = 1, num_micro_batches: int = 1, zero: int = 0) -> Job:
    return Job(SMALL, Execution(2, tp=tp), dp=dp, pp=pp, num_micro_batches=num_micro_batches, zero=zero)


# -- shapes -------------------------------------------------------------------------------------------------


def test_parameters_are_those_of_the_papers() -> None:
    llama = Transformer(32, 4096, 32, 8, 14336, 128256, 8192, gated=True, tied=False, learned_positions=False)
    experts = Experts(128, 8, 1536)
    qwen = Transformer(94, 4096, 64, 4, 12288, 151936, 4096, 128, True, False, experts=experts, learned_positions=False)
    assert GPT_175B.num_params == pytest.approx(174.6e9, rel=0.005)
    assert llama.num_params == pytest.approx(8.03e9, rel=0.005)
    assert qwen.num_params == pytest.approx(235.1e9, rel=0.005)


NAMED = {
    **KORTHIKANTI,
    "source": "Megatron-Bridge",
    **dict.fromkeys(("layers", "hidden", "heads", "recompute", "dp"), ""),
    "gpu": "GB300",
    "gpus": "256",
    "tp": "1",
    "pp": "2",
    "vpp": "8",
    "seq_len": "4096",
    "global_batch_seqs": "4096",
    "precision": "bf16",
}


@pytest.mark.parametrize(
    ("name", "params"),
    [("DeepSeekV3", 671.0e9), ("Kimi_K2", 1027e9), ("GPT OSS 120B", 116.8e9), ("Qwen3_30B_a3B", 30.5e9)],
)
def test_names_of_models_with_experts_stand_for_their_parameters(name: str, params: float) -> None:
    """Those of the papers; modules that predict further tokens are not among them."""
    chunks = {"DeepSeekV3": "8", "Kimi_K2": "8"}.get(name, "1")
    assert read_run({**NAMED, "model": name, "vpp": chunks}).job.model.num_params == pytest.approx(params, rel=0.01)


@pytest.mark.parametrize(("name", "each"), [("DeepSeekV3 (w/o MTP)", 961e12 / 3848), ("DeepSeekV3", 1635e12 / 6288)])
def test_flops_of_latent_attention_and_of_further_tokens(name: str, each: float) -> None:
    """FLOPs of a token as Megatron-Bridge counts them: its rates of FLOPs by those of tokens, of one run each."""
    job = read_run({**NAMED, "model": name}).job
    model, layers = job.model, job.layers
    dense = model.num_layers - model.num_expert_layers
    found = dense * layers.layer().flops + model.num_expert_layers * layers.layer(with_experts=True).flops
    found += layers.head().flops + model.predicts_more * layers.predicting_more().flops
    assert found / layers.tokens == pytest.approx(each, rel=0.025)


def test_every_other_layer_attends_to_a_window() -> None:
    job = read_run({**NAMED, "model": "GPT OSS 120B", "vpp": "1"}).job
    whole, half = (Layers(one, job.how) for one in (replace(job.model, window=0), job.model))
    attended = [sum(one.flops for one in layers.layer().forward if one.kind == "attention") for layers in (whole, half)]
    assert attended[1] == pytest.approx(attended[0] * (1 + 128 / 2048) / 2)


def test_flops_are_those_of_narayanan() -> None:
    """arXiv:2104.04473, equation 2, without recomputation, whose attention is not halved for the causal mask."""
    model, how = GPT_175B, Execution(1, attention="plain", dropout=True)
    layers = Layers(model, how)
    layer, head = layers.layer(), layers.head()
    found = model.num_layers * layer.flops + head.flops
    h, s, size = model.hidden, model.seq_len, model.num_layers * model.hidden**2
    rest = 1 + s / (6 * h) + model.vocab / (12 * model.num_layers * h)
    assert found == pytest.approx(72 * s * size * rest, rel=1e-9)


@pytest.mark.parametrize("tp", [2, 4])
def test_tensor_parallelism_splits_the_products(tp: int) -> None:
    whole, part = (Layers(SMALL, Execution(2, tp=size)).layer() for size in (1, tp))
    assert flops_of(part.forward) == pytest.approx(flops_of(whole.forward) / tp)
    assert [one.kind for one in part.forward if one.communicates] == ["all_reduce"] * 2
    split = Layers(SMALL, Execution(2, tp=tp, sequence_parallel=True)).layer()
    assert [one.kind for one in split.forward if one.communicates] == ["all_gather", "reduce_scatter"] * 2


def test_activations_are_those_of_korthikanti() -> None:
    """arXiv:2205.05198, section 4: s b h (34 + 5 a s / h) without parallelism, 2 s b h if all is recomputed."""
    how = Execution(1, attention="fused", dropout=True)
    s, h, a = GPT_175B.seq_len, GPT_175B.hidden, GPT_175B.num_heads
    whole = Layers(GPT_175B, how).all_saved_bytes()
    assert whole == pytest.approx(s * h * (34 + 5 * a * s / h), rel=0.15)
    full = Layers(GPT_175B, replace(how, recompute="full"))
    assert full.saved_bytes() == 2 * s * h
    selective = Layers(GPT_175B, replace(how, recompute="selective"))
    assert selective.saved_bytes() == pytest.approx(34 * s * h, rel=0.15)


def test_experts_compute_what_their_tokens_need() -> None:
    model = replace(SMALL, experts=Experts(count=8, active=2, ffn=512), gated=True)
    alone, spread = (Layers(model, Execution(2, ep=size)) for size in (1, 4))
    assert spread.expert_params() * 4 == alone.expert_params()
    same = [flops_of(layers.layer(with_experts=True).forward) for layers in (alone, spread)]
    assert same[0] == pytest.approx(same[1])
    exchanged = [one for one in spread.layer(with_experts=True).forward if one.kind == "all_to_all"]
    assert [one.num_bytes for one in exchanged] == [2 * 128 * 2 * 256 * 2] * 2
    once = Layers(model, Execution(2, ep=4, sends_once=True)).layer(with_experts=True)
    sent = [one.num_bytes for one in once.forward if one.kind == "all_to_all"]
    assert sent == [2 * 128 * (1 + 3 / 4) * 256 * 2] * 2  # of two choices, three in four are on another rank


def test_weights_are_converted_once_a_step() -> None:
    each, once = (Layers(SMALL, Execution(2, product_dtype="fp8", casts_weights=share)) for share in (1.0, 0.25))
    more = sum(one.num_bytes for one in each.layer().forward) - sum(one.num_bytes for one in once.layer().forward)
    assert more == pytest.approx(0.75 * (2 + 2) * 12 * SMALL.hidden**2)


def test_what_overlaps_is_named_by_its_axis() -> None:
    model = replace(SMALL, experts=Experts(count=8, active=2, ffn=512))
    layers = Layers(model, Execution(2, tp=2, ep=4, sequence_parallel=True, overlaps=("ep",)))
    sent = {one.axis: one.overlaps for one in layers.layer(with_experts=True).forward if one.communicates}
    assert sent == {"tp": False, "ep": True}


# -- steps --------------------------------------------------------------------------------------------------


def test_layers_that_do_not_divide_count_the_ends_as_layers() -> None:
    model = replace(SMALL, num_layers=126)
    stages = stages_of(Job(model, Execution(1), pp=16, num_chunks=8))
    assert len(stages) == 128
    assert (stages[0].num_layers, stages[0].has_embedding) == (0, True)
    assert (stages[-1].num_layers, stages[-1].has_head) == (0, True)
    assert sum(one.num_layers for one in stages) == 126


def test_the_head_behind_layers_that_do_not_divide_counts_as_layers() -> None:
    """`Et*4|(t*4|)*14tmL` in the recipes of Megatron-Bridge for DeepSeek-V3, and the same for Kimi K2."""
    for name in ("DeepSeekV3", "DeepSeekV3 (w/o MTP)", "Kimi_K2"):
        stages = stages_of(read_run({**NAMED, "model": name}).job)
        assert [one.num_layers for one in stages] == [4] * 15 + [1]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("pp", [1, 2])
def test_every_layout_has_a_time(zero: int, pp: int) -> None:
    asked = job(tp=2, dp=2, pp=pp, num_micro_batches=4, zero=zero)
    timeline = time_job(asked, hardware("a100-80"))
    assert len(timeline.ranks) == pp
    assert 0 < timeline.mfu < 1


def test_long_schedules_are_timed_as_if_all_rounds_were() -> None:
    machine = hardware("a100-80")
    asked = job(pp=4, num_micro_batches=20)
    assert step_seconds(asked, machine) == pytest.approx(time_job(asked, machine).step_seconds, rel=0.01)


def test_more_micro_batches_take_longer_and_a_pipeline_has_a_bubble() -> None:
    machine = hardware("a100-80")
    seconds = [step_seconds(job(pp=2, num_micro_batches=count), machine) for count in (2, 4, 8)]
    assert seconds == sorted(seconds)
    assert seconds[1] / seconds[0] < 2 > seconds[2] / seconds[1]


def test_memory_shrinks_with_each_stage_of_zero_and_with_recomputation() -> None:
    peaks = [peak_bytes(job(dp=8, zero=stage)).total for stage in (0, 1, 2)]
    assert peaks == sorted(peaks, reverse=True)
    kept, again = (
        peak_bytes(Job(GPT_175B, Execution(1, tp=8, recompute=recompute), pp=8)).activations
        for recompute in ("none", "full")
    )
    assert again < kept / 5


def test_programs_are_those_of_the_library() -> None:
    (program,) = rank_programs(job(dp=2, zero=3))
    verbs = [action.verb for block in program.step.micro_batch for action in block.actions]
    assert verbs.count("gather") == 2 * (SMALL.num_layers + 2) - 1  # the head stays between forward and backward
    assert verbs.count("reduce_scatter") == SMALL.num_layers + 2


# -- rows ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "measured"), [({}, 18.13), ({"recompute": "selective", "notes": "with sequence parallel"}, 13.75)]
)
def test_runs_that_were_not_fitted_are_predicted(changed: dict[str, str], measured: float) -> None:
    assert predict(row(**changed)).step_seconds == pytest.approx(measured, rel=0.15)


LACKING: list[tuple[dict[str, str], str]] = [
    ({"gpu": ""}, "gpu is not given"),
    ({"gpu": "TPU v3"}, "there is no profile of the device 'tpu v3'"),
    ({"layers": "", "model": "GPT 91B"}, "layers is not given"),
    ({"micro_batch": ""}, "micro_batch is not given"),
    ({"global_batch_seqs": ""}, "global_batch_seqs is not given"),
    ({"gpus": "48"}, "48 GPUs are no multiple of tp 8 x pp 8 x cp 1"),
    ({"dp": "2"}, "dp 2 x tp 8 x pp 8 x cp 1 is not 64 GPUs"),
    ({"pp": "64", "vpp": "5", "tp": "1"}, "pp 64 and vpp 5 are more than anything that is timed here"),
    ({"notes": "mode=LoRA"}, "adapters (LoRA) are not priced"),
    ({"ep": "4"}, "ep is 4, but nothing is known of the model's experts"),
    ({"zero": "? (old branch)"}, "zero is '? (old branch)', which names no stage"),
    ({"hidden": "1e400"}, "hidden is '1e400', which is not a whole number from 1 on"),
    ({"interconnect": "0 Gbps/node"}, "interconnect is '0 gbps/node', over which nothing is sent"),
    ({"interconnect": "banana"}, "interconnect is 'banana', which names no link"),
    ({"recompute": "banana"}, "recompute is 'banana', and not full, none, selective or parts of a layer"),
    ({"offload": "banana"}, "offload is 'banana', and only states that go to the cpu are priced"),
    ({"gpus_per_node": "1e9"}, "gpus_per_node is 1000000000, and no node has more than 1024"),
    ({"kv_heads": "7"}, "96 heads, 7 of keys and values, of width 12288 are no model"),
    ({"vocab": "1e9"}, "an inner width of 49152 and 1000000000 words are no model"),
    ({"global_batch_seqs": "1e9"}, "global_batch_seqs 1000000000 is no batch"),
    ({"zero": "9"}, "zero is '9', which names no stage"),
    ({"zero": "1e9"}, "zero is '1e9', which names no stage"),
    ({"zero": "-1"}, "zero is '-1', which names no stage"),
    ({"precision": "int3"}, "precision is 'int3', and prices are for bf16, fp16, fp8 and fp4"),
    ({"hidden": "64", "heads": "96"}, "96 heads, 96 of keys and values, of width 64 are no model"),
    ({"hidden": "nan"}, "hidden is 'nan', which is not a whole number from 1 on"),
    ({"seq_len": "-3"}, "seq_len is '-3', which is not a whole number from 1 on"),
    ({"heads": "many"}, "heads is 'many', which is not a number"),
    ({"pp": "64", "tp": "1"}, "global_batch_seqs 64"),
    ({"gpu": "H100", "precision": ""}, "precision is not given, and the device computes in fp8 as well as in bf16"),
    ({"gpu": "H100 PCIe 80GB"}, "there is no profile of the device 'h100 pcie 80gb'"),
    ({"gpu": "H100 NVL"}, "there is no profile of the device 'h100 nvl'"),
    ({"gpu": "GH200 96GB"}, "there is no profile of the device 'gh200 96gb'"),
    ({"gpu": "RTX A1000"}, "there is no profile of the device 'rtx a1000'"),
    ({"gpu": "RTX PRO 6000 Blackwell"}, "there is no profile of the device"),
    ({"gpu": "32x A100 + 32x V100"}, "gpu is '32x a100 + 32x v100', which names several devices"),
    ({"gpu": "V100-32GB", "precision": "bf16"}, "precision is 'bf16', in which a V100 does not compute"),
    ({"precision": "fp32"}, "precision is 'fp32', and prices are for bf16, fp16, fp8 and fp4"),
    ({"hidden": "1536", "heads": "12"}, "tp 8 does not divide 12 heads"),
    ({"hidden": "1024", "heads": "4"}, "tp 8 does not divide 4 heads"),
    ({"model": "Mixtral 8x22B"}, "nothing is known of the experts of 'mixtral 8x22b'"),
    ({"model": "Qwen3.5 397B-A17B"}, "nothing is known of the experts of"),
    ({"model": "GLaM 64B/64E"}, "nothing is known of the experts of"),
    ({"model": "GPT 10B", "ffn": "moe 1408"}, "nothing is known of the experts of 'gpt 10b'"),
    ({"model": "Mamba2 2.7B"}, "'mamba2 2.7b' is no stack of equal layers of attention"),
    ({"model": "Nemotron-3 Nano 30B"}, "is no stack of equal layers of attention"),
    ({"model": "T5-11B"}, "'t5-11b' is no stack of equal layers of attention"),
    ({"model": "stable-diffusion-v1-4"}, "is no stack of equal layers of attention"),
    ({"model": "ViT-G/14"}, "is no stack of equal layers of attention"),
    ({"zero": "HSDP"}, "zero is 'hsdp', which names no stage"),
    ({"micro_batch": "7"}, "global_batch_seqs 64 is no multiple of dp 1 x micro_batch 7"),
    ({"seq_len": "1M"}, "seq_len is '1m', which is not a number"),
    ({"seq_len": "100k"}, "seq_len is '100k', which is not a number"),
    ({"vocab": "32k"}, "vocab is '32k', which is not a number"),
    ({"hidden": "4,09"}, "hidden is '4,09', which is not a number"),
    ({"interconnect": "0 Gbps"}, "interconnect is '0 gbps', over which nothing is sent"),
    ({"precision": "bf16 or fp16"}, "precision is 'bf16 or fp16', which names several"),
    ({"gpu": "H100", "precision": "BF16/FP8"}, "precision is 'bf16/fp8', which names several"),
    ({"zero": "ZeRO-2/3"}, "zero is 'zero-2/3', which names several stages"),
    ({"gpu": "H200 NVL"}, "there is no profile of the device 'h200 nvl'"),
    ({"gpu": "A100X"}, "there is no profile of the device 'a100x'"),
    ({"gpu": "MI355X"}, "there is no profile of the device 'mi355x'"),
    ({"gpu": "H20"}, "there is no profile of the device 'h20'"),
    ({"gpus": "-"}, "gpus is not given"),
    ({"gpu": "V100S"}, "there is no profile of the device 'v100s'"),
    ({"gpu": "H100 CNX"}, "there is no profile of the device 'h100 cnx'"),
    ({"gpu": "RTX 4090 D"}, "there is no profile of the device 'rtx 4090 d'"),
    ({"gpu": "RTX 4090 Laptop GPU"}, "there is no profile of the device"),
    ({"gpu": "RTX 4090M"}, "there is no profile of the device 'rtx 4090m'"),
    ({"gpu": "A800-80GB"}, "there is no profile of the device"),
    ({"gpu": "H800"}, "there is no profile of the device"),
    ({"gpu": "MI250X"}, "there is no profile of the device"),
    ({"gpu": "MI325X"}, "there is no profile of the device"),
    ({"gpu": "L40"}, "there is no profile of the device"),
    ({"gpu": "A100x8"}, "there is no profile of the device"),
    ({"gpu": "Gaudi2"}, "there is no profile of the device"),
    ({"gpu": "H100/H200"}, "which names several devices"),
    ({"model": "DeepSeek V2"}, "nothing is known of the experts of 'deepseek v2'"),
    ({"model": "DeepSeek-R1-distilled"}, "nothing is known of the experts of"),
    ({"model": "OLMoE-1B-7B"}, "nothing is known of the experts of 'olmoe-1b-7b'"),
    ({"model": "Grok-1"}, "nothing is known of the experts of 'grok-1'"),
    ({"model": "Kimi K1.5"}, "nothing is known of the experts of"),
    ({"model": "gpt-oss-20b"}, "nothing is known of the experts of 'gpt-oss-20b'"),
    ({"model": "Snowflake Arctic"}, "nothing is known of the experts of"),
    ({"model": "Hunyuan-Large"}, "nothing is known of the experts of"),
    ({"model": "GLM-4.5"}, "nothing is known of the experts of"),
    ({"model": "Llama-4-Maverick"}, "nothing is known of the experts of"),
    ({"model": "Phi-3.5-MoE"}, "nothing is known of the experts of"),
    ({"model": "RecurrentGemma 9B"}, "is no stack of equal layers of attention"),
    ({"model": "Falcon-H1 34B"}, "is no stack of equal layers of attention"),
    ({"model": "xLSTM 7B"}, "is no stack of equal layers of attention"),
    ({"model": "MiniMax-Text-01"}, "is no stack of equal layers of attention"),
    ({"model": "UL2 20B"}, "is no stack of equal layers of attention"),
    ({"model": "Llama 3.2 11B Vision"}, "is no stack of equal layers of attention"),
    ({"model": "InternVL 26B"}, "is no stack of equal layers of attention"),
    ({"model": "PaliGemma 3B"}, "is no stack of equal layers of attention"),
    ({"model": "FLUX.1-dev"}, "is no stack of equal layers of attention"),
    ({"model": "HuBERT-XL"}, "is no stack of equal layers of attention"),
    ({"model": "DINOv2 ViT-g"}, "is no stack of equal layers of attention"),
    ({"gpu": "GB200", "precision": "bf16/mxfp8"}, "precision is 'bf16/mxfp8', which names several"),
    ({"gpu": "GB200", "precision": "NVFP4 or MXFP8"}, "precision is 'nvfp4 or mxfp8', which names several"),
    ({"gpu": "H100", "precision": "bfloat16, float8"}, "which names several"),
    ({"precision": "mixed"}, "precision is 'mixed', and prices are for bf16, fp16, fp8 and fp4"),
    ({"precision": "tf32"}, "precision is 'tf32', and prices are for"),
    ({"zero": "HYBRID_SHARD"}, "zero is 'hybrid_shard', which names no stage"),
    ({"zero": "_HYBRID_SHARD_ZERO2"}, "zero is '_hybrid_shard_zero2', which names no stage"),
    ({"zero": "FSDP hybrid"}, "zero is 'fsdp hybrid', which names no stage"),
    ({"zero": "ZeRO-3 offload"}, "zero is 'zero-3 offload', and offload does not say what is off the device"),
    ({"zero": "ZeRO-Infinity"}, "offload does not say what is off the device"),
    ({"zero": "3 (CPU offload)", "offload": "-"}, "offload does not say what is off the device"),
    ({"zero": "0/1"}, "which names several stages"),
    ({"offload": "cpu + nvme"}, "offload is 'cpu + nvme', and only states that go to the cpu are priced"),
    ({"offload": "activations to cpu"}, "and only states that go to the cpu are priced"),
    ({"offload": "no cpu offload"}, "and only states that go to the cpu are priced"),
    ({"recompute": "selective (core_attn)"}, "and not full, none, selective or parts of a layer"),
    ({"recompute": "true"}, "recompute is 'true', and not full"),
    ({"recompute": "every other layer"}, "and not full, none, selective or parts of a layer"),
    ({"gpus": "8x8"}, "gpus is '8x8', which is not a number"),
    ({"seq_len": "4096 tokens"}, "seq_len is '4096 tokens', which is not a number"),
    ({"heads": "96/8"}, "heads is '96/8', which is not a number"),
    ({"tp": "TP8"}, "tp is 'tp8', which is not a number"),
    ({"micro_batch": "0.5"}, "which is not a whole number from 1 on"),
    ({"vpp": "0"}, "vpp is '0', which is not a whole number from 1 on"),
    ({"global_batch_seqs": "4M tokens"}, "which is not a number"),
    ({"hidden": "12 288"}, "hidden is '12 288', which is not a number"),
    ({"hidden": "12.288"}, "which is not a whole number from 1 on"),
    ({"gpu": "A100-SXM-64GB"}, "gpu is 'a100-sxm-64gb', and there is no profile of one with 64 GB"),
    ({"gpu": "A100 MIG 3g.40gb"}, "gpu is 'a100 mig 3g.40gb', a part of a device"),
    ({"gpu": "H100 MIG 1g.10gb", "precision": "bf16"}, "gpu is 'h100 mig 1g.10gb', a part of a device"),
    ({"gpu": "MI300"}, "there is no profile of the device 'mi300'"),
    ({"gpu": "A100, H100"}, "gpu is 'a100, h100', which names several devices"),
    ({"gpu": "A100 or V100"}, "gpu is 'a100 or v100', which names several devices"),
    ({"gpu": "A30"}, "there is no profile of the device 'a30'"),
    ({"gpu": "A10G"}, "there is no profile of the device 'a10g'"),
    ({"gpu": "RTX 3090"}, "there is no profile of the device 'rtx 3090'"),
    ({"gpu": "RTX 6000 Ada"}, "there is no profile of the device 'rtx 6000 ada'"),
    ({"gpu": "Ascend 910B"}, "there is no profile of the device 'ascend 910b'"),
    ({"gpu": "P100"}, "there is no profile of the device 'p100'"),
    ({"gpu": "GH200", "precision": "bf16"}, "there is no profile of the device 'gh200'"),
    ({"gpu": "V100-PCIE-16GB"}, "there is no profile of the device 'v100-pcie-16gb'"),
    ({"gpu": "Grace Hopper H100", "precision": "bf16"}, "there is no profile of the device 'grace hopper h100'"),
    ({"gpu": "A100 8GB"}, "gpu is 'a100 8gb', and there is no profile of one with 8 GB"),
    ({"gpu": "H100 800GB", "precision": "bf16"}, "gpu is 'h100 800gb', and there is no profile of one with 800 GB"),
    ({"gpus": "~64"}, "gpus is '~64', which is not a number"),
    ({"gpus": "2^6"}, "gpus is '2^6', which is not a number"),
    ({"gpus": "64/128"}, "gpus is '64/128', which is not a number"),
    ({"gpus": "6_4"}, "gpus is '6_4', which is not a number"),
    ({"layers": "2x48"}, "layers is '2x48', which is not a number"),
    ({"hidden": "12288 (d_model)"}, "hidden is '12288 (d_model)', which is not a number"),
    ({"heads": "96 q, 8 kv"}, "heads is '96 q, 8 kv', which is not a number"),
    ({"kv_heads": "MQA"}, "kv_heads is 'mqa', which is not a number"),
    ({"ffn": "4h"}, "ffn is '4h', which is not a number"),
    ({"vocab": "51.2k"}, "vocab is '51.2k', which is not a number"),
    ({"seq_len": "2048-4096"}, "seq_len is '2048-4096', which is not a number"),
    ({"global_batch_seqs": "32 -> 64"}, "global_batch_seqs is '32 -> 64', which is not a number"),
    ({"micro_batch": "auto"}, "micro_batch is 'auto', which is not a number"),
    ({"micro_batch": "1 per GPU"}, "micro_batch is '1 per gpu', which is not a number"),
    ({"vpp": "2.5"}, "vpp is '2.5', which is not a whole number from 1 on"),
    ({"cp": "ring-2"}, "cp is 'ring-2', which is not a number"),
    ({"gpus_per_node": "DGX"}, "gpus_per_node is 'dgx', which is not a number"),
    ({"zero": "ZeRO++"}, "zero is 'zero++', which names no stage"),
    ({"zero": "ZeRO-3 + hpZ"}, "zero is 'zero-3 + hpz', which names no stage"),
    ({"zero": "3 (MiCS)"}, "zero is '3 (mics)', which names no stage"),
    ({"zero": "MiCS"}, "zero is 'mics', which names no stage"),
    ({"zero": "P_os+g"}, "zero is 'p_os+g', which names no stage"),
    ({"zero": "DeepSpeed"}, "zero is 'deepspeed', which names no stage"),
    ({"zero": "ZeRO-1.5"}, "zero is 'zero-1.5', which names no stage"),
    ({"zero": "ZeRO stage II"}, "zero is 'zero stage ii', which names no stage"),
    ({"zero": "ZeRO-3 qgZ int4", "dp": "1"}, "zero is 'zero-3 qgz int4', which names no stage"),
    ({"zero": "ZeRO-2 + ZeRO-3"}, "zero is 'zero-2 + zero-3', which names several stages"),
    ({"zero": "FSDP within node"}, "zero is 'fsdp within node', which names no stage"),
    (
        {"offload": "cpu (params + optimizer)"},
        "offload is 'cpu (params + optimizer)', and only states that go to the",
    ),
    ({"offload": "parameters to cpu"}, "offload is 'parameters to cpu', and only states that go to the cpu"),
    ({"offload": "cpu params"}, "offload is 'cpu params', and only states that go to the cpu are priced"),
    ({"offload": "50% cpu"}, "offload is '50% cpu', and only states that go to the cpu are priced"),
    ({"offload": "cpu 0.5"}, "offload is 'cpu 0.5', and only states that go to the cpu are priced"),
    ({"offload": "yes"}, "offload is 'yes', and only states that go to the cpu are priced"),
    ({"offload": "true"}, "offload is 'true', and only states that go to the cpu are priced"),
    ({"offload": "host"}, "offload is 'host', and only states that go to the cpu are priced"),
    ({"recompute": "yes"}, "recompute is 'yes', and not full, none, selective or parts of a layer"),
    ({"recompute": "partial"}, "recompute is 'partial', and not full, none, selective or parts of a"),
    ({"recompute": "50%"}, "recompute is '50%', and not full, none, selective or parts of a layer"),
    ({"recompute": "block 8"}, "recompute is 'block 8', and not full, none, selective or parts of a"),
    ({"recompute": "attention only"}, "recompute is 'attention only', and not full, none, selective or parts"),
    ({"recompute": "1 of 4 layers"}, "recompute is '1 of 4 layers', and not full, none, selective or parts"),
    ({"recompute": "full on half of the stages"}, "recompute is 'full on half of the stages', and not full, none,"),
    ({"recompute": "selective, full"}, "recompute is 'selective, full', and not full, none, selective or"),
    ({"precision": "int8"}, "precision is 'int8', and prices are for bf16, fp16, fp8 and fp4"),
    ({"precision": "E4M3"}, "precision is 'e4m3', and prices are for bf16, fp16, fp8 and fp4"),
    ({"precision": "W4A8"}, "precision is 'w4a8', and prices are for bf16, fp16, fp8 and fp4"),
    ({"precision": "bf16 -> fp8", "gpu": "H100"}, "precision is 'bf16 -> fp8', which names several"),
    ({"precision": "MXFP6", "gpu": "GB200"}, "precision is 'mxfp6', and prices are for bf16, fp16, fp8 and fp4"),
    ({"precision": "fp64"}, "precision is 'fp64', and prices are for bf16, fp16, fp8 and fp4"),
    ({"precision": "O2"}, "precision is 'o2', and prices are for bf16, fp16, fp8 and fp4"),
    ({"precision": "16"}, "precision is '16', and prices are for bf16, fp16, fp8 and fp4"),
    ({"interconnect": "200"}, "interconnect is '200', which names no link"),
    ({"interconnect": "IB 400 Mbps"}, "interconnect is 'ib 400 mbps', which is no rate between devices that"),
    (
        {"interconnect": "Ethernet 100 Mb/s"},
        "interconnect is 'ethernet 100 mb/s', which is no rate between devices",
    ),
    ({"interconnect": "IB 25 MB/s"}, "interconnect is 'ib 25 mb/s', which is no rate between devices that"),
    ({"interconnect": "10 kbps ethernet"}, "interconnect is '10 kbps ethernet', which is no rate between devices"),
    ({"interconnect": "-100GbE"}, "interconnect is '-100gbe', which is no rate between devices that"),
    ({"interconnect": "1e9 Gbps"}, "interconnect is '1e9 gbps', which is no rate between devices that"),
    (
        {"interconnect": "100-200 Gbps per node"},
        "interconnect is '100-200 gbps per node', which is no rate between",
    ),
    ({"interconnect": "999999 Gbps per GPU"}, "interconnect is '999999 gbps per gpu', which is no rate between"),
    ({"interconnect": "0.0001 Gbps per node"}, "interconnect is '0.0001 gbps per node', which is no rate between"),
    (
        {"layers": "4000", "hidden": "96", "heads": "96"},
        "96 heads, 96 of keys and values, of width 96 are no model",
    ),
    ({"hidden": "12288", "ffn": "96"}, "96 layers of width 12288, 96 inside, are no model; are columns"),
    ({"global_batch_seqs": "4194304"}, "global_batch_seqs 4194304 is no batch of sequences of 2048 tokens"),
    (
        {"seq_len": "64", "global_batch_seqs": "2048000"},
        "global_batch_seqs 2048000 is no batch of sequences of 64 tokens",
    ),
    (
        {"seq_len": "1", "micro_batch": "64", "global_batch_seqs": "64"},
        "96 layers of width 12288 at 1 tokens are no model",
    ),
    ({"heads": "12288", "hidden": "12288"}, "12288 heads, 12288 of keys and values, of width 12288 are no model"),
    ({"kv_heads": "96", "heads": "8"}, "8 heads, 96 of keys and values, of width 12288 are no model"),
    ({"layers": "1"}, "pp 8 stages have 1 layers"),
    ({"micro_batch": "2048", "seq_len": "1"}, "96 layers of width 12288 at 1 tokens are no model"),
    ({"model": "GPT-2 (decoder) + ViT"}, "'gpt-2 (decoder) + vit' is no stack of equal layers of attention, and"),
    ({"model": "RWKV-7"}, "'rwkv-7' is no stack of equal layers of attention, and others are not"),
    ({"model": "Jamba"}, "'jamba' is no stack of equal layers of attention, and others are not"),
    ({"model": "Qwen2-VL 7B"}, "'qwen2-vl 7b' is no stack of equal layers of attention, and others"),
]


def refusal(changed: dict[str, str]) -> str:
    """Why such a row is not read."""
    try:
        read_run(row(**changed))
    except UnpricedError as error:
        return str(error)
    return ""


def test_a_row_that_lacks_something_gets_a_reason() -> None:
    for changed, reason in LACKING:
        prediction = predict(row(**changed))
        assert (prediction.step_seconds, prediction.fits) == (None, None), changed
        if changed.get("pp") and "vpp" not in changed:  # 64 stages of 3 chunks do not fit into 96 layers
            assert "192 stages need as many layers" in prediction.reason, changed
        else:
            assert reason in refusal(changed), changed
            assert reason in prediction.reason, changed


@pytest.mark.parametrize(
    ("given", "same"),
    [
        ({"seq_len": "2k"}, {"seq_len": "2048"}),
        ({"hidden": "12,288", "global_batch_seqs": "1,024"}, {"hidden": "12288", "global_batch_seqs": "1024"}),
        ({"vpp": "-", "ep": "n/a", "cp": "None"}, {"vpp": "", "ep": "", "cp": ""}),
        ({"precision": "bfloat16"}, {"precision": "bf16"}),
        ({"precision": "float16"}, {"precision": "fp16"}),
        ({"recompute": "no"}, {"recompute": "none"}),
        ({"zero": "3.0"}, {"zero": "3"}),
        ({"zero": "stage 2"}, {"zero": "2"}),
        ({"zero": "FULL_SHARD"}, {"zero": "fsdp"}),
        ({"zero": "fsdp SHARD_GRAD_OP"}, {"zero": "2"}),
        ({"zero": "distributed optimizer"}, {"zero": "1"}),
        ({"zero": "DDP"}, {"zero": "0"}),
        ({"zero": "NO_SHARD"}, {"zero": "0"}),
        ({"zero": "FSDP (ZeRO-2)"}, {"zero": "2"}),
        ({"zero": "FSDP2, reshard_after_forward=False"}, {"zero": "2"}),
        ({"zero": "zero_stage=3"}, {"zero": "3"}),
        ({"zero": "1 (distributed optimizer)"}, {"zero": "1"}),
        ({"zero": "ZeRO-2 offload", "offload": "cpu"}, {"zero": "2", "offload": "cpu"}),
        ({"offload": "optimizer states to CPU"}, {"offload": "cpu"}),
        ({"offload": "n/a"}, {"offload": ""}),
        ({"offload": "False"}, {"offload": "none"}),
        ({"precision": "BF16-mixed"}, {"precision": "bf16"}),
        ({"precision": "bf16 (fp32 gradients)"}, {"precision": "bf16"}),
        ({"precision": "half"}, {"precision": "fp16"}),
        ({"gpu": "H100", "precision": "float8 rowwise"}, {"gpu": "H100", "precision": "fp8"}),
        ({"gpu": "NVIDIA H100 80GB HBM3", "precision": "bf16"}, {"gpu": "H100 80 GB", "precision": "bf16"}),
        ({"gpu": "Tesla V100-SXM2-32GB", "precision": "fp16"}, {"gpu": "v100 32gb", "precision": "fp16"}),
        ({"gpu": "A100 (80GB, SXM)"}, {"gpu": "A100-80GB"}),
        ({"recompute": "NONE"}, {"recompute": "none"}),
        ({"seq_len": "2 K"}, {"seq_len": "2048"}),
        ({"seq_len": "2048.0", "layers": "96.0"}, {"seq_len": "2048", "layers": "96"}),
        ({"hidden": "1.2288e4"}, {"hidden": "12288"}),
        ({"interconnect": "4 \u00d7 200GbE"}, {"interconnect": "4x200GbE"}),
        ({"interconnect": "HDR x8"}, {"interconnect": "8x HDR"}),
        ({"interconnect": "NDR400 (x8)"}, {"interconnect": "8x NDR400"}),
        ({"interconnect": "dual 100GbE"}, {"interconnect": "2x100GbE"}),
        ({"interconnect": "eight HDR200"}, {"interconnect": "8x HDR200"}),
        ({"interconnect": "8*200 Gb/s IB"}, {"interconnect": "8x200Gbps IB"}),
        ({"interconnect": "RoCEv2-400G per GPU"}, {"interconnect": "RoCE 400G per GPU"}),
        ({"gpus": "+64", "hidden": "1.2288e+4"}, {"gpus": "64", "hidden": "12288"}),
        ({"precision": "bf16 + fp32 master"}, {"precision": "bf16"}),
        ({"gpu": "V100-SXM2-16GB"}, {"gpu": "V100 16 GB"}),
    ],
)
def test_what_tables_write_in_several_ways_is_one_thing(given: dict[str, str], same: dict[str, str]) -> None:
    few = {"global_batch_seqs": "8"}  # which are simulated sooner
    found = predict(row(**{**few, **given}))
    assert found.step_seconds is not None, found.reason
    assert found == predict(row(**{**few, **same}))


@pytest.mark.parametrize(("gpu", "precision"), [("A100", "fp8"), ("A100", "NVFP4"), ("H100", "fp4"), ("MI300X", "fp4")])
def test_a_dtype_that_a_device_has_not_is_no_guess(gpu: str, precision: str) -> None:
    prediction = predict(row(gpu=gpu, precision=precision))
    assert prediction.step_seconds is None
    assert "has no rate for" in prediction.reason


def test_a_large_llama_is_no_fourth_one() -> None:
    assert read_run(row(model="Llama 405B")).job.model.experts is None


def test_families_with_gated_layers_have_three_matrices_in_them() -> None:
    sizes = {"layers": "32", "hidden": "4096", "heads": "32", "ffn": "11264", "vocab": "64000"}
    for model in ("Gemma 9B", "Yi-6B", "DeepSeek LLM 7B", "OLMo 7B", "Phi-3 mini", "Baichuan2 7B", "Mistral 7B"):
        assert read_run(row(model=model, **sizes)).job.model.gated, model
    for model in ("GPT 7B", "OPT 6.7B", "Falcon 7B", "BLOOM 7B"):
        assert not read_run(row(model=model, **sizes)).job.model.gated, model


@pytest.mark.parametrize(
    ("words", "node", "rank"),
    [
        ("RoCE 1600Gbps/node", 1600, None),
        ("4x100Gb RoCE per node", 400, None),
        ("4x IB 100Gbps per node", 400, None),
        ("NVLink + 400Gb/s RDMA per GPU", None, 400),
        ("200Gb/s HDR IB per GPU (NDm A100 v4)", None, 200),
        ("IB 8x50GB/s", 3200, None),
        ("ib 8x50gb/s", None, None),  # bits or bytes: the letter has no case
        ("12.5 GB/s per GPU", None, 100),
        ("NVLink 900GB/s per GPU + 8x NDR400", 3200, None),  # what is within a node says nothing of the network
        ("NVSwitch 600 GB/s per GPU, 100GbE", 100, None),
        ("NVLink pairs (0-1,2-3)", None, None),
        ("3.2T", 3200, None),
        ("EFA 3.2 Tbps", 3200, None),
        ("100GbE", 100, None),
        ("8x HDR200", 1600, None),
        ("4 x NDR", 1600, None),
        ("NDR per GPU", None, 400),
        ("HDR200", None, None),
        ("RoCE v2 400G", None, None),
        ("RoCE v2 400G per GPU", None, 400),
        ("Slingshot-11", None, 200),
        ("Omni-Path", None, None),
        ("EFA", None, None),
    ],
)
def test_words_for_links_give_the_rates_that_they_say(words: str, node: int | None, rank: int | None) -> None:
    run = read_run(row(interconnect=words))
    found = run.node_bandwidth, run.rank_bandwidth
    assert found == tuple(None if rate is None else rate * 1e9 / 8 for rate in (node, rank))
    assert predict(row(interconnect=words)).step_seconds


@pytest.mark.parametrize(
    ("words", "profile", "num_gib"),
    [
        ("A100-SXM4-40GB", "a100-40", 40),
        ("a100_40gb", "a100-40", 40),
        ("A100 (DGX-A100)", "a100-80", None),
        ("8xA100-80GB", "a100-80", 80),
        ("H100-96GB HBM2e 500W", "h100-sxm", 96),
        ("Blackwell (184 GiB)", "b200", 184),
        ("GB200", "gb200", None),
        ("H200 141GB", "h200", 141),
        ("MI300X", "mi300x", None),
        ("L40S PCIe", "l40s", None),
        ("RTX 4090 24GB", "4090", 24),
    ],
)
def test_names_of_devices_have_their_own_profile(words: str, profile: str, num_gib: int | None) -> None:
    run = read_run(row(gpu=words))
    assert (run.gpu, run.memory_bytes) == (profile, None if num_gib is None else num_gib * 2**30)
    assert predict(row(gpu=words)).step_seconds


@pytest.mark.parametrize(
    ("words", "stage"), [("ZeRO-2", 2), ("zero3", 3), ("stage 1", 1), ("stage-3", 3), ("FSDP2", 3)]
)
def test_words_for_stages(words: str, stage: int) -> None:
    assert read_run(row(zero=words, dp="")).job.zero == stage


def test_names_stand_for_shapes_and_a_rows_own_figures_win() -> None:
    named = read_run(row(layers="", hidden="", heads="", model="Llama 3.1 405B", vpp="", recompute=""))
    assert (named.job.model.num_layers, named.job.model.num_kv_heads, named.job.model.vocab) == (126, 8, 128256)
    assert named.no_memory
    own = read_run(row(layers="4", model="Llama 3.1 405B", vpp="1", pp="4", dp="2", vocab="7"))
    assert (own.job.model.num_layers, own.job.model.vocab) == (4, 7)


@pytest.mark.parametrize(
    ("source", "name", "gpu", "precision", "found"),
    [
        ("[26.06 NeMo Container]", "DeepSeekV3", "GB300", "MXFP8", (True, ("ep", "tp", "sp"), 0.0)),
        ("[26.02 NeMo Container]", "DeepSeekV3", "GB300", "MXFP8", (True, ("tp", "sp"), 1.0)),
        ("[26.04 NeMo Container]", "Qwen3_235B_a22B", "H100", "FP8", (False, ("ep", "tp", "sp"), 1.0)),
        ("[26.04.01 NeMo Container]", "Qwen3_235B_a22B", "B200", "MXFP8", (False, (), 1.0)),
        ("[26.02 NeMo Container]", "GPT OSS 120B", "B300", "BF16", (False, (), 1.0)),
        ("[26.04 NeMo Container]", "LLAMA3_70B", "GB300", "NVFP4", (False, ("sp",), 1.0)),
        ("[26.04 NeMo Container]", "LLAMA3_70B", "H100", "FP8", (False, ("tp", "sp"), 1.0)),
    ],
)
def test_recipes_of_megatron_bridge(
    source: str, name: str, gpu: str, precision: str, found: tuple[bool, tuple[str, ...], float]
) -> None:
    notes = "" if "LLAMA" in name else "MoE: forced balance, dropless"
    changed = {"source": f"NVIDIA-NeMo/Megatron-Bridge {source}", "model": name, "notes": notes}
    run = read_run({**NAMED, **changed, "gpu": gpu, "precision": precision, "pp": "1", "vpp": "1"})
    assert (run.job.how.sends_once, run.job.how.overlaps, run.software.launches) == found
    assert run.gpu == {"H100": "h100-sxm"}.get(gpu, gpu.lower())


def test_eager_models_have_a_kernel_for_each_step_of_attention() -> None:
    how = read_run(row(source="DeepSpeedExamples/training/autotuning/hf/gpt2/README.md")).job.how
    assert (how.attention, how.passes) == ("plain", 3.0)
    assert read_run(row()).job.how.attention == "fused"


def test_the_first_flash_attention_is_slower_than_the_second_on_every_device() -> None:
    """Hopper's own is the third, beside which the second takes 1.5 times as long."""
    foundry = "mosaicml/llm-foundry scripts/train/benchmarking/README.md"
    older, newer = (
        read_run(row(source=foundry, model="MPT 1b", gpu=gpu, precision="bf16")).job.how.attention
        for gpu in ("A100-80GB", "H100-80GB")
    )
    assert SLOWER[older] == 1.7
    assert SLOWER[newer] == pytest.approx(1.7 * SLOWER["flash2"])


def test_parameters_rest_in_fp32_alone_under_fsdp() -> None:
    """16 bytes of each parameter are sharded, where others have 2 more, of a copy to compute with."""
    sharded = {**NAMED, "model": "Llama 3 8B", "gpu": "H100", "precision": "bf16", "recompute": "full"}
    sharded |= {"tp": "1", "pp": "1", "vpp": "", "gpus": "64", "global_batch_seqs": "64"}
    words = ("3", "FSDP FULL_SHARD", "fsdp2 (3)", "Megatron-FSDP (3)")
    jobs = [read_run({**sharded, "zero": zero}).job for zero in words]
    assert {job.zero for job in jobs} == {3}
    zero3, fsdp, fsdp2, of_megatron = (peak_bytes(job).states for job in jobs)
    assert zero3 - fsdp == pytest.approx(2 * jobs[0].model.num_params / 64, rel=0.001)
    assert (fsdp2, of_megatron) == (fsdp, zero3)


@pytest.mark.parametrize(("length", "num_params"), [(2048, 29975214080), (4096, 29989894144), (8192, 30019254272)])
def test_mpt_has_one_matrix_for_words_and_learnt_positions(length: int, num_params: int) -> None:
    """NumParams of MPT 30b in scripts/train/benchmarking/README.md of llm-foundry."""
    changed = {"source": "mosaicml/llm-foundry", "model": "MPT 30b", "gpu": "h100_80gb", "precision": "bf16"}
    shape = {"layers": "48", "hidden": "7168", "heads": "56", "vocab": "50368", "seq_len": str(length)}
    run = read_run(row(**changed, **shape, tp="1", pp="1", dp="64", vpp=""))
    assert run.job.model.num_params == pytest.approx(num_params, rel=3e-4)  # without biases and norms


def test_out_of_memory_is_said_with_its_amount() -> None:
    prediction = predict(row(tp="1", pp="1", dp="64", vpp=""))
    assert prediction.fits is False
    assert "GiB" in prediction.reason
    assert prediction.step_seconds is not None


@pytest.mark.parametrize(
    ("words", "per_rank", "per_node"),
    [
        ("4x100Gb RoCE per node", 25e9, 50e9),
        ("1x IB 100Gbps per node", 12.5e9, 12.5e9),
        ("RoCE 1600Gbps/node", 25e9, 200e9),
        ("NVLink + 400Gb/s RDMA per GPU", 50e9, 400e9),
        ("NVLink", 25e9, 200e9),
    ],
)
def test_words_for_links(words: str, per_rank: float, per_node: float) -> None:
    run = read_run(row(interconnect=words))
    network = hardware_of(run, hardware("a100-80")).network
    assert (network.bytes_per_second, network.node_bytes_per_second) == (per_rank, per_node)


def test_the_last_entry_of_software_is_for_all_others() -> None:
    assert software_table()[-1].match == ""


# -- the command --------------------------------------------------------------------------------------------


def write(path: Path, rows: list[dict[str, str]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_a_file_of_rows_gets_four_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "rows.csv", [row(), row(gpu="TPU v4"), row(predicted_fits="stale")][:2])
    assert main([str(source), "--out", str(tmp_path / "out.csv")]) == 0
    with (tmp_path / "out.csv").open(newline="", encoding="utf-8") as file:
        first, second = csv.DictReader(file)
    assert float(first["predicted_step_seconds"]) == pytest.approx(18.13, rel=0.15)
    assert first["predicted_fits"] == "yes"
    assert int(first["predicted_peak_bytes"]) > 2**30
    assert [second[name] for name in PREDICTED[:3]] == ["", "", ""]
    assert "tpu v4" in second["predicted_reason"]
    assert {name: first[name] for name in KORTHIKANTI} == KORTHIKANTI
    assert "1 of 2 rows" in capsys.readouterr().out
    again = tmp_path / "again.csv"
    assert main([str(tmp_path / "out.csv"), "--out", str(again)]) == 0  # its own output is read again
    assert again.read_text() == (tmp_path / "out.csv").read_text()
    header, *lines = (tmp_path / "out.csv").read_text().splitlines()
    (tmp_path / "spaces.csv").write_text("\n".join([header.replace(",", ", "), *lines]))
    assert main([str(tmp_path / "spaces.csv"), "--out", str(again)]) == 0
    assert again.read_text() == (tmp_path / "out.csv").read_text(), "names of columns may have spaces around them"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read"),
        (b"", "has no column model"),
        (b"a,b\n1,2\n", "has no column model, gpu"),
        (b"model;gpu;gpus;tp\nx;y;1;1\n", "and here by semicolons"),
        (b"model\tgpu\tgpus\ttp\nx\ty\t1\t1\n", "and here by tabs"),
        (b"\xff\xfe\x00", "cannot be read"),
        (b"model,gpu,gpus,micro_batch,seq_len,tp,pp,tp\nx,y,1,1,1,1,1,2\n", "has the column tp twice"),
        (b"model,gpu,gpus,micro_batch,seq_len,tp,pp,ZeRO\nx,y,1,1,1,1,1,3\n", "'ZeRO', which is read only if"),
        (b"model,gpu,gpus,micro_batch,seq_len,tp,pp,kv heads\nx,y,1,1,1,1,1,3\n", "it is named 'kv_heads'"),
        (b"model,gpu,gpus,micro_batch,seq_len,tp,pp\nx,y,1,1,1,1,1,1,1\n", "more cells"),
        (b'model,gpu,gpus,micro_batch,seq_len,tp,pp\n"x\n', "cannot be read"),
        (b"model,gpu,gpus,micro_batch,seq_len,tp,pp\n" + b"x" * 2_000_000 + b"\n", "cannot be read"),
    ],
)
def test_bad_input_ends_in_one_line(
    content: bytes | None, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "rows.csv"
    if content is not None:
        source.write_bytes(content)
    assert main([str(source), "--out", str(tmp_path / "out.csv")]) == 1
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1
    assert not (tmp_path / "out.csv").exists()


def test_hostile_cells_are_only_text(tmp_path: Path) -> None:
    cells = ["=cmd|' /C calc'!A0", "\x00", "9" * 400, "${HOME}", "../../etc/passwd", "1e309", "inf", "0x10", "1_000"]
    for column in ("layers", "hidden", "gpus", "pp", "vpp", "zero", "recompute", "interconnect", "gpu", "notes"):
        for cell in cells:
            prediction = predict(row(**{column: cell}))
            assert prediction.reason or prediction.step_seconds


def test_prices_are_not_those_of_objects_that_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that leaves gathers in flight is timed twice in a row. Prices are kept by identity, and in the second pass
    were those of freed objects, unless something else kept these."""
    model = Transformer(80, 8192, 64, 8, 28672, 128256, 8192, gated=True, tied=False)
    how = Execution(1, tp=4, sequence_parallel=True)
    asked = Job(model, how, dp=2, pp=8, num_chunks=5, num_micro_batches=8, zero=1, overlaps=True)
    alone = time_job(asked, hardware("h100-sxm")).step_seconds
    kept = []

    def keeping(blocks: Sequence[Block], work: Work) -> list[Worked]:
        kept.append(work_of_blocks(blocks, work))
        return kept[-1]

    monkeypatch.setattr(clock, "work_of_blocks", keeping)
    assert alone == time_job(asked, hardware("h100-sxm")).step_seconds
