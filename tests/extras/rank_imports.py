"""What ranks of these tests come to import, for `rank_processes`: once, in the process that they are forked from."""

import torchvision_operators  # noqa: F401  # what is imported later may import torchvision
import torch._dynamo  # noqa: F401  # a first backward under hooks imports it
import accelerate  # noqa: F401
import peft  # noqa: F401
import transformers
import transformers.trainer_seq2seq  # noqa: F401
from transformers import BartForConditionalGeneration, GPT2LMHeadModel, LlamaForCausalLM  # noqa: F401

import shardwise
import shardwise.data
import shardwise.integrations.transformers  # noqa: F401

for name in shardwise.__all__:
    getattr(shardwise, name)
