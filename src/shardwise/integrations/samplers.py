"""Servers of vLLM and SGLang that sample from a job's weights while it trains.

`engine.publish(folder, tell=[SglangServer(url)])` writes a version, and then has the server load it from there: the
server needs to see the folder, on a shared disk or, on the host of rank 0, in /dev/shm. Only paths and versions go over
HTTP, as JSON. `weight_source` gives the stream of weights to vLLM's own transfer engines instead, which send tensors.

Tests have stand-ins for these servers that speak their protocols, as public source and documentation have them. vLLM's
own server was run on CPUs (`tests/extras/test_vllm_server.py`), SGLang's never.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from shardwise.checkpoint.published import Published
from shardwise.errors import CheckpointError

if TYPE_CHECKING:
    from shardwise.checkpoint.formats.live import Weights

BACKEND = "shardwise"
"""The name under which vLLM knows the files of `engine.publish`; see `register_with_vllm`."""
_QUOTED_CHARS = 500


class _Http:
    """One server's calls. Raises `CheckpointError` with what the server says, or that it does not answer."""

    def __init__(self, url: str, timeout_seconds: float, api_key: str | None) -> None:
        self.url = url.rstrip("/")
        self._timeout_seconds = timeout_seconds
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # servers of a job are near

    def get(self, route: str) -> dict[str, Any]:
        return self._call(route, None)

    def post(self, route: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return self._call(route, json.dumps(body).encode())

    def _call(self, route: str, body: bytes | None) -> dict[str, Any]:
        request = urllib.request.Request(f"{self.url}{route}", body, self._headers)
        try:
            with self._opener.open(request, timeout=self._timeout_seconds) as answer:
                content = answer.read()
        except urllib.error.HTTPError as error:
            said = error.read().decode(errors="replace")[:_QUOTED_CHARS]
            hint = " vLLM has this route only with VLLM_SERVER_DEV_MODE=1." if error.code == 404 else ""
            raise CheckpointError(f"{self.url}{route} answers {error.code}: {said}.{hint}") from error
        except (OSError, http.client.HTTPException) as error:  # the latter if it ends in the middle of an answer
            raise CheckpointError(f"{self.url}{route} does not answer: {error}") from error
        try:
            told = json.loads(content or b"{}")
        except ValueError as error:
            raise CheckpointError(f"{self.url}{route} does not answer with JSON: {content[:80]!r}") from error
        return told if isinstance(told, dict) else {}


class SglangServer:
    """A server of SGLang, which loads published folders by its `/update_weights_from_disk`.

    Call it with a version, or give it to `engine.publish(tell=[...])`. Requests that are running go on with the new
    weights; with `abort_requests` they are ended. The prefix cache is emptied, as its entries are of old weights.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_seconds: float = 600.0,
        api_key: str | None = None,
        abort_requests: bool = False,
    ) -> None:
        self._http = _Http(url, timeout_seconds, api_key)
        self._abort_requests = abort_requests

    def __call__(self, found: Published) -> None:
        """Returns once the server samples from this version. Raises `CheckpointError` if it cannot."""
        told = self._http.post(
            "/update_weights_from_disk",
            {
                "model_path": str(found.path.absolute()),
                "weight_version": str(found.version),
                "flush_cache": True,
                "abort_all_requests": self._abort_requests,
            },
        )
        if told.get("success") is not True:
            raise CheckpointError(f"{self._http.url} has not taken version {found.version}: {told.get('message')}")

    def version(self) -> int | None:
        """The version that the server samples from, or `None` if it is not one of ours."""
        return _number(self._http.get("/model_info").get("weight_version"))


class VllmServer:
    """A server of vLLM, which loads published folders through its weight-transfer seam.

    Start it with `VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config '{"backend": "shardwise"}'`, where
    this library is installed too: it adds that backend as a plugin. Call it with a version, or give it to
    `engine.publish(tell=[...])`. Requests that are running stay frozen meanwhile, and go on with the new weights;
    `pause` may also be "wait", for their end, or "abort".
    """

    def __init__(
        self, url: str, *, timeout_seconds: float = 600.0, api_key: str | None = None, pause: str = "keep"
    ) -> None:
        self._http = _Http(url, timeout_seconds, api_key)
        self._pause = pause
        self._is_initialized = False

    def __call__(self, found: Published) -> None:
        """Returns once the server samples from this version. Raises `CheckpointError` if it cannot; it stays paused if
        it may have half of the weights."""
        post = self._http.post
        if not self._is_initialized:
            post("/init_weight_transfer_engine", {"init_info": {}})
            self._is_initialized = True
        post(f"/pause?mode={self._pause}", {})
        try:
            post("/start_weight_update", {})
        except CheckpointError:
            post("/resume", {})
            raise
        post("/update_weights", {"update_info": {"path": str(found.path.absolute())}})
        post("/finish_weight_update", {"weight_version": str(found.version)})
        has_emptied = post("/reset_prefix_cache", {}).get("success") is not False
        post("/resume", {})
        # frozen requests keep their entries, and no others should be left
        if not has_emptied and self._pause != "keep":
            raise CheckpointError(
                f"{self._http.url} still has prefixes in its cache that older weights have computed, and answers from "
                f"them. Empty the cache when no request is running: POST {self._http.url}/reset_prefix_cache."
            )

    def version(self) -> int | None:
        """The version that the server samples from, or `None` if it is not one of ours."""
        return _number(self._http.get("/weight_info").get("weight_version"))


def _number(version: object) -> int | None:
    return int(version) if isinstance(version, str) and version.isdecimal() else None


# -- inside vLLM ------------------------------------------------------------------------------------------


def weight_source(weights: Weights) -> Any:
    """`engine.weights(...)` as a `WeightSource` of vLLM, for `WeightTransferTrainerFactory.trainer_init(source=...)`:
    it sends tensors by NCCL or IPC. All ranks make one, and call `send_weights()`. Needs vllm in the trainer."""
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    class Source(WeightSource):
        def metadata(self) -> list[Any]:
            return [ParamMeta(one.name, one.dtype, tuple(one.shape)) for one in weights.metadata()]

        def __iter__(self) -> Iterator[tuple[str, Tensor]]:
            return iter(weights)

    return Source()


def register_with_vllm() -> None:
    """A plugin of vLLM (`vllm.general_plugins`), called in each of its processes: add the backend "shardwise"."""
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    except ImportError:  # an older vLLM, without this seam, starts all the same
        return
    with contextlib.suppress(ValueError):  # it is there: vLLM may load plugins more than once
        WeightTransferEngineFactory.register_engine(
            BACKEND, "shardwise.integrations.vllm_worker", "PublishedWeightsEngine"
        )
