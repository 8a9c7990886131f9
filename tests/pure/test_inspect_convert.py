"""`shardwise inspect` and `shardwise convert`, as people call them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from shardwise.checkpoint.formats import DTYPES, TARGETS, refuse_others
from shardwise.cli import convert
from shardwise.cli.main import main
from shardwise.errors import CheckpointError
from tests.patience import PATIENCE

FIXTURES = Path(__file__).parents[1] / "fixtures" / "deepspeed"


def test_inspect_prints_what_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(FIXTURES / "zero3"), "--verify"]) == 0
    out = capsys.readouterr().out
    assert "a checkpoint of DeepSpeed" in out
    assert "3, after 3 steps of the optimizer" in out
    assert "head.weight is tokens.weight" in out
    assert "blocks.0.up.weight" in out
    assert "all tensors could be read" in out
    assert "global_samples" in out


@pytest.mark.parametrize("verb", ["inspect", "convert"])
def test_help_does_not_wait_for_torch(verb: str) -> None:
    code = "import sys; from shardwise.cli.main import main; main([sys.argv[1], '--help'])"
    code += "; assert 'torch' not in sys.modules"
    done = subprocess.run(
        [sys.executable, "-c", code, verb], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "usage: shardwise" in done.stdout
    assert convert.TARGETS == TARGETS
    assert tuple(DTYPES) == convert.DTYPES


def test_inspect_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(FIXTURES / "zero2"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["form"], said["stage"], said["world_size"], said["verified"]) == ("deepspeed", "1 or 2", 2, False)
    assert {"kind": "state.exp_avg", "name": "tokens.weight", "shape": [23, 6], "dtype": "float32"} in said["tensors"]


def test_convert_says_what_it_would_do_and_does_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["convert", str(FIXTURES / "zero3"), str(tmp_path / "out"), "--to", "hf", "--dtype", "bf16"]
    assert main([*arguments, "--dry-run"]) == 0
    assert "would be written as hf" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "There is no config.json to go along" in out
    assert len(load_file(tmp_path / "out" / "model.safetensors")) == 9
    assert main(arguments) == 2
    assert "already exists" in capsys.readouterr().err


def test_a_damaged_checkpoint_has_a_status_and_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(FIXTURES / "zero2"), str(tmp_path / "run"), "--to", "shardwise"]) == 0
    file = next((tmp_path / "run").glob("*/*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "run")]) == 0
    assert main(["inspect", str(tmp_path / "run"), "--verify"]) == 1
    assert "damaged" in capsys.readouterr().out


def test_a_truncated_file_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    arguments = ["convert", str(FIXTURES / "zero2"), str(run), "--to", "shardwise", "--max-file-size", "1KiB"]
    assert main(arguments) == 0
    first, second, *_ = sorted(run.glob("*/*.safetensors"))
    size = first.stat().st_size
    first.write_bytes(first.read_bytes()[:100])
    second.unlink()
    capsys.readouterr()
    assert main(["inspect", str(run)]) == 1
    out = capsys.readouterr().out
    assert "truncated: " in out
    assert f"({size} bytes)" in out
    assert "missing; " in out
    assert f"{first.name} has 100 bytes instead of {size}".replace(" ", "") in "".join(out.split())
    assert main(["inspect", str(run), "--json"]) == 1
    said = {file["name"]: file for file in json.loads(capsys.readouterr().out)["files"]}
    assert (said[first.name]["bytes"], said[first.name]["bytes_there"]) == (size, 100)
    assert said[second.name]["bytes_there"] is None
    assert main(["inspect", str(run), "--verify"]) == 1
    assert "instead of" in capsys.readouterr().out


def test_a_long_list_is_shortened_without_full(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(FIXTURES / "universal")]) == 0
    assert "more (--full prints all)" in capsys.readouterr().out
    assert main(["inspect", str(FIXTURES / "universal"), "--full"]) == 0
    assert "--full" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (["model.safetensors"], "is a model folder of Hugging Face, which cannot be resumed as it is. Convert it once"),
        (["checkpoint-500/model.safetensors"], "checkpoint-500 is a model folder of Hugging Face, and "),
        (["pytorch_model_fsdp_0/.metadata"], "pytorch_model_fsdp_0 is a torch distributed checkpoint"),
        (["step-1000/.metadata"], "step-1000 is a torch distributed checkpoint"),
        (["latest_checkpointed_iteration.txt"], "is a checkpoint of Megatron-LM .*shardwise cannot read it either"),
        (["random_states_0.pkl", "optimizer.bin"], "is a state that Accelerate saved"),
        (["checkpoint-7/trainer_state.json"], "is a checkpoint of the transformers Trainer without weights"),
    ],
)
def test_who_resumes_from_another_librarys_checkpoint_begins_no_new_run(
    files: list[str], words: str, tmp_path: Path
) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=words):
        refuse_others(tmp_path)


@pytest.mark.parametrize("name", ["model/model.safetensors", "notes.txt", "checkpoint-notes/notes.txt"])
def test_other_files_are_no_reason_not_to_begin(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    refuse_others(tmp_path)
    refuse_others(tmp_path / "absent")
    assert not caplog.messages
    (tmp_path / "model.pt").touch()
    refuse_others(tmp_path)
    assert "so a new run begins; model.pt there is not read" in caplog.text
