"""Servers that sample from a job's weights are told of every version, and say which one they have."""

from __future__ import annotations

import socket
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from sampler_servers import Sglang, StandIn, Vllm, installed_vllm
from test_published_weights import on_ranks, train

import shardwise as sw
from shardwise.checkpoint.published import Published
from shardwise.errors import CheckpointError
from shardwise.integrations.samplers import SglangServer, VllmServer, register_with_vllm, weight_source
from tests.models import Transformer
from tests.patience import PATIENCE

UPDATE = [
    "/pause",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/reset_prefix_cache",
    "/resume",
]


@pytest.fixture(autouse=True)
def _vllm(monkeypatch: pytest.MonkeyPatch) -> Any:
    installed_vllm(monkeypatch)
    register_with_vllm()
    register_with_vllm()  # vLLM may load plugins twice
    yield
    sys.modules.pop("shardwise.integrations.vllm_worker", None)


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"pp": 2}])
def test_servers_follow_training(mesh: dict[str, int], tmp_path: Path) -> None:
    sglang, vllm = Sglang(), Vllm("shardwise")

    def work(engine: sw.Engine) -> None:
        servers: list[SglangServer | VllmServer] = [SglangServer(address), VllmServer(of_vllm)]
        assert [server.version() for server in servers] == [None, None]
        for wait in (True, False):
            train(engine)
            number = engine.publish(tmp_path, dtype="bf16", tell=servers, wait=wait)
            expected = {name: one.bfloat16() for name, one in engine.state_dict().items()}
            engine.wait_for_publish()
            assert [server.version() for server in servers] == [number, number]
            for server in (sglang, vllm):
                assert server.weights
                assert all(torch.equal(one, expected[name]) for name, one in server.weights.items())
            engine.world.barrier()

    with sglang.serving() as address, vllm.serving() as of_vllm:
        on_ranks(work, mesh)
    assert [call for call in vllm.calls if call != "/weight_info"] == ["/init_weight_transfer_engine", *UPDATE, *UPDATE]
    assert not vllm.is_paused


def test_a_server_that_does_not_take_a_version(tmp_path: Path) -> None:
    """All ranks raise, the version is there for others, and the other servers have it."""
    good, bad = Sglang(), Sglang()
    bad.failing["/update_weights_from_disk"] = (400, {"success": False, "message": "out of memory"})

    def work(engine: sw.Engine) -> None:
        servers = [SglangServer(bad_address), SglangServer(good_address), SglangServer("http://127.0.0.1:9")]
        with pytest.raises(CheckpointError, match=r"Version 3 .* is published .* 2 of 3 .*out of memory.* not answer"):
            engine.publish(tmp_path, version=3, tell=servers)
        engine.publish(tmp_path, version=4)

    with good.serving() as good_address, bad.serving() as bad_address:
        on_ranks(work)
    assert (good.weight_version, bad.weight_version) == ("3", "default")
    found = sw.published(tmp_path)
    assert found is not None
    assert found.version == 4


@pytest.mark.parametrize(
    ("route", "answer", "words", "is_paused"),
    [
        ("/init_weight_transfer_engine", (404, {}), "only with VLLM_SERVER_DEV_MODE=1", False),
        ("/start_weight_update", (500, {"error": "busy"}), "busy", False),
        ("/update_weights", (500, {"error": "half"}), "half", True),
        ("/finish_weight_update", (500, {"error": "half"}), "half", True),
        (
            "/reset_prefix_cache",
            (200, {"success": False}),
            "still has prefixes in its cache that older weights have computed, and answers from them. Empty the cache",
            False,
        ),
    ],
)
def test_vllm_does_not_sample_from_half_of_the_weights(
    route: str, answer: Any, words: str, is_paused: bool, tmp_path: Path
) -> None:
    vllm = Vllm("shardwise")
    vllm.failing[route] = answer
    with sw.shard(Transformer(), "ddp", world=alone()) as engine:
        engine.publish(tmp_path)
    found = sw.published(tmp_path)
    assert found is not None
    with vllm.serving() as address:
        server = VllmServer(address, pause="wait")
        with pytest.raises(CheckpointError, match=words):
            server(found)
        assert vllm.is_paused == is_paused
        vllm.failing.clear()
        server(found)
        assert server.version() == found.version
    assert not vllm.is_paused


def test_what_is_no_server_of_ours_is_said(tmp_path: Path) -> None:
    with StandIn().serving() as address, pytest.raises(CheckpointError, match="answers 404"):
        SglangServer(address).version()
    with pytest.raises(CheckpointError, match="does not answer"):
        SglangServer(address, timeout_seconds=1.0)(Published(1, tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ending = threading.Thread(target=_end_in_an_answer, args=(listener,))
        ending.start()
        with pytest.raises(CheckpointError, match=r"does not answer: IncompleteRead\(2 bytes read, 98 more expected\)"):
            SglangServer(f"http://127.0.0.1:{listener.getsockname()[1]}").version()
        ending.join()


def _end_in_an_answer(listener: socket.socket) -> None:
    """As a server that is killed."""
    with listener.accept()[0] as connection:
        connection.recv(2**16)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{}")


def test_an_older_vllm_starts_with_the_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer.factory", None)
    register_with_vllm()


def test_vllm_gets_the_stream_as_a_source() -> None:
    """As its transfer engines use one: metadata first, then the tensors in that order, each time anew, on all ranks."""

    def work(engine: sw.Engine) -> None:
        source = weight_source(engine.weights(dtype="bf16"))
        base = sys.modules["vllm.distributed.weight_transfer.base"]
        assert isinstance(source, base.WeightSource)
        for _ in range(2):
            train(engine)
            told = source.metadata()
            came = [(name, tensor.clone()) for name, tensor in source]
            assert [(one.name, one.shape, one.dtype) for one in told] == [
                (name, tuple(tensor.shape), tensor.dtype) for name, tensor in came
            ]
            state = engine.state_dict()
            assert all(torch.equal(tensor, state[name].bfloat16()) for name, tensor in came)

    on_ranks(work)


def test_a_slow_server_keeps_no_step_waiting(tmp_path: Path) -> None:
    """And the version that it loads stays until it has."""
    may_load, told = threading.Event(), []

    def slow(found: Published) -> None:
        assert may_load.wait(PATIENCE)
        told.append((found.version, found.path.is_dir()))

    def work(engine: sw.Engine) -> None:
        engine.publish(tmp_path, version=1, keep=1, tell=[slow], wait=False)
        train(engine)
        assert not told
        engine.world.barrier()
        may_load.set()
        engine.publish(tmp_path, version=2, keep=1, tell=[slow])

    on_ranks(work)
    assert told == [(1, True), (2, True)]


def alone() -> sw.World:
    from shardwise.comm import PostOffice, ThreadTransport

    return sw.World(0, 1, ThreadTransport(PostOffice(), 0))
