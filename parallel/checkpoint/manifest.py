"""What stands in a checkpoint's directory, and what its directory is called.

    checkpoints/
      00000007-step-1200/           published: the 7th of this directory, after step 1200
        state.pt                    what all ranks share; plain torch.load(weights_only=True) reads it
        shard-00001-of-00004.pt     what only rank 1 has
        manifest.json               names, sizes and checksums of the files; written last
      .step-1300.3f9a….partial/     being written; nobody reads it

A directory gets its published name by one rename, after everything in it is on the disk.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .error import DamagedCheckpoint

MANIFEST_NAME = "manifest.json"
STATE_NAME = "state.pt"
FORMAT_NAME = "dlaunch-checkpoint"
FORMAT_VERSION = 1
PARTIAL_SUFFIX = ".partial"
DELETING_SUFFIX = ".deleting"
_PUBLISHED = re.compile(r"(\d{8,})-step-(\d+)")
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True, order=True)
class Published:
    """The name of a published checkpoint; they sort by when they were published."""

    sequence: int
    step: int

    def __str__(self) -> str:
        return f"{self.sequence:08d}-step-{self.step}"

    @classmethod
    def parse(cls, name: str) -> Published | None:
        """From a directory's name; None if it is not that of a published checkpoint."""
        match = _PUBLISHED.fullmatch(name)
        return cls(int(match[1]), int(match[2])) if match else None


def partial_name(step: int, token: str) -> str:
    """The directory that a save is written in; ``token`` tells it from every other save."""
    return f".step-{step}.{token}{PARTIAL_SUFFIX}"


def shard_name(rank: int, world_size: int) -> str:
    """The file of one rank."""
    return f"shard-{rank:05d}-of-{world_size:05d}.pt"


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of a checkpoint."""

    name: str
    size: int  # bytes
    crc32: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint consists of."""

    step: int
    world_size: int
    files: tuple[FileEntry, ...]
    metadata: Mapping[str, Any] = field(default_factory=dict)  # the user's own, JSON
    written_by: Mapping[str, str] = field(default_factory=dict)  # versions, for people

    def encode(self) -> bytes:
        """The bytes of ``manifest.json``; raises TypeError or ValueError if the metadata is not JSON."""
        body = {
            "format": FORMAT_NAME,
            "version": FORMAT_VERSION,
            "step": self.step,
            "world_size": self.world_size,
            "files": [{"name": f.name, "size": f.size, "crc32": f"{f.crc32:08x}"} for f in self.files],
            "metadata": dict(self.metadata),
            "written_by": dict(self.written_by),
        }
        return json.dumps({**body, "crc32": _checksum_of(body)}, indent=1, allow_nan=False).encode()

    @classmethod
    def decode(cls, content: bytes) -> Manifest:
        """The manifest in ``content``.

        Raises:
            DamagedCheckpoint: it is not a whole manifest, or one of a newer format.
        """
        try:
            body = json.loads(content)
            found = body.pop("crc32")
            if found != _checksum_of(body):
                raise DamagedCheckpoint(f"{MANIFEST_NAME} does not agree with its own checksum")
            if (body["format"], body["version"]) != (FORMAT_NAME, FORMAT_VERSION):
                raise DamagedCheckpoint(f"{MANIFEST_NAME} is of format {body['format']!r} {body['version']}")
            files = tuple(FileEntry(_plain(f["name"]), int(f["size"]), int(f["crc32"], 16)) for f in body["files"])
            return cls(int(body["step"]), int(body["world_size"]), files, body["metadata"], body["written_by"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedCheckpoint(f"{MANIFEST_NAME} is not a whole manifest ({error!r})") from None


def published_in(directory: Path) -> list[Published]:
    """The checkpoints of a directory by name alone, the last published first; none if there is no directory.

    Raises:
        OSError: the directory cannot be read.
    """
    try:
        names = [entry.name for entry in directory.iterdir()]
    except FileNotFoundError:
        return []
    return sorted(filter(None, map(Published.parse, names)), reverse=True)


def _checksum_of(body: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(body, sort_keys=True, separators=(',', ':')).encode()):08x}"


def _plain(name: str) -> str:
    if not _PLAIN_NAME.fullmatch(name):  # a manifest must not lead a reader out of its directory
        raise DamagedCheckpoint(f"{MANIFEST_NAME} names a file {name!r}")
    return name
