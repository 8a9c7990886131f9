"""A language model as a list of layers, in the form of DeepSpeed's pipeline tutorial."""

import argparse
import json
import os

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.utils import RepeatingLoader
from nets import VOCAB, WIDTH, Layer, Sentences, Tokens, logits_of, next_token_loss


def get_args():
    parser = argparse.ArgumentParser(description="pipeline")
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("-s", "--steps", type=int, default=4)
    parser.add_argument("-p", "--pipeline-parallel-size", type=int, default=2)
    parser.add_argument("--partition", default="parameters")
    parser.add_argument("--seed-layers", action="store_true")
    parser.add_argument("--backend", type=str, default=None)
    parser.add_argument("--seed", type=int, default=1138)
    parser = deepspeed.add_config_arguments(parser)
    return parser.parse_args()


class LanguageModelPipe(PipelineModule):
    def __init__(self, num_layers, **kwargs):
        specs = [
            TiedLayerSpec("embed", Tokens, VOCAB, WIDTH, tied_weight_attr="word_embeddings.weight"),
            *(LayerSpec(Layer, WIDTH) for _ in range(num_layers)),
            lambda hidden: hidden * 0.5,
            LayerSpec(torch.nn.LayerNorm, WIDTH, eps=1e-6),
            TiedLayerSpec(
                "embed",
                Tokens,
                VOCAB,
                WIDTH,
                forward_fn=logits_of,
                tied_weight_attr="word_embeddings.weight",
            ),
        ]
        super().__init__(layers=specs, loss_fn=next_token_loss, **kwargs)


def main(args):
    torch.manual_seed(args.seed)
    deepspeed.runtime.utils.set_random_seed(args.seed)
    net = LanguageModelPipe(
        4,
        num_stages=args.pipeline_parallel_size,
        partition_method=args.partition,
        seed_layers=args.seed_layers,
        activation_checkpoint_interval=1,
        checkpointable_layers=["Layer"],
    )
    engine, _, _, _ = deepspeed.initialize(
        args=args,
        model=net,
        model_parameters=[p for p in net.parameters() if p.requires_grad],
        training_data=Sentences(32),
    )
    losses = [engine.train_batch().item() for _ in range(args.steps)]
    loader = engine.deepspeed_io(Sentences(16), route="eval")
    evaluated = engine.eval_batch(data_iter=iter(RepeatingLoader(loader))).item()
    print(f"LOSSES{torch.distributed.get_rank()}", json.dumps([*losses, evaluated]))
    print(f"FIRST{torch.distributed.get_rank()}", json.dumps(engine.is_first_stage()))


if __name__ == "__main__":
    args = get_args()
    deepspeed.init_distributed(dist_backend=args.backend)
    args.local_rank = int(os.environ["LOCAL_RANK"])
    get_accelerator().set_device(args.local_rank)
    main(args)
