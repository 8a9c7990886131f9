"""Loads weights that a job has published into a worker of vLLM: the receiving side of its weight-transfer seam.

Only vLLM imports this, by `samplers.register_with_vllm`. It follows the interface of
`vllm.distributed.weight_transfer.base` (vllm at commit 02f250b): a transfer is started, told one folder, and finished.
What is loaded is in the format of checkpoints, so layers are prepared and finalized as in a reload.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from shardwise.checkpoint.published import mapped_tensors


@dataclass
class NoInfo(WeightTransferInitInfo):
    """There is nothing to agree on beforehand."""


@dataclass
class FolderInfo(WeightTransferUpdateInfo):
    path: str
    """A published version, which every worker sees."""


class PublishedWeightsEngine(WeightTransferEngine):
    init_info_cls = NoInfo
    update_info_cls = FolderInfo

    def init_transfer_engine(self, init_info: NoInfo) -> None:
        """A folder needs no meeting."""

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: FolderInfo) -> None:
        self.model.load_weights(mapped_tensors(Path(update_info.path)).items())

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Nothing is held."""

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        raise NotImplementedError("engine.publish(folder, tell=[VllmServer(url)]) sends these weights.")
