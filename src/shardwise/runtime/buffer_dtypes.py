"""Why an operation of a forward was given tensors of two dtypes: `precision` casts parameters, and no buffer.

Buffers keep their dtype, as in FSDP2: those of transformers are rotary frequencies, which positions in bf16 would
spoil. DeepSpeed casts them with the model, so models with weights in buffers run there, and raise here.
"""

from __future__ import annotations

import re
from collections import Counter
from traceback import walk_tb

from torch import nn

from shardwise.errors import some

_OF_DTYPES = re.compile(r"\bdtype\b|scalar type|type \(")
"""What torch's errors about two dtypes have in common."""


def explain_dtypes(error: BaseException, root: nn.Module) -> None:
    """Add to torch's error, if that is about dtypes, which buffers have another one than parameters, where it was
    raised or around that, and what to do."""
    if not isinstance(error, RuntimeError) or not _OF_DTYPES.search(str(error)):
        return
    names = {module: name for name, module in root.named_modules()}
    running = [frame.f_locals.get("self") for frame, _ in walk_tb(error.__traceback__)]
    for module in [one for one in reversed(running) if isinstance(one, nn.Module) and one in names]:
        params = list(module.parameters()) or list(root.parameters())
        dtypes = Counter(param.dtype for param in params if param.is_floating_point())
        buffers = {name: one for name, one in module.named_buffers(names[module]) if one.is_floating_point()}
        for dtype, _ in dtypes.most_common(1):
            found = [name for name, one in buffers.items() if one.dtype != dtype]
            if found:
                error.add_note(
                    f"Parameters compute in {dtype} here, and not the buffers {some(found)}, of which the first is "
                    f"{buffers[found[0]].dtype}: the plan's precision casts parameters alone. Let the forward cast "
                    f"what it multiplies with, self.{found[0].rpartition('.')[2]}.to(x.dtype), or give the buffer that "
                    f"dtype before shard()."
                )
                return
