"""Supervised fine-tuning of a causal language model, in the form of DeepSpeed-Chat's first step."""

import argparse
import json
import math
import os
import random
from types import SimpleNamespace

import deepspeed
import numpy as np
import torch
import torch.nn.functional as F
from deepspeed import get_accelerator
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import nn
from torch.utils.data import DataLoader, Dataset, SequentialSampler
from torch.utils.data.distributed import DistributedSampler
from transformers import AutoConfig, AutoModelForCausalLM, SchedulerType, default_data_collator, get_scheduler, set_seed
from transformers.initialization import no_init_weights
from transformers.integrations.deepspeed import HfDeepSpeedConfig


def parse_args():
    parser = argparse.ArgumentParser(description="Finetune a transformers model on a causal language modeling task")
    parser.add_argument("--model_name_or_path", type=str, required=True)
    parser.add_argument("--per_device_train_batch_size", type=int, default=2)
    parser.add_argument("--per_device_eval_batch_size", type=int, default=2)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--weight_decay", type=float, default=0.1)
    parser.add_argument("--num_train_epochs", type=int, default=1)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--lr_scheduler_type", type=SchedulerType, default="cosine")
    parser.add_argument("--num_warmup_steps", type=int, default=1)
    parser.add_argument("--output_dir", type=str, default=None)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--gradient_checkpointing", action="store_true")
    parser.add_argument("--offload", action="store_true")
    parser.add_argument("--dtype", type=str, default="fp32", choices=["fp16", "bf16", "fp32"])
    parser.add_argument("--zero_stage", type=int, default=0)
    parser.add_argument("--lora_dim", type=int, default=0)
    parser.add_argument("--lora_module_name", type=str, default="layers.")
    parser.add_argument("--only_optimize_lora", action="store_true")
    parser = deepspeed.add_config_arguments(parser)
    return parser.parse_args()


# -- ds_utils.py ---------------------------------------------------------------------------------------


class Tokenizer(SimpleNamespace):
    def __len__(self):
        return 61


def precision_of(dtype):
    if dtype == "fp32":
        return {}
    return {"fp16": {"enabled": True, "loss_scale_window": 100}} if dtype == "fp16" else {"bfloat16": {"enabled": True}}


def get_train_ds_config(
    offload,
    dtype,
    stage=2,
    enable_hybrid_engine=False,
    inference_tp_size=1,
    release_inference_cache=False,
    pin_parameters=True,
    tp_gather_partition_size=8,
    max_out_tokens=512,
    tb_path="",
    tb_name="",
):
    device = "cpu" if offload else "none"
    return {
        "train_batch_size": 32,
        "train_micro_batch_size_per_gpu": 4,
        "steps_per_print": 10,
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": True,
            "offload_param": {"device": device if stage == 3 else "none"},
            "offload_optimizer": {"device": device},
            "stage3_param_persistence_threshold": 20,
            "stage3_max_live_parameters": 3e7,
            "stage3_prefetch_bucket_size": 3e7,
            "memory_efficient_linear": False,
        },
        **precision_of(dtype),
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "wall_clock_breakdown": False,
        "hybrid_engine": {
            "enabled": enable_hybrid_engine,
            "max_out_tokens": max_out_tokens,
            "inference_tp_size": inference_tp_size,
            "release_inference_cache": release_inference_cache,
            "pin_parameters": pin_parameters,
            "tp_gather_partition_size": tp_gather_partition_size,
        },
        "tensorboard": {"enabled": False, "output_path": f"{tb_path}/ds_tensorboard_logs/", "job_name": tb_name},
    }


# -- module/lora.py ------------------------------------------------------------------------------------


class LinearLayer_LoRA(nn.Module):
    def __init__(self, weight, lora_dim=0, lora_scaling=1, lora_droppout=0, bias=None):
        super().__init__()
        self.weight = weight
        self.bias = bias
        try:  # for zero stage 3
            rows, columns = weight.ds_shape
        except AttributeError:
            rows, columns = weight.shape
        self.lora_right_weight = nn.Parameter(torch.zeros(columns, lora_dim))
        self.lora_left_weight = nn.Parameter(torch.zeros(lora_dim, rows))
        self.lora_scaling = lora_scaling / lora_dim
        self.lora_dropout = nn.Dropout(lora_droppout) if lora_droppout > 0 else nn.Identity()
        self.reset_parameters()
        self.weight.requires_grad = False
        self.fuse_lora = False

    def reset_parameters(self):
        nn.init.kaiming_uniform_(self.lora_right_weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_left_weight)

    def fuse_lora_weight(self):
        if not self.fuse_lora:
            update = torch.matmul(self.lora_left_weight.t(), self.lora_right_weight.t())
            self.weight.data += self.lora_scaling * update
        self.fuse_lora = True

    def forward(self, input):
        if self.fuse_lora:
            return F.linear(input, self.weight, self.bias)
        added = (self.lora_dropout(input) @ self.lora_right_weight @ self.lora_left_weight) * self.lora_scaling
        return F.linear(input, self.weight, self.bias) + added


def convert_linear_layer_to_lora(model, part_module_name, lora_dim=0, lora_scaling=1, lora_droppout=0):
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and part_module_name in name:
            tmp = LinearLayer_LoRA(module.weight, lora_dim, lora_scaling, lora_droppout, module.bias)
            tmp = tmp.to(module.weight.device).to(module.weight.dtype)
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, tmp)
    return model


def _z3_params_to_fetch(param_list):
    return [p for p in param_list if hasattr(p, "ds_id") and p.ds_status == ZeroParamStatus.NOT_AVAILABLE]


def convert_lora_to_linear_layer(model):
    for module in model.modules():
        if isinstance(module, LinearLayer_LoRA):
            zero_stage_3 = hasattr(module.weight, "ds_id")
            parts = [module.weight, module.bias, module.lora_left_weight, module.lora_right_weight]
            with deepspeed.zero.GatheredParameters(_z3_params_to_fetch(parts), modifier_rank=0, enabled=zero_stage_3):
                module.fuse_lora_weight()
    return model


def only_optimize_lora_parameters(model):
    for name, param in model.named_parameters():
        param.requires_grad = "lora_right_weight" in name or "lora_left_weight" in name
    return model


def make_model_gradient_checkpointing_compatible(model):
    if hasattr(model, "enable_input_require_grads"):
        model.enable_input_require_grads()
    return model


# -- utils.py ------------------------------------------------------------------------------------------


def print_rank_0(msg, rank=None):
    if rank is not None and rank <= 0:
        print(msg)


def to_device(batch, device):
    return {k: v.to(device) for k, v in batch.items()}


def get_all_reduce_mean(tensor):
    torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.SUM)
    return tensor / torch.distributed.get_world_size()


def set_random_seed(seed):
    set_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    get_accelerator().manual_seed_all(seed)


def get_optimizer_grouped_parameters(model, weight_decay, lora_lr=5e-4):
    no_decay_name_list = ["bias", "layer_norm.weight", "layernorm.weight", "norm.weight", "ln_f.weight"]
    lora_name_list = ["lora_right_weight", "lora_left_weight"]

    def chosen(wants_lora, wants_decay):
        return [
            p
            for n, p in model.named_parameters()
            if p.requires_grad
            and any(nd in n for nd in lora_name_list) == wants_lora
            and (not any(nd in n.lower() for nd in no_decay_name_list)) == wants_decay
        ]

    groups = [
        {"params": chosen(False, True), "weight_decay": weight_decay},
        {"params": chosen(True, True), "weight_decay": weight_decay, "lr": lora_lr},
        {"params": chosen(False, False), "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def create_hf_model(model_class, model_name_or_path, tokenizer, ds_config=None, rlhf_training=False):
    model_config = AutoConfig.from_pretrained(model_name_or_path)
    if ds_config is not None and ds_config["zero_optimization"]["stage"] == 3:
        dschf = HfDeepSpeedConfig(ds_config)
    else:
        dschf = None
    if rlhf_training:
        with no_init_weights():
            model = model_class.from_config(model_config)
    else:
        model = model_class.from_pretrained(model_name_or_path, config=model_config)
    model.config.end_token_id = tokenizer.eos_token_id
    model.config.pad_token_id = model.config.eos_token_id
    model.resize_token_embeddings(int(8 * math.ceil(len(tokenizer) / 8.0)))
    return model


def save_hf_format(model, args, sub_folder=""):
    model_to_save = model.module if hasattr(model, "module") else model
    output_dir = os.path.join(args.output_dir, sub_folder)
    os.makedirs(output_dir, exist_ok=True)
    save_dict = model_to_save.state_dict()
    for key in list(save_dict.keys()):
        if "lora" in key:
            del save_dict[key]
    torch.save(save_dict, os.path.join(output_dir, "pytorch_model.bin"))
    model_to_save.config.to_json_file(os.path.join(output_dir, "config.json"))


def save_zero_three_model(model_ema, global_rank, save_dir, zero_stage=0):
    zero_stage_3 = zero_stage == 3
    os.makedirs(save_dir, exist_ok=True)
    output_model_file = os.path.join(save_dir, "pytorch_model.bin")
    model_to_save = model_ema.module if hasattr(model_ema, "module") else model_ema
    if not zero_stage_3:
        if global_rank == 0:
            torch.save(model_to_save.state_dict(), output_model_file)
    else:
        output_state_dict = {}
        for k, v in model_to_save.named_parameters():
            if hasattr(v, "ds_id"):
                with deepspeed.zero.GatheredParameters(_z3_params_to_fetch([v]), enabled=zero_stage_3):
                    v_p = v.data.cpu()
            else:
                v_p = v.cpu()
            if global_rank == 0 and "lora" not in k:
                output_state_dict[k] = v_p
        if global_rank == 0:
            torch.save(output_state_dict, output_model_file)
        del output_state_dict


def print_throughput(hf_model, args, e2e_time, rank=0):
    if rank <= 0:
        num_params = sum(p.ds_numel if hasattr(p, "ds_tensor") else p.numel() for p in hf_model.parameters())
        print(f"Model Parameters: {num_params}, Latency: {e2e_time:.2f}s, {hf_model.config.num_hidden_layers} layers")


class PromptDataset(Dataset):
    def __init__(self, count, seed):
        self.ids = torch.randint(1, 61, (count, 8), generator=torch.Generator().manual_seed(seed))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, idx):
        return {"input_ids": self.ids[idx], "attention_mask": torch.ones_like(self.ids[idx]), "labels": self.ids[idx]}


# -- main.py -------------------------------------------------------------------------------------------


def main():
    args = parse_args()
    if args.local_rank == -1:
        device = torch.device(get_accelerator().device_name())
    else:
        get_accelerator().set_device(args.local_rank)
        device = torch.device(get_accelerator().device_name(), args.local_rank)
        deepspeed.init_distributed()
    device = torch.device(get_accelerator().current_device_name())
    args.global_rank = torch.distributed.get_rank()

    ds_config = get_train_ds_config(args.offload, args.dtype, args.zero_stage, tb_name="step1_model")
    ds_config["train_micro_batch_size_per_gpu"] = args.per_device_train_batch_size
    ds_config["train_batch_size"] = (
        args.per_device_train_batch_size * torch.distributed.get_world_size() * args.gradient_accumulation_steps
    )
    set_random_seed(args.seed)
    torch.distributed.barrier()

    model = create_hf_model(
        AutoModelForCausalLM, args.model_name_or_path, Tokenizer(pad_token_id=0, eos_token_id=0), ds_config
    )
    if args.lora_dim > 0:
        model = convert_linear_layer_to_lora(model, args.lora_module_name, args.lora_dim)
        if args.only_optimize_lora:
            model = only_optimize_lora_parameters(model)
            model = make_model_gradient_checkpointing_compatible(model)

    train_dataset, eval_dataset = PromptDataset(16, 0), PromptDataset(4, 1)
    train_dataloader = DataLoader(
        train_dataset,
        collate_fn=default_data_collator,
        sampler=DistributedSampler(train_dataset),
        batch_size=args.per_device_train_batch_size,
    )
    eval_dataloader = DataLoader(
        eval_dataset,
        collate_fn=default_data_collator,
        sampler=SequentialSampler(eval_dataset),
        batch_size=args.per_device_eval_batch_size,
    )

    def evaluation(model, eval_dataloader):
        model.eval()
        losses = 0
        for step, batch in enumerate(eval_dataloader):
            batch = to_device(batch, device)
            with torch.no_grad():
                outputs = model(**batch)
            losses += outputs.loss.float()
        losses = losses / (step + 1)
        try:
            losses = get_all_reduce_mean(losses)
        except Exception:
            pass
        try:
            perplexity = torch.exp(losses).item()
        except OverflowError:
            perplexity = float("inf")
        return perplexity, losses.item()

    optimizer_grouped_parameters = get_optimizer_grouped_parameters(model, args.weight_decay)
    AdamOptimizer = DeepSpeedCPUAdam if args.offload else FusedAdam
    optimizer = AdamOptimizer(optimizer_grouped_parameters, lr=args.learning_rate, betas=(0.9, 0.95))
    num_update_steps_per_epoch = math.ceil(len(train_dataloader) / args.gradient_accumulation_steps)
    lr_scheduler = get_scheduler(
        name=args.lr_scheduler_type,
        optimizer=optimizer,
        num_warmup_steps=args.num_warmup_steps,
        num_training_steps=args.num_train_epochs * num_update_steps_per_epoch,
    )
    model, optimizer, _, lr_scheduler = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        args=args,
        config=ds_config,
        lr_scheduler=lr_scheduler,
        dist_init_required=True,
    )
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable()

    print_rank_0("***** Running training *****", args.global_rank)
    evaluated = [evaluation(model, eval_dataloader)]
    losses = []
    for epoch in range(args.num_train_epochs):
        model.train()
        for step, batch in enumerate(train_dataloader):
            batch = to_device(batch, device)
            outputs = model(**batch, use_cache=False)
            loss = outputs.loss
            losses.append(loss.item())
            model.backward(loss)
            model.step()
            if torch.distributed.get_rank() == 0:
                print_throughput(model.model, args, 0.0, args.global_rank)
        evaluated.append(evaluation(model, eval_dataloader))
        model.tput_timer.update_epoch_count()
    print(f"LOSSES{args.global_rank}", json.dumps(losses))
    print(f"EVALUATED{args.global_rank}", json.dumps(evaluated))

    if args.output_dir is not None:
        print_rank_0("saving the final model ...", args.global_rank)
        model = convert_lora_to_linear_layer(model)
        if args.global_rank == 0:
            save_hf_format(model, args)
        if args.zero_stage == 3:
            # For zero stage 3, each gpu only has a part of the model, so we need a special save function
            save_zero_three_model(model, args.global_rank, args.output_dir, zero_stage=args.zero_stage)


if __name__ == "__main__":
    main()
