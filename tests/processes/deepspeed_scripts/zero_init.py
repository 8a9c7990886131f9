"""A language model that is built in parts, in the form of DeepSpeed's ZeRO-3 documentation; it saves and resumes."""

import argparse
import json

import deepspeed
import deepspeed.comm as dist
import torch.nn as nn
from deepspeed.runtime.dataloader import RepeatingLoader
from deepspeed.runtime.utils import see_memory_usage, set_random_seed
from nets import LanguageModel, Sentences


class TunedModel(LanguageModel):
    def __init__(self):
        super().__init__()
        with deepspeed.zero.GatheredParameters(self.head.weight, modifier_rank=0):
            nn.init.normal_(self.head.weight, std=0.05)


def get_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--save", type=str, required=True)
    parser.add_argument("--save_interval", type=int, default=3)
    parser.add_argument("--load_tag", type=str, default=None)
    parser = deepspeed.add_config_arguments(parser)
    return parser.parse_args()


def main():
    args = get_args()
    deepspeed.init_distributed()
    set_random_seed(args.seed)
    with open(args.deepspeed_config) as file:
        stage = json.load(file)["zero_optimization"]["stage"]
    with deepspeed.zero.Init(
        data_parallel_group=None, remote_device=None, config_dict_or_path=args.deepspeed_config, enabled=stage == 3
    ):
        model = TunedModel()
    see_memory_usage("after building", force=False)
    with deepspeed.zero.GatheredParameters(model.tokens.weight, modifier_rank=0):
        if dist.get_rank() == 0:
            nn.init.uniform_(model.tokens.weight, -0.1, 0.1)

    engine, _, loader, _ = deepspeed.initialize(
        args=args, model=model, model_parameters=model.parameters(), training_data=Sentences(24)
    )
    done = 0
    if args.load_tag is not None:
        path, client_sd = engine.load_checkpoint(args.save, args.load_tag)
        assert path is not None
        done = client_sd["step"]
        assert client_sd["note"] == f"after step {done}"
    stream = iter(RepeatingLoader(loader))
    accumulate = engine.gradient_accumulation_steps()
    for _ in range(done * accumulate):
        next(stream)

    losses = []
    for step in range(done, args.steps):
        for _ in range(accumulate):
            ids, labels = (tensor.to(engine.device) for tensor in next(stream))
            loss = engine(ids, labels)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        if (step + 1) % args.save_interval == 0:
            state = {"step": step + 1, "note": f"after step {step + 1}"}
            engine.save_checkpoint(args.save, tag=f"step{step + 1}", client_state=state)

    total = 0.0
    for param in engine.module.parameters():
        with deepspeed.zero.GatheredParameters(param):
            total += param.detach().float().square().sum().item()
    print(f"LOSSES{dist.get_rank()}", json.dumps(losses))
    if dist.get_rank() == 0:
        print("TOTAL", json.dumps(total))
        print("NORM", json.dumps(float(engine.get_global_grad_norm())))


if __name__ == "__main__":
    main()
