"""Detects the format of a folder by files that only one format has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from shardwise.checkpoint.formats import dcp, deepspeed, hf, ours
from shardwise.checkpoint.formats.source import Source
from shardwise.errors import CheckpointError
from shardwise.system.safe_files import inside, open_regular

FORMS = {
    ours.FORM: "a checkpoint of shardwise, or a run folder with checkpoints",
    hf.FORM: "a model folder of Hugging Face",
    dcp.FORM: "a torch distributed checkpoint (DCP)",
    deepspeed.FORM: "a checkpoint of DeepSpeed",
}
OTHERS = {
    "latest_checkpointed_iteration.txt": "a checkpoint of Megatron-LM",
    "adapter_config.json": "an adapter of PEFT, without the model that it is for",
    "trainer_state.json": "a checkpoint of the transformers Trainer without weights that could be read",
}
LATEST = "latest"
OPENERS: dict[str, Callable[[Path], Source]] = {
    ours.FORM: ours.open_ours,
    hf.FORM: hf.open_hf,
    dcp.FORM: dcp.open_dcp,
    deepspeed.FORM: deepspeed.open_deepspeed,
}


def form_of(path: Path) -> str:
    """The format of what is at `path`. Raises `CheckpointError`, with a guess at what it is, if it is not readable."""
    try:
        return _form_of(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _form_of(path: Path) -> str:
    if not path.exists():
        raise CheckpointError(f"{path} does not exist.")
    if not path.is_dir():
        raise CheckpointError(f"{path} is a file; give the folder of the checkpoint.")
    if (path / LATEST).exists():
        open_regular(inside(path, LATEST)).close()  # several formats have and read this file
    if ours.is_ours(path):
        return ours.FORM
    if dcp.is_dcp(path):
        return dcp.FORM
    if deepspeed.folder_of(path) is not None:
        return deepspeed.FORM
    if hf.is_hf(path):
        return hf.FORM
    raise CheckpointError(_foreign(path))


def refuse_others(path: Path) -> None:
    """Raise `CheckpointError` if there is a checkpoint of another library at `path`: who resumes there does not mean
    to begin anew."""
    for form, is_there in ((dcp.FORM, dcp.is_dcp), (deepspeed.FORM, deepspeed.folder_of), (hf.FORM, hf.is_hf)):
        if path.is_dir() and is_there(path):
            raise CheckpointError(
                f"{path} is {FORMS[form]}, which cannot be resumed as it is. Convert it once, and resume from the "
                f"result: shardwise convert {path} NEW --to shardwise."
            )


def _foreign(path: Path) -> str:
    names = sorted(entry.name for entry in path.iterdir())
    known = "; ".join(FORMS.values())
    for name, words in OTHERS.items():
        if name in names:
            return f"{path} is {words} (it has {name}), which cannot be read. These can: {known}."
    if not names:
        return f"{path} is empty."
    return f"{path} is not a known kind of checkpoint: it has {', '.join(names[:4])}. These can be read: {known}."


def open_checkpoint(path: Path) -> Source:
    """Open the checkpoint at `path`, of any format, without reading its tensors."""
    form = form_of(path)
    try:
        return OPENERS[form](path)
    except OSError as error:  # a folder without permission, or a failing disk
        raise CheckpointError(f"{path} cannot be read: {error}") from error
