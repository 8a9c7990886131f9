"""Stand-ins for servers of vLLM and SGLang: their routes, bodies and answers, as their public source has them, over a
model that really loads what it is told to. Neither of the two is installed where tests run.

vLLM: `vllm/entrypoints/serve/dev/rlhf/api_router.py` at commit 0100a21, `vllm/distributed/weight_transfer/base.py` at
02f250b and `factory.py` at 047c993. SGLang: `update_weights_from_disk` and `model_info` in
`srt/entrypoints/http_server.py`, and `UpdateWeightFromDiskReqInput` in `srt/managers/io_struct.py`, with `flush_cache`.
"""

from __future__ import annotations

import json
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlsplit

import pytest
import torch
from safetensors.torch import load_file

Tensor = torch.Tensor
Answer = tuple[int, dict[str, Any]]


class StandIn:
    """A server with a model. `calls` are the routes that were used; a route in `failing` answers with an error."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}
        self.weight_version = "default"
        self.calls: list[str] = []
        self.failing: dict[str, Answer] = {}

    def answer(self, route: str, query: dict[str, list[str]], body: dict[str, Any] | None) -> Answer:
        self.calls.append(route)
        if route in self.failing:
            return self.failing[route]
        handler: Callable[..., dict[str, Any]] | None = getattr(self, f"on_{route.strip('/')}", None)
        if handler is None:
            return 404, {"detail": "Not Found"}
        try:
            return 200, handler(**({} if body is None else body), **{name: of[0] for name, of in query.items()})
        except (ValueError, TypeError, RuntimeError) as error:
            return 400, {"success": False, "message": str(error)}

    @contextmanager
    def serving(self) -> Iterator[str]:
        """Its address on the loopback."""
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.reply(None)

            def do_POST(self) -> None:
                self.reply(json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}"))

            def reply(self, body: dict[str, Any] | None) -> None:
                place = urlsplit(self.path)
                status, content = stand_in.answer(place.path, parse_qs(place.query), body)
                told = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(told)))
                self.end_headers()
                self.wfile.write(told)

            def log_message(self, *_: object) -> None:
                """Not to the tests' output."""

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            thread = threading.Thread(target=server.serve_forever, args=(0.01,))
            thread.start()
            try:
                yield f"http://127.0.0.1:{server.server_port}"
            finally:
                server.shutdown()
                thread.join()


class Sglang(StandIn):
    def on_update_weights_from_disk(
        self,
        model_path: str,
        load_format: str | None = None,
        abort_all_requests: bool = False,
        weight_version: str | None = None,
        flush_cache: bool = True,
    ) -> dict[str, Any]:
        files = sorted(Path(model_path).glob("*.safetensors"))
        if not files:
            raise ValueError(f"Failed to get weights iterator from {model_path}")
        self.weights = {name: one for file in files for name, one in load_file(file).items()}
        self.weight_version = weight_version or self.weight_version
        return {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}

    def on_model_info(self) -> dict[str, Any]:
        return {"model_path": "policy", "is_generation": True, "weight_version": self.weight_version}


class Vllm(StandIn):
    """Its worker's transfer engine is made by vLLM's factory, by the name in its `--weight-transfer-config`."""

    def __init__(self, backend: str) -> None:
        super().__init__()
        factory = sys.modules["vllm.distributed.weight_transfer.factory"].WeightTransferEngineFactory
        self.is_paused = self.is_initialized = False
        self.model = SimpleNamespace(load_weights=self._load, reload="")
        self.engine = factory.create_engine(SimpleNamespace(backend=backend), self.model)

    def _load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        if self.model.reload != "begun":
            raise RuntimeError("layers are not prepared for a reload")
        self.weights = {name: tensor.clone() for name, tensor in weights}

    def on_init_weight_transfer_engine(self, init_info: dict[str, Any]) -> dict[str, Any]:
        self.engine.init_transfer_engine(self.engine.init_info_cls(**init_info))
        self.is_initialized = True
        return {"message": "Weight transfer initialized"}

    def on_pause(self, mode: str = "abort") -> dict[str, Any]:
        if mode not in ("abort", "wait", "keep"):
            raise ValueError(f"mode is {mode}")
        self.is_paused = True
        return {"status": "paused"}

    def on_resume(self) -> dict[str, Any]:
        self.is_paused = False
        return {"status": "resumed"}

    def on_start_weight_update(self) -> dict[str, Any]:
        if not (self.is_initialized and self.is_paused):
            raise RuntimeError("not initialized, or sampling")
        self.engine.start_weight_update()
        return {"message": "Weight update started"}

    def on_update_weights(self, update_info: dict[str, Any]) -> dict[str, Any]:
        self.engine.receive_weights(self.engine.update_info_cls(**update_info))
        return {"message": "Weights updated"}

    def on_finish_weight_update(self, weight_version: str | None = None) -> dict[str, Any]:
        self.engine.finish_weight_update()
        self.weight_version = weight_version or self.weight_version
        return {"message": "Weight update finished"}

    def on_reset_prefix_cache(self) -> dict[str, Any]:
        return {"success": True}

    def on_weight_info(self) -> dict[str, Any]:
        return {"weight_version": self.weight_version}


def installed_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if vllm were installed: those of its modules that our code imports, with their interfaces."""

    @dataclass
    class ParamMeta:
        name: str
        dtype: torch.dtype
        shape: tuple[int, ...]

    class WeightSource(ABC):
        @abstractmethod
        def metadata(self) -> list[ParamMeta]: ...
        @abstractmethod
        def __iter__(self) -> Iterator[tuple[str, Tensor]]: ...

    class WeightTransferEngine(ABC):
        def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: Any) -> None:
            self.config, self.model, self.model_config, self.device = config, model, vllm_config, device

        @abstractmethod
        def init_transfer_engine(self, init_info: Any) -> None: ...
        @abstractmethod
        def start_weight_update(self) -> None: ...
        @abstractmethod
        def finish_weight_update(self) -> None: ...
        @abstractmethod
        def receive_weights(self, update_info: Any) -> None: ...
        @abstractmethod
        def shutdown(self) -> None: ...
        @staticmethod
        @abstractmethod
        def trainer_send_weights(iterator: Any, trainer_args: Any) -> None: ...

    class Factory:
        registered: ClassVar[dict[str, tuple[str, str]]] = {}

        @classmethod
        def register_engine(cls, name: str, module: str, of_class: str) -> None:
            if name in cls.registered:
                raise ValueError(f"Weight transfer engine '{name}' is already registered.")
            cls.registered[name] = module, of_class

        @classmethod
        def create_engine(cls, config: Any, model: Any) -> Any:
            if config.backend not in cls.registered:
                raise ValueError(f"Invalid weight transfer backend: {config.backend}.")
            module, of_class = cls.registered[config.backend]
            made = getattr(__import__(module, fromlist=[of_class]), of_class)
            return made(config, SimpleNamespace(), torch.device("cpu"), model)

    def begin(model: Any) -> None:
        model.reload = "begun"

    def end(model: Any, model_config: Any) -> None:
        if model.reload != "begun":
            raise RuntimeError("no reload was begun")
        model.reload = "ended"

    transfer, loader = "vllm.distributed.weight_transfer", "vllm.model_executor.model_loader"
    infos = {name: type(name, (ABC,), {}) for name in ("WeightTransferInitInfo", "WeightTransferUpdateInfo")}
    bases = {
        "ParamMeta": ParamMeta,
        "WeightSource": WeightSource,
        "WeightTransferEngine": WeightTransferEngine,
        **infos,
    }
    contents: dict[str, dict[str, Any]] = {
        **{name: {} for name in ("vllm", "vllm.distributed", transfer, "vllm.model_executor", loader)},
        f"{transfer}.base": bases,
        f"{transfer}.factory": {"WeightTransferEngineFactory": Factory},
        f"{loader}.reload": {"initialize_layerwise_reload": begin, "finalize_layerwise_reload": end},
    }
    for name, content in contents.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "shardwise.integrations.vllm_worker", raising=False)
