"""Jobs of verl on ranks without a device, for test_verl.py. Ranks import verl, which starts parts of ray."""

from __future__ import annotations

import importlib
import json
import logging.handlers
import os
import sys
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.data import Dataset

SETTINGS = (
    "data.custom_cls.name=Samples",
    "data.max_token_len_per_gpu=24",
    "data.num_workers=0",
    "data.train_batch_size=8",
    "data.train_files=none",
    "data.use_dynamic_bsz=true",
    "data.val_files=none",
    "+engine.mixed_precision.param_dtype=fp32",
    "engine.use_torch_compile=false",
    "model.enable_gradient_checkpointing=false",
    "+model.override_config.attn_implementation=eager",
    "model.use_remove_padding=false",
    "optim.clip_grad=0.5",
    "optim.lr=1e-2",
    "trainer.device=cpu",
    "trainer.logger=[file]",
    "trainer.save_freq=2",
    "trainer.test_freq=2",
)
"""Micro-batches of as many samples as have few enough tokens, so that their number differs from step to step."""
FOLDER = Path(sys.prefix) / "verl"
"""Where `make extras` installs verl (verl.txt)."""
VOCAB, LENGTHS = 64, (5, 12, 9, 16, 7, 11, 14, 6)


class Samples(Dataset):  # type: ignore[type-arg]
    """Sequences of several lengths; verl makes one with the arguments of its own datasets."""

    def __init__(self, *_: Any, **__: Any) -> None:
        drawn = torch.Generator().manual_seed(0)
        self.rows = [torch.randint(1, VOCAB, (length,), generator=drawn) for length in LENGTHS * 3]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self.rows[index]
        mask = torch.ones_like(row)
        mask[: 1 + index % 3] = 0
        return {"input_ids": row, "position_ids": torch.arange(len(row)), "loss_mask": mask}


def write_model(folder: Path) -> None:
    """A tiny Llama with a tokenizer that has nothing but its special words."""
    tokenizers = importlib.import_module("tokenizers")
    transformers = importlib.import_module("transformers")
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, attn_implementation="eager", pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    words = {f"w{index}": index for index in range(VOCAB)}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w2"))
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="w0", eos_token="w1", unk_token="w2", chat_template="{{ messages }}"
    ).save_pretrained(folder)


class _NoDevice:
    """In the place of `torch.cuda`: nothing is used, and nothing is there."""

    def __getattr__(self, name: str) -> Any:
        found = {"mem_get_info": (1, 1), "get_device_name": "CPU", "is_available": False}.get(name, 0)
        return lambda *_, **__: found


def _on_processors(platforms: Any) -> None:
    """verl has platforms for accelerators alone: one for processors, as a plugin of a vendor would bring one."""
    nothing = lambda *_, **__: None  # noqa: E731
    answers = {
        "device_name": property(lambda _: "cpu"),
        "vendor_name": property(lambda _: "none"),
        "device_module": property(lambda _: _NoDevice()),
        "is_available": lambda _: True,
        "is_platform_available": lambda _, **__: True,
        "current_device": lambda _: "cpu",
        "device_count": lambda _: 0,
        "communication_backend_name": lambda _: "gloo",
        "visible_devices_envvar": lambda _: "CUDA_VISIBLE_DEVICES",
        "ray_noset_envvars": lambda _: [],
        "ray_resource_name": lambda _: "CPU",
        "nvtx_range": lambda *_: nullcontext(),
        "get_device_capability": lambda *_: (None, None),
    }
    base = platforms.PlatformBase
    rest = {name: nothing for name in base.__abstractmethods__ if name not in answers}
    platforms.PlatformRegistry.register("cpu")(type("OnProcessors", (base,), answers | rest))


@cache
def _import_verl() -> None:
    """Without its file for Qwen2-VL, which its trainer imports: it wants a name of transformers before 5.11."""
    sys.path.append(str(FOLDER))
    sys.modules["verl.models.transformers.qwen2_vl"] = SimpleNamespace(get_rope_index=None)  # type: ignore[assignment]
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ |= {"VERL_PLATFORM": "cpu"} | {name: os.environ.get(name, value) for name, value in alone.items()}
    _on_processors(importlib.import_module("verl.plugin.platform.platform_manager"))


def _alone(engine: Any, module: Any) -> Any:
    """For one process: verl's own engine without FSDP, which does not run on processors."""
    engine._autocast_dtype = torch.float32
    return module


def fine_tuned(folder: str, strategy: str, settings: list[str], *, steps: int = 4, resumes: bool = False) -> Any:
    """verl's own SFT trainer, unmodified: what it logs, by step."""
    _import_verl()
    importlib.import_module("shardwise.integrations.verl")
    base = importlib.import_module("verl.workers.engine.base")
    fsdp = importlib.import_module("verl.workers.engine.fsdp.transformer_impl")
    unsharded = {"_build_fsdp_module": lambda self, module: _alone(self, module)}
    base.EngineRegistry.register("language_model", "fsdp2", "cpu")(
        type("Plain", (fsdp.FSDPEngineWithLMHead,), unsharded)
    )
    patches = importlib.import_module("verl.models.transformers.monkey_patch")
    patches.is_trl_available = lambda: False  # it patches a class that TRL has no more
    trainer = importlib.import_module("verl.trainer.sft_trainer")
    hydra = importlib.import_module("hydra")
    log = Path(folder) / f"{strategy}-{os.environ['RANK']}.jsonl"
    os.environ["VERL_FILE_LOGGER_PATH"] = str(log)
    place = str(Path(trainer.__file__).parent / "config")
    with hydra.initialize_config_dir(place, version_base=None):
        config = hydra.compose(
            "sft_trainer_engine",
            [
                *settings,
                f"engine.strategy={strategy}",
                f"model.path={folder}/model",
                f"trainer.default_local_dir={folder}/{strategy}",
                f"trainer.total_training_steps={steps}",
                f"trainer.resume_mode={'auto' if resumes else 'disable'}",
                f"data.custom_cls.path={__file__}",
                *SETTINGS,
            ],
        )
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = {} if size > 1 else {"store": torch.distributed.HashStore()}
    # verl's own call wants an accelerator's backend beside gloo
    torch.distributed.init_process_group("gloo", rank=rank, world_size=size, **store)
    trainer.SFTTrainer(config).fit()
    torch.distributed.destroy_process_group()
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def offloaded(folder: str, settings: list[str], steps: int) -> dict[str, Any]:
    """The same, as if on a device that verl's offload leaves and comes back to: also where parameters and states were
    after each move, and what was said about it."""
    _import_verl()
    base = importlib.import_module("verl.workers.engine.base")
    base.get_device_name = lambda: "cuda"
    ours = importlib.import_module("shardwise.integrations.verl")
    moves, said, to = [], logging.handlers.BufferingHandler(1000), ours.ShardwiseEngine.to
    logging.getLogger("shardwise").addHandler(said)

    def moving(self: Any, device: str, *args: Any, **kwargs: Any) -> None:
        to(self, device, *args, **kwargs)
        moves.append((device, self.engine.table.param.tier, self.engine.table.optim.tier))

    ours.ShardwiseEngine.to = moving
    logged = fine_tuned(folder, "shardwise", settings, steps=steps)
    return {"logged": logged, "moves": moves, "said": " ".join(record.getMessage() for record in said.buffer)}


def planned(settings: dict[str, Any]) -> str:
    """The plan of verl's settings, as text."""
    _import_verl()
    ours = importlib.import_module("shardwise.integrations.verl")
    qat = importlib.import_module("verl.workers.config").QATEngineConfig
    given = {name: qat(**value) if name == "qat" else value for name, value in settings.items()}
    return str(ours.plan_of(ours.ShardwiseEngineConfig(strategy="shardwise", **given), 4))
