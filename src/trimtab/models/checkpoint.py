"""A folder of safetensors files, read through its headers: what is stored where, and one tensor at a time.

Only safetensors is read, never pickle. The index decides which file a tensor comes from; a file the index does not
name is never opened (another precision of the same model may lie beside it).
"""

from __future__ import annotations

import json
import logging
import math
import mmap
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trimtab.models.errors import CheckpointError, UnsupportedModelError

logger = logging.getLogger(__name__)

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_MAX_HEADER_BYTES = 100 << 20  # the format's own limit

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies: bytes [start, end) of `file`."""

    name: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(slots=True)
class Checkpoint:
    """All tensors of a model folder by name. `read` maps a tensor; `release` lets its pages go."""

    path: Path
    tensors: dict[str, StoredTensor]
    _maps: dict[Path, mmap.mmap] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
        """Reads the headers only. Raises CheckpointError naming the file or tensor that is not sound."""
        index_file = path / INDEX_FILE
        if index_file.is_file():
            return cls(path, _read_indexed(path, index_file))
        single = path / SINGLE_FILE
        if single.is_file():
            return cls(path, read_header(single))
        raise _nothing_to_read(path)

    def read(self, name: str) -> Tensor:
        """A view of the file's bytes: copy what is to be kept. Never written to."""
        stored = self.tensors[name]
        if stored.start == stored.end:
            return torch.empty(stored.shape, dtype=stored.dtype)
        mapped = self._maps.get(stored.file)
        if mapped is None:
            with stored.file.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            self._maps[stored.file] = mapped
        size = stored.dtype.itemsize
        flat = torch.frombuffer(mapped, dtype=torch.uint8, count=stored.end - stored.start, offset=stored.start)
        if stored.start % size:  # an unaligned file is legal but cannot be viewed in place
            flat = flat.clone()
        return flat.view(stored.dtype).view(stored.shape)

    def release(self, name: str) -> None:
        """Drops the mapped pages of a tensor, so that reading a model holds one tensor and not the file."""
        stored = self.tensors[name]
        mapped = self._maps.get(stored.file)
        if mapped is None or not hasattr(mmap, "MADV_DONTNEED"):
            return
        first = stored.start // mmap.PAGESIZE * mmap.PAGESIZE  # a neighbour's page is simply read again
        mapped.madvise(mmap.MADV_DONTNEED, first, stored.end - first)


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of one file. Its length must be what the header says: a mapped short file reads as zeros (B88)."""
    actual = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if actual < 8 or length > min(_MAX_HEADER_BYTES, actual - 8):
            raise CheckpointError(f"{file} ({actual} bytes) is not a whole safetensors file; download it again")
        try:
            header: dict[str, Any] = json.loads(stream.read(length))
            tensors = {
                name: _stored_tensor(file, name, entry, 8 + length)
                for name, entry in header.items()
                if name != "__metadata__"
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{file} has a damaged safetensors header ({error}); download it again") from error
    expected = max((stored.end for stored in tensors.values()), default=8 + length)
    if actual != expected:
        raise CheckpointError(
            f"{file} has {actual} bytes, its header says {expected}: the file is cut off or damaged; download it again"
        )
    return tensors


def _stored_tensor(file: Path, name: str, entry: dict[str, Any], data_start: int) -> StoredTensor:
    begin, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if entry["dtype"] not in DTYPES:
        raise CheckpointError(f"tensor {name} in {file} has dtype {entry['dtype']}; known are {', '.join(DTYPES)}")
    dtype = DTYPES[entry["dtype"]]
    if begin < 0 or end - begin != math.prod(shape) * dtype.itemsize:
        raise CheckpointError(f"tensor {name} in {file} has {end - begin} bytes, which is not {shape} of {dtype}")
    return StoredTensor(name, file, dtype, shape, data_start + begin, data_start + end)


def _read_indexed(path: Path, index_file: Path) -> dict[str, StoredTensor]:
    try:
        weight_map: dict[str, str] = json.loads(index_file.read_text())["weight_map"]
        file_names = sorted(set(weight_map.values()))
        if not all(isinstance(file_name, str) for file_name in file_names):
            raise TypeError("weight_map must map tensors to file names")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index_file} is not a safetensors index ({error}); download it again") from error
    headers: dict[str, dict[str, StoredTensor]] = {}
    for file_name in file_names:
        if Path(file_name).name != file_name or file_name.startswith("."):
            raise CheckpointError(f"{index_file} names {file_name!r}, which is not a file of its own folder")
        if not (path / file_name).is_file():
            raise CheckpointError(f"shard {file_name} named by {index_file} is missing; download it")
        headers[file_name] = read_header(path / file_name)
    for name, file_name in weight_map.items():
        if name not in headers[file_name]:
            raise CheckpointError(
                f"tensor {name} is not in {path / file_name}, where {INDEX_FILE} says it is; the index is stale"
            )
    _warn_of_strays(path, weight_map, headers)
    return {name: headers[file_name][name] for name, file_name in weight_map.items()}


def _warn_of_strays(path: Path, weight_map: dict[str, str], headers: dict[str, dict[str, StoredTensor]]) -> None:
    for file_name, header in headers.items():
        strays = [name for name in header if weight_map.get(name) != file_name]
        if strays:
            logger.warning(
                "%s holds %d tensor(s) that %s does not place there (%s): not read",
                path / file_name, len(strays), INDEX_FILE, strays[0],
            )  # fmt: skip
    for file in sorted(path.glob("*.safetensors")):
        if file.name not in headers:
            logger.warning("%s is not named by %s: not read", file, INDEX_FILE)


def _nothing_to_read(path: Path) -> ValueError:
    shards = sorted(file.name for file in path.glob("*.safetensors"))
    if SINGLE_FILE in shards:
        return CheckpointError(f"{path / SINGLE_FILE} is not a file (a link to nothing?); download it again")
    if shards:
        return CheckpointError(
            f"{path} has {shards[0]} but neither {SINGLE_FILE} nor {INDEX_FILE}; download the missing index"
        )
    pickles = sorted(file.name for pattern in _PICKLES for file in path.glob(pattern))
    if pickles:
        return UnsupportedModelError(
            f"{path} stores its weights as pickle ({pickles[0]}), which can run code when read; "
            "convert it to safetensors"
        )
    return CheckpointError(f"{path} has no weights: neither {SINGLE_FILE} nor {INDEX_FILE}; {os.listdir(path)[:8]}")
