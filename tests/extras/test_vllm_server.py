"""A real server of vLLM follows published versions. Runs where vLLM is installed, which has a torch of its own: its CPU
build needs minutes to start, and is in no environment of this project."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.comm import PostOffice, ThreadTransport
from shardwise.integrations.samplers import VllmServer
from tests.free_port import free_port
from tests.patience import PATIENCE, wait_until

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("vllm")

VOCAB, PROMPT, NUM_NEW = 128, [5, 9, 23, 40], 8
SETTINGS = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}


def tiny_llama(folder: Path) -> Any:
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
    )
    model = transformers.LlamaForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    words = tokenizers.models.WordLevel({f"w{index}": index for index in range(VOCAB)}, unk_token="w2")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(words), pad_token="w0", eos_token="w1", unk_token="w2"
    )
    tokenizer.save_pretrained(folder)
    return model.float()


@contextmanager
def serving(model: Path, log: Path) -> Iterator[str]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [str(Path(sys.executable).with_name("vllm")), "serve", str(model), "--host", "127.0.0.1"]
    command += ["--port", str(port), "--max-model-len", "64", "--max-num-seqs", "4", "--enforce-eager"]
    command += ["--dtype", "bfloat16", "--weight-transfer-config", '{"backend": "shardwise"}']
    with log.open("w") as out:
        server = subprocess.Popen(command, env={**os.environ, **SETTINGS}, stdout=out, stderr=out)
        try:
            wait_until(lambda: server.poll() is not None or is_up(url), lambda: log.read_text()[-3000:])
            assert server.poll() is None, log.read_text()[-3000:]
            yield url
        finally:
            server.terminate()
            server.wait(60)


def is_up(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5):
            return True
    except OSError:
        return False


def greedy(url: str, model: Path) -> tuple[list[int], list[float]]:
    """The tokens that the server samples, and their log-probabilities."""
    asked = {"model": str(model), "prompt": PROMPT, "max_tokens": NUM_NEW, "temperature": 0, "logprobs": 1}
    body = json.dumps(asked | {"ignore_eos": True, "return_token_ids": True}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        choice = json.loads(answer.read())["choices"][0]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


def test_a_server_samples_from_each_version(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    world = sw.World(0, 1, ThreadTransport(PostOffice(), 0))
    rows = torch.randint(2, VOCAB, (4, 16))
    with (
        serving(tmp_path / "model", tmp_path / "server.log") as url,
        sw.shard(model, "zero3", optimizer=optimizer, world=world) as engine,
    ):
        server, seen = VllmServer(url), [greedy(url, tmp_path / "model")[0]]
        assert server.version() is None
        for _ in range(2):
            for _ in range(5):
                engine.train_step({"input_ids": rows, "labels": rows})
            version = engine.publish(tmp_path / "weights", dtype="bf16", tell=[server], wait=False)
            engine.wait_for_publish()
            assert server.version() == version
            tokens, found = greedy(url, tmp_path / "model")
            assert tokens not in seen
            seen.append(tokens)
            plain = transformers.AutoModelForCausalLM.from_pretrained(
                sw.published(tmp_path / "weights").path, dtype=torch.bfloat16
            )
            with torch.no_grad():
                logits = plain(torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) - 1 : -1].float()
            expected = logits.log_softmax(-1)[range(NUM_NEW), tokens]
            # Both compute in bf16, by other kernels: logits of about 4 differ by their rounding.
            torch.testing.assert_close(torch.tensor(found), expected, atol=0.05, rtol=0)
