"""`record_load`: the load of every window on disk, for the planner.

A safetensors file with one tensor, `windows` int64 [W, 3 + L * E]. A row is a window: the clock's step at its end, how
many steps it covers, the first 63 bits of the digest of the placement in force, then counts [L, E]. The file's metadata
names model, layers, experts, phase and window length. Each window is appended and the header, which has room to spare,
written over: the file is whole after every window, and no window is kept in memory.
"""

# L MoE layers  E experts  W windows

from __future__ import annotations

import json
import os
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trimtab.experts.load import ExpertLoad
from trimtab.experts.placement import Placement

FORMAT = "trimtab-load"
TENSOR = "windows"
NUM_FACTS = 3  # end step, steps, placement
_HEADER_BYTES = 4096


@dataclass(frozen=True, slots=True)
class TraceMetadata:
    model: str
    num_layers: int
    num_experts: int
    phase: str
    window_size: int
    placement: str  # digest at start


class LoadTrace:
    """Writes one. Raises ValueError where the file exists already or cannot be written."""

    def __init__(self, path: str, metadata: TraceMetadata) -> None:
        self.path, self.metadata, self.num_windows = Path(path), metadata, 0
        try:
            self._file = open(path, "xb")  # noqa: SIM115 - open as long as the engine runs
        except FileExistsError as error:
            raise ValueError(f"record_load ({path}) exists; name another file or remove it") from error
        except OSError as error:
            raise ValueError(f"record_load ({path}) cannot be written: {error.strerror}; name another file") from error
        self._write_header()

    def append(self, load: ExpertLoad, placement: Placement, end_step: int) -> None:
        facts = [end_step, load.num_steps, placement_mark(placement.digest())]
        row = np.concatenate([np.array(facts, dtype="<i8"), load.counts.reshape(-1).astype("<i8")])
        self._file.seek(0, os.SEEK_END)
        self._file.write(row.tobytes())
        self.num_windows += 1
        self._write_header()

    def close(self) -> None:
        self._file.close()

    def _write_header(self) -> None:
        metadata = self.metadata
        width = NUM_FACTS + metadata.num_layers * metadata.num_experts
        header = {
            "__metadata__": {
                "format": FORMAT,
                "model": metadata.model,
                "num_layers": str(metadata.num_layers),
                "num_experts": str(metadata.num_experts),
                "phase": metadata.phase,
                "window_size": str(metadata.window_size),
                "placement": metadata.placement,
            },
            TENSOR: {
                "dtype": "I64",
                "shape": [self.num_windows, width],
                "data_offsets": [0, self.num_windows * width * 8],
            },
        }
        text = json.dumps(header).encode().ljust(_HEADER_BYTES)
        assert len(text) == _HEADER_BYTES, "a model's name longer than a file's path can be"
        self._file.seek(0)
        self._file.write(struct.pack("<Q", _HEADER_BYTES) + text)
        self._file.flush()


def placement_mark(digest: str) -> int:
    """What of a placement's digest a row keeps."""
    return int(digest[:16], 16) >> 1


def read_load_trace(path: str | Path) -> tuple[dict[str, str], list[ExpertLoad], npt.NDArray[np.int64]]:
    """Metadata, the windows' loads, and [W, 3] of end step, steps and placement. Raises ValueError for another file."""
    data = Path(path).read_bytes()
    try:
        (length,) = struct.unpack_from("<Q", data)
        header = json.loads(data[8 : 8 + length])
        metadata, tensor = header["__metadata__"], header[TENSOR]
        if metadata["format"] != FORMAT:
            raise KeyError(metadata["format"])
        shape = (int(metadata["num_layers"]), int(metadata["num_experts"]))
        windows = np.frombuffer(data, dtype="<i8", offset=8 + length)[: np.prod(tensor["shape"], dtype=int)]
        windows = windows.reshape(tensor["shape"]).astype(np.int64)
    except (KeyError, ValueError, struct.error) as error:
        raise ValueError(f"{path} is no trace of loads ({error!r}); record one with eplb_config.record_load") from error
    loads = [ExpertLoad(row[NUM_FACTS:].reshape(shape), int(row[1])) for row in windows]
    return metadata, loads, windows[:, :NUM_FACTS]
