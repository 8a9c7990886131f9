"""What ranks of these tests come to import, for `rank_processes`: once, in the process that they are forked from."""

import importlib
import importlib.util

NAMES = [
    "torch._dynamo",  # a first backward under hooks imports it
    "accelerate",
    "peft",
    "transformers.trainer_seq2seq",
    "transformers.models.bart.modeling_bart",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "lightning.pytorch",
    "shardwise.data",
    "shardwise.engine",
    "shardwise.integrations.lightning",
    "shardwise.integrations.transformers",
]
if importlib.util.find_spec("trl") is not None:
    NAMES += [f"trl.trainer.{kind}_trainer" for kind in ("sft", "dpo", "grpo", "rloo")]
for name in NAMES:
    importlib.import_module(name)
