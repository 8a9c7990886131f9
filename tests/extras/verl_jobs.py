"""Jobs of verl on ranks without a device, for test_verl.py. Ranks import verl, which starts parts of ray."""

from __future__ import annotations

import importlib
import json
import logging.handlers
import os
import pickle
import sys
from contextlib import nullcontext
from functools import cache, partial
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


def write_model(folder: Path, kind: str = "LlamaForCausalLM") -> None:
    """A tiny Llama with a tokenizer that has nothing but its special words; of that class of transformers."""
    tokenizers = importlib.import_module("tokenizers")
    transformers = importlib.import_module("transformers")
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, attn_implementation="eager", pad_token_id=0, eos_token_id=1,
        num_labels=1,
    )  # fmt: skip
    getattr(transformers, kind)(config).save_pretrained(folder)
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


def _register_engines() -> None:
    """Ours, and verl's own for one process."""
    importlib.import_module("shardwise.integrations.verl")
    base = importlib.import_module("verl.workers.engine.base")
    fsdp = importlib.import_module("verl.workers.engine.fsdp.transformer_impl")
    unsharded = {"_build_fsdp_module": lambda self, module: _alone(self, module)}
    for kind, theirs in (("language_model", fsdp.FSDPEngineWithLMHead), ("value_model", fsdp.FSDPEngineWithValueHead)):
        base.EngineRegistry.register(kind, "fsdp2", "cpu")(type("Plain", (theirs,), unsharded))
    patches = importlib.import_module("verl.models.transformers.monkey_patch")
    patches.is_trl_available = lambda: False  # it patches a class that TRL has no more
    utilities = importlib.import_module("verl.utils.model")
    utilities.load_valuehead_model = _load_critic


def _load_critic(*, local_path: str, torch_dtype: Any, model_config: Any, trust_remote_code: bool) -> Any:
    """As verl does, without flash attention, which wants an accelerator."""
    transformers = importlib.import_module("transformers")
    return transformers.AutoModelForTokenClassification.from_pretrained(
        local_path,
        dtype=torch_dtype,
        config=model_config,
        attn_implementation="eager",
        trust_remote_code=trust_remote_code,
    )


def _meet() -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = {} if size > 1 else {"store": torch.distributed.HashStore()}
    # verl's own call wants an accelerator's backend beside gloo
    torch.distributed.init_process_group("gloo", rank=rank, world_size=size, **store)


def fine_tuned(folder: str, strategy: str, settings: list[str], *, steps: int = 4, resumes: bool = False) -> Any:
    """verl's own SFT trainer, unmodified: what it logs, by step."""
    _import_verl()
    _register_engines()
    trainer = importlib.import_module("verl.trainer.sft_trainer")
    log = _logs_to(folder, strategy)
    config = _config_of(
        "sft_trainer_engine",
        *settings,
        f"engine.strategy={strategy}",
        f"model.path={folder}/model",
        f"trainer.default_local_dir={folder}/{strategy}",
        f"trainer.total_training_steps={steps}",
        f"trainer.resume_mode={'auto' if resumes else 'disable'}",
        f"data.custom_cls.path={__file__}",
        *SETTINGS,
    )
    _meet()
    trainer.SFTTrainer(config).fit()
    torch.distributed.destroy_process_group()
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def _logs_to(folder: str, name: str) -> Path:
    """Where verl's trainer on this rank will log, as lines of JSON."""
    log = Path(folder) / f"{name}-{os.environ['RANK']}.jsonl"
    os.environ["VERL_FILE_LOGGER_PATH"] = str(log)
    return log


def _config_of(name: str, *settings: str) -> Any:
    """verl's own configuration of this name, with `settings`."""
    hydra = importlib.import_module("hydra")
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        return hydra.compose(name, list(settings))


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


# -- its trainer of PPO and GRPO ----------------------------------------------------------------------------

MODELS = "actor_rollout_ref.model", "critic.model"
ENGINES = "actor_rollout_ref.actor.fsdp_config", "actor_rollout_ref.ref.fsdp_config", "critic.fsdp"
RL_SETTINGS = (
    *(f"{model}.enable_gradient_checkpointing=false" for model in MODELS),
    *(f"+{model}.override_config.attn_implementation=eager" for model in MODELS),
    *(f"{model}.use_remove_padding=false" for model in MODELS),
    *(f"+{engine}.mixed_precision.param_dtype=fp32" for engine in ENGINES),
    *(f"{engine}.use_torch_compile=false" for engine in ENGINES),
    "actor_rollout_ref.actor.entropy_coeff=0.01",
    "actor_rollout_ref.actor.optim.lr=1e-2",
    "actor_rollout_ref.actor.optim.override_optimizer_config={eps:1e-3}",
    "actor_rollout_ref.actor.ppo_epochs=2",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=48",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.actor.use_dynamic_bsz=true",
    "actor_rollout_ref.actor.use_torch_compile=false",
    "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.rollout.name=vllm",
    "critic.optim.lr=1e-2",
    "critic.optim.override_optimizer_config={eps:1e-3}",
    "critic.ppo_max_token_len_per_gpu=48",
    "data.dataloader_num_workers=0",
    "data.train_batch_size=4",
    "data.shuffle=false",
    "trainer.balance_batch=false",
    "trainer.critic_warmup=0",
    "trainer.device=cpu",
    "trainer.logger=[file]",
    "trainer.n_gpus_per_node=1",
    "trainer.resume_mode=disable",
    "trainer.save_freq=-1",
    "trainer.test_freq=-1",
    "trainer.total_training_steps=2",
    "trainer.val_before_train=false",
)
"""With so large an eps, AdamW does not make whole steps of rounding."""
ESTIMATORS = {
    "ppo": ("algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=true"),
    "grpo": ("algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.use_kl_loss=true"),
}


class _Prompts(Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index


class _Sampler:
    """In the place of servers: the same samples in each run, with a reward for each; keeps the weights it is given."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._drawn = torch.Generator().manual_seed(3)
        self.versions: list[dict[str, Any]] = []

    def generate_sequences(self, prompts: Any) -> Any:
        numpy, protocol = importlib.import_module("numpy"), importlib.import_module("verl.protocol")
        num, length, most = len(prompts), 4, 8
        asked = torch.randint(2, VOCAB, (num, length), generator=self._drawn)
        answers = torch.randint(2, VOCAB, (num, most), generator=self._drawn)
        lengths = torch.randint(3, most + 1, (num, 1), generator=self._drawn)
        mask = (torch.arange(most) < lengths).long()
        answers = answers * mask
        asked[::2, 0] = 0  # a shorter prompt, padded on the left
        attended = torch.cat([(asked > 0).long(), mask], 1)
        scores = torch.zeros(num, most).scatter(1, lengths - 1, (answers > VOCAB // 2).float().mean(1, keepdim=True))
        tensors = {
            "prompts": asked, "responses": answers, "response_mask": mask, "input_ids": torch.cat([asked, answers], 1),
            "attention_mask": attended, "position_ids": (attended.cumsum(1) - 1).clamp(min=0), "rm_scores": scores,
        }  # fmt: skip
        others = {"multi_modal_inputs": numpy.array([{} for _ in range(num)], dtype=object)}
        return protocol.DataProto.from_dict(tensors, others, meta_info={"timing": {}})

    def sleep_replicas(self) -> None:
        """They sample in no memory."""

    def update_weights(self, _: int) -> None:
        if hasattr(self._engine, "engine"):  # ours
            self.versions.append({name: one.tolist() for name, one in self._engine.get_per_tensor_param()[0]})


class _Group:
    """In the place of a group of ray's workers: every rank runs the trainer, and has one of the workers. Batches are
    divided, and results put together, by verl's own functions."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._worker, name)
        decorator, protocol = (
            importlib.import_module(f"verl.{one}") for one in ("single_controller.base.decorator", "protocol")
        )
        tensors = importlib.import_module("verl.utils.tensordict_utils")
        how = getattr(method, decorator.MAGIC_ATTR)
        if not isinstance(how["dispatch_mode"], dict):
            return method

        def call(data: Any) -> Any:
            rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
            own = pickle.loads(pickle.dumps(protocol.BatchData(data).chunk(chunks=size)[rank]))  # as ray sends it
            every: list[Any] = [None] * size
            torch.distributed.all_gather_object(every, method(own))
            for one in every[1:]:  # what differs there, such as how fast a rank was, cannot be put together
                tensors.assign_non_tensor(one, metrics=tensors.get(every[0], "metrics"))
            whole = protocol.BatchData(every).concat()
            return whole if how["blocking"] else SimpleNamespace(get=lambda: whole)

        return call


def reinforced(folder: str, strategy: str, kind: str, settings: list[str]) -> dict[str, Any]:
    """verl's own trainer of PPO or GRPO, with its own workers for actor, reference and critic: what it logs, by step,
    the actor's and the critic's parameters at the end, and the weights that samplers got."""
    _import_verl()
    _register_engines()
    trainers = importlib.import_module("verl.trainer.ppo.ray_trainer")
    workers, losses = (importlib.import_module(f"verl.workers.{one}") for one in ("engine_workers", "utils.losses"))
    configs = importlib.import_module("verl.utils.config")
    log = _logs_to(folder, f"{kind}-{strategy}")
    config = _config_of(
        "ppo_trainer",
        *RL_SETTINGS,
        *ESTIMATORS[kind],
        f"actor_rollout_ref.model.path={folder}/model",
        f"critic.model.path={folder}/critic",
        f"actor_rollout_ref.actor.strategy={strategy}",
        f"critic.strategy={strategy}",
        *settings,
    )

    class Trainer(trainers.RayPPOTrainer):  # type: ignore[misc,name-defined]  # verl has no types
        def init_workers(self) -> None:
            actor = workers.ActorRolloutRefWorker(config.actor_rollout_ref, "actor")
            actor.init_model()
            self.actor_rollout_wg = _Group(actor)
            if self.use_reference_policy:
                reference = workers.ActorRolloutRefWorker(config.actor_rollout_ref, "ref")
                reference.init_model()
                self.ref_policy_wg = _Group(reference)
            self.checkpoint_manager = self.async_rollout_manager = _Sampler(actor.actor.engine)
            if self.use_critic:
                self._init_critic()

        def _init_critic(self) -> None:
            """As verl's own does."""
            asked = configs.omega_conf_to_dataclass(config.critic)
            asked.engine.infer_max_token_len_per_gpu = asked.ppo_infer_max_token_len_per_gpu
            asked.engine.max_token_len_per_gpu = asked.ppo_max_token_len_per_gpu
            asked.engine.use_dynamic_bsz = asked.use_dynamic_bsz
            critic = workers.TrainingWorker(
                workers.TrainingWorkerConfig(
                    model_type="value_model",
                    model_config=asked.model,
                    engine_config=asked.engine,
                    optimizer_config=asked.optim,
                    checkpoint_config=asked.checkpoint,
                    profiler_config=None,
                )
            )
            critic.reset()
            critic.set_loss_fn(partial(losses.value_loss, config=asked))
            self.critic_wg = _Group(critic)

    _meet()
    trainer = Trainer(
        config, None, {trainers.Role.ActorRolloutRef: None}, SimpleNamespace(get_n_gpus=lambda: 1),
        train_dataset=_Prompts(), val_dataset=_Prompts(),
        collate_fn=lambda rows: {"number": torch.tensor(rows)[:, None]},
    )  # fmt: skip
    trainer.init_workers()
    trainer.fit()
    engines = {"actor": trainer.actor_rollout_wg._worker.actor.engine}
    if trainer.use_critic:
        engines["critic"] = trainer.critic_wg._worker.engine
    params = {name: _whole_params(engine) for name, engine in engines.items()}
    torch.distributed.destroy_process_group()
    logged = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return {"logged": logged, "params": params, "versions": trainer.checkpoint_manager.versions}


def _whole_params(engine: Any) -> dict[str, Any]:
    state = engine.engine.state_dict() if hasattr(engine, "engine") else engine.module.state_dict()
    return {name: value.tolist() for name, value in state.items()}
