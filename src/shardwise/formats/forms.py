"""Which format a folder has, by the files that only one of them writes."""

from __future__ import annotations

import importlib
from pathlib import Path

from shardwise.errors import CheckpointError
from shardwise.formats import deepspeed, hf, ours
from shardwise.formats.source import Source

FORMS = {
    ours.FORM: "a checkpoint of shardwise, or a run folder with checkpoints",
    hf.FORM: "a model folder of Hugging Face",
    "dcp": "a torch distributed checkpoint (DCP)",
    deepspeed.FORM: "a checkpoint of DeepSpeed",
}
OTHERS = {
    "latest_checkpointed_iteration.txt": "a checkpoint of Megatron-LM",
    "adapter_config.json": "an adapter of PEFT, without the model that it is for",
    "trainer_state.json": "a checkpoint of the transformers Trainer without weights that could be read",
}
DCP_METADATA = ".metadata"


def form_of(path: Path) -> str:
    """The format of what is at `path`; `CheckpointError` names what it looks like, if it is none that can be read."""
    if not path.exists():
        raise CheckpointError(f"There is no {path}.")
    if not path.is_dir():
        raise CheckpointError(f"{path} is a file; name the folder of the checkpoint.")
    if ours.is_ours(path):
        return ours.FORM
    if (path / DCP_METADATA).is_file():
        return "dcp"
    if deepspeed.folder_of(path) is not None:
        return deepspeed.FORM
    if hf.is_hf(path):
        return hf.FORM
    raise CheckpointError(_foreign(path))


def _foreign(path: Path) -> str:
    names = sorted(entry.name for entry in path.iterdir())
    known = "; ".join(FORMS.values())
    for name, words in OTHERS.items():
        if name in names:
            return f"{path} is {words} (it has {name}), which is not read here. What is read: {known}."
    if not names:
        return f"{path} is empty."
    return f"{path} is no checkpoint that is known here: it has {', '.join(names[:4])}. What is read: {known}."


def open_checkpoint(path: Path) -> Source:
    """The checkpoint at `path`, whoever wrote it, without reading its tensors."""
    form = form_of(path)
    if form == "dcp":  # torch.distributed.checkpoint takes seconds to import
        source: Source = importlib.import_module("shardwise.formats.dcp").open_dcp(path)
        return source
    opened: Source = {ours.FORM: ours.open_ours, hf.FORM: hf.open_hf, deepspeed.FORM: deepspeed.open_deepspeed}[form](
        path
    )
    return opened
