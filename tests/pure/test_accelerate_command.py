"""Command lines of Accelerate's launcher."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shardwise.cli.main import main
from shardwise.errors import ConfigError
from shardwise.integrations.accelerate_config import read_accelerate_config
from shardwise.launch.cores import seats
from shardwise.launch.topology import this_host

CONFIG = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
num_processes: 4
mixed_precision: bf16
fsdp_config: {fsdp_sharding_strategy: SHARD_GRAD_OP, fsdp_transformer_layer_cls_to_wrap: Block}
"""


SECOND_OF_TWO = "--num_machines 2 --machine_rank 1 --num_processes 4 --main_process_ip 127.0.0.1"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a script and a config, and nothing in the usual place; the environment as before afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", {**os.environ, "HF_HOME": str(tmp_path / "hf")})
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        del os.environ[name]
    (tmp_path / "train.py").touch()
    (tmp_path / "some.yaml").write_text(CONFIG)
    return tmp_path


def dry(text: str) -> int:
    return main(["accelerate", "--dry-run", "launch", *text.split(), "train.py", "--num_processes", "9"])


@pytest.mark.parametrize(
    ("text", "plan", "count"),
    [
        ("--num_processes 2", '{"preset": "ddp"}', 2),
        ("--num-processes=3 --multi-gpu", '{"preset": "ddp"}', 3),
        ("--use_fsdp --num_processes 2", '{"preset": "zero3"}', 2),
        ("--use_fsdp --fsdp_sharding_strategy SHARD_GRAD_OP --num_processes 2", '{"preset": "zero3-kept"}', 2),
        ("--use_fsdp --fsdp_reshard_after_forward false --num_processes 2", '{"preset": "zero3-kept"}', 2),
        ("--use_fsdp --fsdp_offload_params true --num_processes 2", '{"preset": "zero3-offload"}', 2),
        ("--use_fsdp --fsdp_min_num_params 9 --num_processes 2", '{"preset": "zero3", "units": {"min_numel": 9}}', 2),
        ("--use_deepspeed --num_processes 2", '{"preset": "zero2"}', 2),
        ("--use_deepspeed --zero_stage 3 --num_processes 2", '{"preset": "zero3"}', 2),
        ("--config_file some.yaml", '{"preset": "zero3-kept", "units": {"class": "Block"}}', 4),
        ("--config_file some.yaml --num_processes 2 --fsdp_sharding_strategy 1",
         '{"preset": "zero3", "units": {"class": "Block"}}', 2),
    ],
)  # fmt: skip
def test_options_of_accelerate_that_are_honoured(
    text: str, plan: str, count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dry(text) == 0
    said = capsys.readouterr()
    assert said.out.startswith(f"{count} rank{'s run' if count > 1 else ' runs'}: ")
    assert f"shardwise.integrations.run --plan '{plan}' train.py --num_processes 9" in said.out
    assert said.err == ""


def test_variables_that_accelerate_reads(capsys: pytest.CaptureFixture[str]) -> None:
    text = "--config_file some.yaml --mixed_precision fp16 --cpu --dynamo_backend inductor --gpu_ids 0"
    assert dry(f"{text} --gradient_accumulation_steps 4") == 0
    asked = {name: value for name, value in os.environ.items() if name.startswith(("ACCELERATE_", "CUDA_VIS"))}
    assert asked == {
        "ACCELERATE_MIXED_PRECISION": "fp16", "ACCELERATE_USE_CPU": "true", "ACCELERATE_DYNAMO_BACKEND": "inductor",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4", "CUDA_VISIBLE_DEVICES": "0",
    }  # fmt: skip


def test_a_deepspeed_config_is_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert dry("--use_deepspeed --deepspeed_config_file ds.json --num_processes 2") == 0
    assert "-m shardwise.integrations.deepspeed train.py" in capsys.readouterr().out
    assert os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] == "ds.json"


def test_options_of_ours_and_a_module(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--num_processes", "2", "--num_cpu_threads_per_process", "3", "--module", "json.tool", "-x"]
    assert main(["accelerate", "--dry-run", "launch", *words]) == 0
    said = capsys.readouterr().out
    assert "-m json.tool -x" in said
    assert "OMP_NUM_THREADS=3" in said


def test_the_default_config_file_is_read_and_reported(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "hf" / "accelerate").mkdir(parents=True)
    (folder / "hf" / "accelerate" / "default_config.yaml").write_text(CONFIG)
    assert dry("") == 0
    said = capsys.readouterr()
    assert said.out.startswith("4 ranks run: ")
    assert "no --config_file: " in said.err
    assert dry("--cpu --num_processes 2") == 0
    assert capsys.readouterr().out.startswith("2 ranks run: ")


def test_cpu_affinity_is_that_of_a_numa_node(capsys: pytest.CaptureFixture[str]) -> None:
    assert dry("--num_processes 2 --enable_cpu_affinity") == 0
    said = capsys.readouterr().out
    for rank, seat in enumerate(seats(this_host(), "node", 2, {}, None)):
        assert f"rank {rank} is bound to {seat}" in said


def test_options_without_effect_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert dry("--num_processes 2 --role worker --fsdp_sharding_strategy 1 --dynamo_mode default --tee 3") == 0
    said = capsys.readouterr().err
    for name in ("--role", "fsdp_config.fsdp_sharding_strategy: distributed_type is MULTI_GPU", "--tee", "dynamo_mode"):
        assert name in said


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("--num_machines 2 --num_processes 4", "machine_rank is missing"),
        ("--num_machines 2 --machine_rank 2 --num_processes 4", "but num_machines is 2. Set it between 0 and 1."),
        ("--num_machines 2 --machine_rank 1 --num_processes 4", "Also set main_process_ip, the address of machine 0"),
        ("--num_machines 2 --machine_rank 1 --main_process_ip a", "num_processes is missing"),
        ("--num_machines 2 --machine_rank 1 --main_process_ip a --num_processes 3", "num_processes is 3"),
        (f"{SECOND_OF_TWO} --enable_cpu_affinity", "--bind are not supported with num_machines above 1"),
        ("--tpu", "--tpu is not supported"),
        ("--use_megatron_lm", """--shardwise '{"preset": "ddp", "mesh": {"dp": -1}}' SCRIPT"""),
        (
            "--use_megatron_lm --megatron_lm_tp_degree=2 --megatron-lm-pp-degree 2 "
            "--megatron_lm_use_distributed_optimizer true --megatron_lm_sequence_parallelism true",
            """'{"preset": "zero1", "mesh": {"pp": 2, "dp": -1, "tp": 2}, "tensor": {"sequence": true}}'""",
        ),
        ("--megatron_lm_recompute_activations true", "--megatron_lm_recompute_activations is not supported: Megatron"),
        ("--use_parallelism_config", "a ParallelismConfig makes a mesh of torch's"),
        (
            "--parallelism_config_dp_replicate_size 2 --parallelism_config_dp_shard_size 4",
            """'{"preset": "hsdp", "mesh": {"node": -1, "local": 4}}'""",
        ),
        (
            "--use_parallelism_config --parallelism_config_tp_size 2 --parallelism_config_cp_size 2",
            """'{"preset": "ddp", "mesh": {"dp": -1, "tp": 2, "sp": 2}}'""",
        ),
        ("--no_python", "--no_python is not supported"),
        ("--deepspeed_hostfile hosts", "names other hosts"),
        ("--use_fsdp --use_deepspeed", "were requested together"),
        ("--config_file nowhere.yaml", "cannot be read"),
    ],
)
def test_options_of_accelerate_that_are_refused(text: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert dry(text) == 2
    assert sentence in capsys.readouterr().err


def test_one_of_several_machines_is_torchruns(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each machine has its share of `num_processes`, and torchrun gets the rendezvous address."""
    assert dry(f"{SECOND_OF_TWO} --use_fsdp --num_cpu_threads_per_process 3 --log_dir logs") == 0
    said = capsys.readouterr()
    assert "-m torch.distributed.run --nnodes 2 --nproc-per-node 2 --rdzv-backend static --node-rank 1 " in said.out
    assert "--master-addr 127.0.0.1 --master-port 29500 --max-restarts 0 --log-dir logs --tee 3 " in said.out
    assert """-m shardwise.integrations.run --plan '{"preset": "zero3"}' train.py""" in said.out
    assert "OMP_NUM_THREADS=3" in said.out
    assert "GLOO_SOCKET_IFNAME=lo" in said.out
    assert said.err == ""
    (folder / "both.yaml").write_text(f"{CONFIG}num_machines: 2\nmachine_rank: 0\nmain_process_ip: 127.0.0.1\n")
    assert main(["launch", "--dry-run", "--accelerate-config", "both.yaml", "train.py"]) == 0
    assert "--nproc-per-node 2 --rdzv-backend static --node-rank 0 " in capsys.readouterr().out
    assert dry(f"{SECOND_OF_TWO} --rdzv_backend c10d --main_process_port 29511") == 0
    assert "--rdzv-backend c10d --rdzv-endpoint 127.0.0.1:29511 --rdzv-id shardwise-29511 " in capsys.readouterr().out
    assert main(["launch", "--hosts", "a:2", "--accelerate-config", "both.yaml", "train.py"]) == 2
    assert "hosts are named too" in capsys.readouterr().err


def test_other_commands_of_accelerate_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["accelerate", "config"]) == 2
    assert "accelerate config is a command of Accelerate itself" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("num_processes: two", "num_processes is 'two'; give a whole number"),
        ("num_processes: 2.5", "num_processes is 2.5; give a whole number"),
        ("num_processes: true", "num_processes is True; give a whole number"),
        ("num_processes: -4", "num_processes is -4; give a whole number"),
        ("mixed_precision: fp17", "mixed_precision is 'fp17'. Did you mean 'fp16'?"),
        ("main_process_port: http", "main_process_port is 'http'; give a whole number"),
        ("fsdp_config: FULL_SHARD", "fsdp_config is 'FULL_SHARD'; give a mapping of its settings"),
        ("deepspeed_config: [2]", r"deepspeed_config is \[2\]; give a mapping"),
        ("dynamo_config: inductor", "dynamo_config is 'inductor'; give a mapping"),
        ("fp8_config: 3", "fp8_config is 3; give a mapping"),
        ("fsdp_config: {fsdp_min_num_params: many}", "fsdp_min_num_params is 'many'; give a whole number"),
        ("fsdp_confg: {fsdp_offload_params: true}", "unknown key 'fsdp_confg'. Did you mean 'fsdp_config'?"),
        ("fsdp_config: {fsdp_ofload_params: true}", "'fsdp_ofload_params'. Did you mean 'fsdp_offload_params'?"),
        ("num_process: 2", "unknown key 'num_process'. Did you mean 'num_processes'?"),
    ],
)
def test_a_config_file_with_a_slip_is_refused(text: str, sentence: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"distributed_type: FSDP\n{text}\n")
    with pytest.raises(ConfigError, match=sentence) as raised:
        read_accelerate_config(file)
    assert str(raised.value).startswith(f"{file}: ")


def test_a_slip_in_a_deepspeed_section_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stag: 3}\n")
    with pytest.raises(ConfigError, match=r"unknown key 'zero_stag'\. Did you mean 'zero_stage'\?"):
        read_accelerate_config(file)


@pytest.mark.parametrize(
    ("section", "preset"),
    [
        ("", "zero3"),  # as Accelerate shards where nothing says how
        ("fsdp_config: {fsdp_version: 2}", "zero3"),
        ("fsdp_config: {fsdp_activation_checkpointing: true}", "zero3"),
        ("fsdp_config: {sharding_strategy: SHARD_GRAD_OP}", "zero3-kept"),  # names are also taken without their prefix
        ("fsdp_config: {offload_params: true}", "zero3-offload"),
        ("fsdp_config: {fsdp_sharding_strategy: NO_SHARD}", "ddp"),
    ],
)
def test_fsdp_shards_unless_its_section_says_otherwise(section: str, preset: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"distributed_type: FSDP\n{section}\n")
    assert read_accelerate_config(file).plan["preset"] == preset


def test_megatron_has_an_alternative(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("distributed_type: MEGATRON_LM\nmegatron_lm_config: {megatron_lm_pp_degree: 2}\n")
    with pytest.raises(ConfigError, match=r"""Use this plan .*'{"preset": "ddp", "mesh": {"pp": 2, "dp": -1}}'"""):
        read_accelerate_config(file)


def test_so_has_a_mesh_of_torchs(tmp_path: Path) -> None:
    """But for one of one rank in each dim, which is none."""
    file = tmp_path / "config.yaml"
    config = "distributed_type: FSDP\nparallelism_config: {parallelism_config_tp_size: SIZE}\n"
    file.write_text(config.replace("SIZE", "1"))
    assert read_accelerate_config(file).plan == {"preset": "zero3"}
    file.write_text(config.replace("SIZE", "2"))
    with pytest.raises(ConfigError, match=r"""'{"preset": "ddp", "mesh": {"dp": -1, "tp": 2}}' SCRIPT"""):
        read_accelerate_config(file)


def test_activations_that_fsdp_recomputes_are_recomputed(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    for value, plan in (("true", {"activations": "recompute"}), ("false", {})):
        file.write_text(f"distributed_type: FSDP\nfsdp_config: {{fsdp_activation_checkpointing: {value}}}\n")
        assert read_accelerate_config(file).plan == {"preset": "zero3"} | plan
