"""To and from torch.distributed.checkpoint, without trusting its pickles.

torch's format keeps its table of contents and every value that is not a tensor as pickles. They are read here by
unpicklers that know a fixed list of harmless types, so a checkpoint of unknown origin cannot run code.
"""

from __future__ import annotations

import io
import os
import pickle
import warnings
from enum import EnumMeta
from pathlib import Path, PurePath
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

from .error import CheckpointError
from .plain_load import load_plainly
from .reader import Checkpoint

_METADATA_NAME = ".metadata"
_ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "pathlib._local": {"Path", "PosixPath", "PurePosixPath"},
}


def export_dcp(checkpoint: Checkpoint, directory: str | os.PathLike[str]) -> None:
    """Write a checkpoint (shards joined) so that ``torch.distributed.checkpoint.load`` reads it.

    Args:
        checkpoint: as ``latest`` found it.
        directory: made if need be; must be empty.

    Raises:
        FileExistsError: there is something in ``directory``.
        CheckpointError: the shards do not add up.
    """
    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    if any(target.iterdir()):
        raise FileExistsError(f"{target} is not empty")
    whole = checkpoint.read_whole()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is what is meant
        save_dcp(whole, checkpoint_id=str(target), no_dist=True)


def import_dcp(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """The whole state of a torch.distributed.checkpoint, in host memory, ready for ``save``.

    Torch's format turns numbers that are keys into strings, tuples that hold tensors into lists, and leaves empty dicts
    out. Here the ``state`` of an optimizer gets its numbers back; the rest stays as torch gives it.

    Raises:
        CheckpointError: it is no such checkpoint, or reading it would run code.
    """
    state: dict[str, Any] = {}
    source = Path(directory)
    if not (source / _METADATA_NAME).is_file():
        raise CheckpointError(f"{directory} has no {_METADATA_NAME}: it is no torch.distributed.checkpoint.")
    reader = _PlainReader(source, metadata=_read_metadata(source))
    planner = _PlainPlanner()  # type: ignore[no-untyped-call]
    try:
        _load_state_dict(state, storage_reader=reader, planner=planner, no_dist=True)
    except CheckpointException as wrapped:
        error, _trace = next(iter(wrapped.failures.values()))
        raise CheckpointError(f"{directory} was not read: {error}") from None
    _repair_optimizers(state)
    return state


class _PlainUnpickler(pickle.Unpickler):
    """Knows the types of a table of contents and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it holds a {module}.{name}")


def _enum_member(kind: Any, name: str) -> Any:
    """What early releases of Python 3.11 (Debian 12 has one) pickle an enum's member as: ``getattr`` of its class."""
    if isinstance(kind, EnumMeta) and name in kind.__members__:
        return kind[name]
    raise pickle.UnpicklingError("it holds a builtins.getattr of something else than an enum")


def _read_metadata(directory: Path) -> Metadata:
    try:
        metadata = _PlainUnpickler(io.BytesIO((directory / _METADATA_NAME).read_bytes())).load()
        files = {PurePath(info.relative_path) for info in metadata.storage_data.values()}
    except Exception as error:  # garbage may raise almost anything
        raise CheckpointError(f"{directory / _METADATA_NAME} was not read: {error}.") from None
    for file in files:
        if file.is_absolute() or ".." in file.parts:
            raise CheckpointError(f"{directory / _METADATA_NAME} was not read: it names {file}, outside of it.")
    if getattr(metadata, "storage_meta", None) is None:
        metadata.storage_meta = StorageMeta()
    checked: Metadata = metadata
    return checked


class _PlainReader(FileSystemReader):
    """torch's reader with a table of contents that was read safely."""

    def __init__(self, directory: Path, metadata: Metadata) -> None:
        super().__init__(str(directory))
        self._metadata = metadata

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        return self._metadata


class _PlainPlanner(_EmptyStateDictLoadPlanner):
    """Builds the state dict from the table of contents; values that are not tensors are read safely."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        plain = load_plainly(value, repr(read_item.dest_index.fqn))
        super().load_bytes(read_item, _as_saved(plain))


def _as_saved(plain: Any) -> io.BytesIO:
    """``plain`` as torch's planner expects it; it unpickles what was just found to be harmless."""
    content = io.BytesIO()
    torch.save(plain, content)
    content.seek(0)
    return content


def _repair_optimizers(tree: dict[str, Any]) -> None:
    """Give optimizers back the numbers that are keys of their ``state``; with strings they would forget it silently."""
    if "param_groups" in tree:
        own = tree.setdefault("state", {})
        if all(isinstance(key, str) and key.isdecimal() for key in own):
            tree["state"] = {int(key): value for key, value in own.items()}
    for value in tree.values():
        if isinstance(value, dict):
            _repair_optimizers(value)
