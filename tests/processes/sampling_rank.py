"""Run by `test_sampling.py`: each rank samples tokens, with random numbers of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

import shardwise as sw

SIZES = {"num_hidden_layers": 4, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
SEED = 7


def build(dropout: float = 0.0) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, vocab_size=97, attention_dropout=dropout, pad_token_id=0)
    return transformers.LlamaForCausalLM(config).eval()


def sampled(model: Any) -> list[list[int]]:
    prompt = torch.tensor([[5, 11, 2], [40, 3, 9]])
    tokens: list[list[int]] = model.generate(prompt, max_new_tokens=8, do_sample=True, top_k=20).tolist()
    return tokens


def main() -> None:
    folder, plan = Path(sys.argv[1]), {"accumulate": 2, **json.loads(sys.argv[2])}
    told: dict[str, Any] = {}
    with sw.World.join() as world:
        engine = sw.shard(build(), plan, world=world)
        torch.manual_seed(SEED + world.rank)
        before = torch.get_rng_state()
        with engine.inference():
            told["first"] = sampled(engine.module)
        told["is_restored"] = torch.equal(torch.get_rng_state(), before)
        with engine.inference():
            told["second"] = sampled(engine.module)
        engine.close()
        engine = sw.shard(build(dropout=0.5).train(), plan, world=world)
        torch.manual_seed(SEED + world.rank)
        with engine.inference():
            told["with dropout"] = [sampled(engine.module), engine.module(torch.ones(1, 4, dtype=int)).logits.tolist()]
        told["data"] = engine.data_ranks[0]
        engine.close()
        if "pp" not in plan["mesh"]:
            model = build()
            torch.manual_seed(SEED + world.rank)
            told["without an engine"] = sampled(sw.load_for_inference(model=model, mesh={"tp": 2}, world=world))
        (folder / f"{world.rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
