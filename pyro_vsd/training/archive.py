"""Files that are whole or not there: written beside their place and renamed, verified before they are believed."""

import contextlib
import hashlib
import io
import os
import struct
import time
import uuid
from pathlib import Path
from typing import Any

import torch

__all__ = ["read_archive", "write_archive"]

# A line that says what the file is, then format version, length and SHA-256 of what follows.
_MAGIC = b"pyro_vsd checkpoint\n"
_HEADER = struct.Struct(">IQ32s")
_VERSION = 1
# A process that was killed while writing leaves its file behind. No checkpoint takes this many seconds to write.
_ABANDONED = 3600.0


def write_archive(path: str | os.PathLike[str], content: dict[str, Any]) -> None:
    """Writes plain ``content``. Whatever happens meanwhile, ``path`` holds the old file or the new one, whole.

    :param content: of the types of :func:`~pyro_vsd.training.plain.to_plain`.
    """
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        raise ValueError(f"path: expected a file in a folder that exists, got {os.fspath(path)!r}.")
    if target.is_dir():
        raise ValueError(f"path: expected a file, got the folder {os.fspath(path)!r}.")
    buffer = io.BytesIO()
    torch.save(content, buffer)
    payload = buffer.getbuffer()
    header = _MAGIC + _HEADER.pack(_VERSION, len(payload), hashlib.sha256(payload).digest())
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(header)
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    _sync_folder(target.parent)
    _remove_abandoned(target)


def read_archive(path: str | os.PathLike[str], map_location: Any = None) -> dict[str, Any]:
    """The content of a file of :func:`write_archive`, after its length and checksum have been verified.

    Tensors and plain containers are all that is ever made from it (``weights_only=True``).
    """
    name = os.fspath(path)
    data = Path(path).read_bytes()
    start = len(_MAGIC) + _HEADER.size
    if not data.startswith(_MAGIC[: len(data)]) or not data:
        raise ValueError(f"path: expected a checkpoint of pyro_vsd, got {name!r}, which is another kind of file.")
    if len(data) < start:
        raise ValueError(f"path: expected a whole checkpoint, got {name!r}, which was cut short at {len(data)} bytes.")
    version, length, digest = _HEADER.unpack(data[len(_MAGIC) : start])
    if version != _VERSION:
        raise ValueError(
            f"path: expected a checkpoint of format {_VERSION}, got {name!r} of format {version}. It was written by "
            "another version of pyro_vsd, or damaged."
        )
    payload = memoryview(data)[start:]
    if len(payload) != length:
        raise ValueError(
            f"path: expected a checkpoint of {start + length} bytes, got {name!r} with {len(data)}. It was cut short, "
            "or something was added to it."
        )
    if hashlib.sha256(payload).digest() != digest:
        raise ValueError(f"path: expected a checkpoint as it was written, got {name!r}, whose checksum is another.")
    try:
        content = torch.load(io.BytesIO(payload), map_location=map_location or "cpu", weights_only=True)
    # What a crafted file can make torch raise is not a short list.
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"path: expected a checkpoint of tensors, numbers and plain containers, got {name!r}, which holds "
            f"something else or cannot be read: {reason}"
        ) from error
    if not isinstance(content, dict):
        raise ValueError(f"path: expected a checkpoint of pyro_vsd, got {name!r}, which holds a {type(content)}.")
    return content


def _sync_folder(folder: Path) -> None:
    """Makes the renaming itself durable, where the system lets a folder be opened."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _remove_abandoned(target: Path) -> None:
    for left in target.parent.glob(f".{target.name}.*.tmp"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > _ABANDONED:
                left.unlink()
