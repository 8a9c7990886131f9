"""Reinforcement learning from human feedback, by the calls of DeepSpeed-Chat's third step: an actor that generates and
is trained, a critic that is trained, and a reference and a reward model that are not, each an engine of its own."""

import argparse
import json
import os

import deepspeed
import torch
from deepspeed import get_accelerator
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed_sft import (
    Tokenizer,
    _z3_params_to_fetch,
    convert_linear_layer_to_lora,
    create_hf_model,
    get_train_ds_config,
    precision_of,
)
from ppo import actor_loss_of, advantages_and_returns, critic_loss_of, end_scores, log_probs_of
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from transformers import AutoModel, AutoModelForCausalLM, get_scheduler, set_seed

PAD = 0
PROMPTS, PROMPT_LENGTH, ANSWER_LENGTH = 8, 5, 6


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--actor_model_name_or_path", type=str, required=True)
    parser.add_argument("--critic_model_name_or_path", type=str, required=True)
    parser.add_argument("--per_device_batch_size", type=int, default=2)
    parser.add_argument("--actor_learning_rate", type=float, default=1e-2)
    parser.add_argument("--critic_learning_rate", type=float, default=5e-3)
    parser.add_argument("--num_train_epochs", type=int, default=2)
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--enable_hybrid_engine", action="store_true")
    parser.add_argument("--unpin_actor_parameters", action="store_true")
    parser.add_argument("--release_inference_cache", action="store_true")
    parser.add_argument("--inference_tp_size", type=int, default=1)
    parser.add_argument("--tp_gather_partition_size", type=int, default=8)
    parser.add_argument("--offload", action="store_true")
    parser.add_argument("--offload_reference_model", action="store_true")
    parser.add_argument("--actor_zero_stage", type=int, default=0)
    parser.add_argument("--critic_zero_stage", type=int, default=0)
    parser.add_argument("--actor_gradient_checkpointing", action="store_true")
    parser.add_argument("--enable_ema", action="store_true")
    parser.add_argument("--actor_lora_dim", type=int, default=0)
    parser.add_argument("--actor_lora_module_name", type=str, default="layers.")
    parser.add_argument("--dtype", type=str, default="fp32", choices=["fp16", "bf16", "fp32"])
    parser.add_argument("--output_dir", type=str, default=None)
    parser = deepspeed.add_config_arguments(parser)
    return parser.parse_args()


# -- configs ----------------------------------------------------------------------------------------------


def train_config(args, stage, hybrid=False):
    config = get_train_ds_config(
        args.offload,
        args.dtype,
        stage,
        hybrid,
        args.inference_tp_size,
        args.release_inference_cache,
        not args.unpin_actor_parameters,
        args.tp_gather_partition_size,
        PROMPT_LENGTH + ANSWER_LENGTH,
        tb_name="step3",
    )
    return {**config, **batches_of(args)}


def batches_of(args):
    return {
        "train_batch_size": args.per_device_batch_size * torch.distributed.get_world_size(),
        "train_micro_batch_size_per_gpu": args.per_device_batch_size,
    }


def eval_config(args, stage, offload=False):
    return {
        **batches_of(args),
        "steps_per_print": 10,
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 20,
            "offload_param": {"device": "cpu" if offload else "none"},
            "memory_efficient_linear": False,
        },
        **precision_of(args.dtype),
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "wall_clock_breakdown": False,
    }


# -- models -----------------------------------------------------------------------------------------------


class RewardModel(nn.Module):
    """A value for each token, from the last hidden state."""

    def __init__(self, base_model, tokenizer):
        super().__init__()
        self.config = base_model.config
        width = getattr(self.config, "word_embed_proj_dim", None) or self.config.hidden_size
        self.v_head = nn.Linear(width, 1, bias=False)
        self.rwtransformer = base_model
        self.PAD_ID = tokenizer.pad_token_id

    def forward_value(self, input_ids, attention_mask=None, return_value_only=False, prompt_length=0, use_cache=False):
        hidden = self.rwtransformer(input_ids, attention_mask=attention_mask, use_cache=use_cache)[0]
        values = self.v_head(hidden).squeeze(-1)
        if return_value_only:
            return values
        scores = end_scores(values, input_ids, prompt_length, self.PAD_ID)
        return {"values": values, "chosen_end_scores": scores}


def load_state_dict_into_model(model, state_dict, zero_stage):
    def load(module, prefix=""):
        args = (state_dict, prefix, {}, True, [], [], [])
        if any(key.startswith(prefix) for key in state_dict):
            if zero_stage == 3:
                own = dict(module.named_parameters(prefix=prefix[:-1], recurse=False))
                params = [own[key] for key in state_dict if key in own]
                if params:
                    with deepspeed.zero.GatheredParameters(params, modifier_rank=0):
                        if torch.distributed.get_rank() == 0:
                            module._load_from_state_dict(*args)
            else:
                module._load_from_state_dict(*args)
        for name, child in module._modules.items():
            if child is not None:
                load(child, prefix + name + ".")

    load(model)


def create_critic_model(path, tokenizer, ds_config, zero_stage):
    model = RewardModel(create_hf_model(AutoModel, path, tokenizer, ds_config, rlhf_training=True), tokenizer)
    state = torch.load(os.path.join(path, "pytorch_model.bin"), map_location="cpu")
    load_state_dict_into_model(model, state, zero_stage)
    return model


class RLHFEngine:
    def __init__(self, args, tokenizer, total_steps):
        self.args, self.tokenizer, self.total_steps = args, tokenizer, total_steps
        actor, critic = args.actor_model_name_or_path, args.critic_model_name_or_path
        self.actor = self.trained(
            lambda config: self.with_lora(create_hf_model(AutoModelForCausalLM, actor, tokenizer, config)),
            train_config(args, args.actor_zero_stage, args.enable_hybrid_engine),
            args.actor_learning_rate,
        )
        stage = 3 if args.actor_zero_stage == 3 else 0
        self.ref = self.fixed(
            lambda config: create_hf_model(AutoModelForCausalLM, actor, tokenizer, config),
            eval_config(args, stage, args.offload_reference_model),
        )
        self.actor_ema = None
        if args.enable_ema:
            self.actor_ema = self.fixed(
                lambda config: create_hf_model(AutoModelForCausalLM, actor, tokenizer, config), eval_config(args, stage)
            )
        self.critic = self.trained(
            lambda config: create_critic_model(critic, tokenizer, config, args.critic_zero_stage),
            train_config(args, args.critic_zero_stage),
            args.critic_learning_rate,
        )
        stage = 3 if args.critic_zero_stage == 3 else 0
        self.reward = self.fixed(
            lambda config: create_critic_model(critic, tokenizer, config, stage), eval_config(args, stage)
        )

    def with_lora(self, model):
        if not self.args.actor_lora_dim:
            return model
        torch.manual_seed(3)
        return convert_linear_layer_to_lora(model, self.args.actor_lora_module_name, self.args.actor_lora_dim)

    def trained(self, build, config, rate):
        model = build(config)
        named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
        decayed = [param for name, param in named if "norm" not in name and "bias" not in name]
        others = [param for name, param in named if "norm" in name or "bias" in name]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        adam = DeepSpeedCPUAdam if self.args.offload else FusedAdam
        optimizer = adam([group for group in groups if group["params"]], lr=rate, betas=(0.9, 0.95))
        schedule = get_scheduler("cosine", optimizer, num_warmup_steps=1, num_training_steps=self.total_steps)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=config)
        return engine

    def fixed(self, build, config):
        engine, *_ = deepspeed.initialize(model=build(config), config=config)
        return engine


# -- the trainer ------------------------------------------------------------------------------------------


class PPOTrainer:
    def __init__(self, rlhf_engine, args):
        self.args = args
        self.actor_model, self.critic_model = rlhf_engine.actor, rlhf_engine.critic
        self.ref_model, self.reward_model = rlhf_engine.ref, rlhf_engine.reward
        self.pad = rlhf_engine.tokenizer.pad_token_id
        self.z3_enabled = args.actor_zero_stage == 3

    def generate_experience(self, prompts, mask):
        for one in (self.actor_model, self.critic_model, self.reward_model, self.ref_model):
            one.eval()
        assert not self.actor_model.module.training
        with torch.no_grad():
            seq = self.actor_model.module.generate(
                prompts,
                attention_mask=mask,
                max_length=ANSWER_LENGTH + prompts.shape[1],
                pad_token_id=self.pad,
                synced_gpus=self.z3_enabled,
                do_sample=False,
            )
        self.actor_model.train()
        self.critic_model.train()
        attention_mask = seq.not_equal(self.pad).long()
        with torch.no_grad():
            output = self.actor_model(seq, attention_mask=attention_mask)
            output_ref = self.ref_model(seq, attention_mask=attention_mask)
            reward_score = self.reward_model.forward_value(seq, attention_mask, prompt_length=prompts.shape[1])
            values = self.critic_model.forward_value(seq, attention_mask, return_value_only=True).detach()[:, :-1]
        return {
            "prompts": prompts,
            "log_probs": log_probs_of(output.logits.float(), seq),
            "reference_log_probs": log_probs_of(output_ref.logits.float(), seq),
            "values": values.float(),
            "rewards": reward_score["chosen_end_scores"].detach().float(),
            "input_ids": seq,
            "attention_mask": attention_mask,
        }

    def train_rlhf(self, experience):
        start = experience["prompts"].shape[1] - 1
        mask = experience["attention_mask"][:, 1:][:, start:]
        with torch.no_grad():
            advantages, returns, old_values = advantages_and_returns(experience, start)
        batch = {"input_ids": experience["input_ids"], "attention_mask": experience["attention_mask"]}
        logits = self.actor_model(**batch, use_cache=False).logits
        log_probs = log_probs_of(logits.float(), experience["input_ids"])
        actor_loss = actor_loss_of(log_probs[:, start:], experience["log_probs"][:, start:], advantages, mask)
        self.actor_model.backward(actor_loss)
        self.actor_model.step()
        value = self.critic_model.forward_value(**batch, return_value_only=True, use_cache=False)[:, :-1].float()
        critic_loss = critic_loss_of(value[:, start:], old_values[:, start:], returns, mask)
        self.critic_model.backward(critic_loss)
        self.critic_model.step()
        return actor_loss, critic_loss

    def get_overflow(self):
        if self.args.dtype == "bf16":
            return False, False
        return self.actor_model.optimizer.overflow, self.critic_model.optimizer.overflow


def moving_average(model, model_ema, beta, zero_stage):
    with torch.no_grad():
        for param, param_ema in zip(model.parameters(), model_ema.parameters()):  # noqa: B905
            fetched = _z3_params_to_fetch([param, param_ema]) if zero_stage == 3 else []
            with deepspeed.zero.GatheredParameters(fetched, enabled=len(fetched) > 0):
                param_ema.data.copy_(torch.lerp(param.data, param_ema.data, beta))


def save_zero_three_model(engine, rank, folder, zero_stage):
    os.makedirs(folder, exist_ok=True)
    file, model = os.path.join(folder, "pytorch_model.bin"), engine.module
    if zero_stage != 3:
        if rank == 0:
            torch.save(model.state_dict(), file)
        return
    output = {}
    for name, param in model.named_parameters():
        with deepspeed.zero.GatheredParameters(_z3_params_to_fetch([param]), enabled=True):
            value = param.data.cpu().clone()
        if rank == 0:
            output[name] = value
    if rank == 0:
        torch.save(output, file)


def prompts_of(count):
    """Prompts of 2 to 5 tokens, padded on the left."""
    generator = torch.Generator().manual_seed(5)
    rows = torch.randint(2, 61, (count, PROMPT_LENGTH), generator=generator)
    lengths = torch.arange(count) % 4 + 2
    return rows.masked_fill(torch.arange(PROMPT_LENGTH) < PROMPT_LENGTH - lengths[:, None], PAD)


def main():
    args = parse_args()
    get_accelerator().set_device(args.local_rank)
    deepspeed.init_distributed()
    rank = torch.distributed.get_rank()
    set_seed(7)
    torch.distributed.barrier()

    tokenizer = Tokenizer(pad_token_id=PAD, eos_token_id=1)
    prompts = list(prompts_of(PROMPTS))
    loader = DataLoader(prompts, sampler=DistributedSampler(prompts), batch_size=args.per_device_batch_size)
    rlhf_engine = RLHFEngine(args, tokenizer, args.num_train_epochs * len(loader))
    trainer = PPOTrainer(rlhf_engine, args)
    told = {"answers": [], "actor": [], "critic": [], "rewards": []}
    for _ in range(args.num_train_epochs):
        for batch in loader:
            out = trainer.generate_experience(batch, batch.not_equal(PAD).long())
            if args.actor_gradient_checkpointing:
                rlhf_engine.actor.gradient_checkpointing_enable()
            actor_loss, critic_loss = trainer.train_rlhf(out)
            if args.enable_ema:
                moving_average(rlhf_engine.actor, rlhf_engine.actor_ema, 0.5, args.actor_zero_stage)
            if args.actor_gradient_checkpointing:
                rlhf_engine.actor.gradient_checkpointing_disable()
            assert trainer.get_overflow() == (False, False)
            told["answers"].append(out["input_ids"].tolist())
            told["rewards"].append(out["rewards"].tolist())
            told["actor"].append(actor_loss.item())
            told["critic"].append(critic_loss.item())
    print(f"TOLD{rank}", json.dumps(told), flush=True)
    if args.output_dir is not None:
        save_zero_three_model(rlhf_engine.actor, rank, f"{args.output_dir}/actor", args.actor_zero_stage)
        save_zero_three_model(rlhf_engine.critic, rank, f"{args.output_dir}/critic", args.critic_zero_stage)
        if args.enable_ema:
            save_zero_three_model(rlhf_engine.actor_ema, rank, f"{args.output_dir}/actor_ema", args.actor_zero_stage)


if __name__ == "__main__":
    main()
