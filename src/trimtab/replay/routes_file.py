"""Files of routed experts: safetensors, `schema: "trimtab.routes/1"`, many completions per file, read one at a time.

Metadata: the model's facts and, as JSON, one record per completion. Tensors of the i-th completion, each with its true
length (nothing is padded to the longest, B72):

    <i>.routed_experts  uint8 or uint16 [rows, L, K]
    <i>.token_ids       int64 [S]
    <i>.logprobs        float32 [S - num_prompt_tokens], where they were asked for
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from trimtab.replay.routes import RoutedModel, Routes

SCHEMA = "trimtab.routes/1"


def save_routes(path: str | Path, routes: Iterable[Routes]) -> Path:
    """Writes all of `routes`, of one model, or nothing: the file appears whole. Returns the path."""
    path = Path(path)
    tensors: dict[str, np.ndarray] = {}
    records: list[dict[str, Any]] = []
    model: RoutedModel | None = None
    for position, entry in enumerate(routes):
        model = model or entry.model
        if entry.model != model:
            raise ValueError(f"{entry.label} is of {entry.model}, the first of {model}; write one file per model")
        tensors[f"{position}.routed_experts"] = np.ascontiguousarray(entry.experts, dtype=model.dtype)
        tensors[f"{position}.token_ids"] = np.ascontiguousarray(entry.token_ids, dtype=np.int64)
        if entry.logprobs is not None:
            tensors[f"{position}.logprobs"] = np.ascontiguousarray(entry.logprobs, dtype=np.float32)
        records.append(
            {
                "request_id": entry.request_id,
                "index": entry.index,
                "num_prompt_tokens": entry.num_prompt_tokens,
                "start": entry.start,
                "weights_versions": [list(pair) for pair in entry.weights_versions],
                "finish_reason": entry.finish_reason,
            }
        )
    if model is None:
        raise ValueError(f"{path}: no completion has routed experts; there is nothing to write")
    _write_whole(path, save(tensors, metadata=_metadata(model, records)))
    return path


def _metadata(model: RoutedModel, records: list[dict[str, Any]]) -> dict[str, str]:
    return {
        "schema": SCHEMA,
        "model": model.model,
        "architecture": model.architecture,
        "num_experts": str(model.num_experts),
        "top_k": str(model.top_k),
        "layer_ids": json.dumps(model.layer_ids),
        "num_hidden_layers": str(model.num_hidden_layers),
        "dtype": model.dtype.name,
        "completions": json.dumps(records),
    }


def _write_whole(path: Path, content: bytes) -> None:
    """Through a neighbour that takes the name at the end: readers see the old file or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    number, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(number, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)  # mkstemp's 0600 would hide the file from a trainer that runs as another user
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


class RoutesFile:
    """A file of routes: `len()`, `[i]` and iteration; one completion is in memory at a time.

    The header is checked when opened, a completion when it is read. Raises ValueError naming the file and what is wrong
    with it.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise ValueError(
                f"{self.path} is not a file; trimtab generate --return-routed-experts and save_routes write some"
            )
        try:
            self._file = safe_open(str(self.path), framework="numpy")
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{self.path} is not a whole safetensors file ({error}); write it again") from error
        self._names = set(self._file.keys())
        metadata = self._file.metadata() or {}
        self.model = self._read_model(metadata)
        self._records: list[dict[str, Any]] = self._json(metadata, "completions")
        self._check_names()

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[Routes]:
        return (self[position] for position in range(len(self)))

    def __getitem__(self, position: int) -> Routes:
        if not -len(self) <= position < len(self):
            raise IndexError(f"{self.path} holds {len(self)} completions; {position} is not one of them")
        position %= len(self)
        record = self._records[position]
        experts = self._tensor(f"{position}.routed_experts", self.model.dtype)
        has_logprobs = f"{position}.logprobs" in self._names
        try:
            return Routes(
                model=self.model,
                experts=experts,
                token_ids=self._tensor(f"{position}.token_ids", np.dtype(np.int64)),
                num_prompt_tokens=int(record["num_prompt_tokens"]),
                start=int(record["start"]),
                logprobs=self._tensor(f"{position}.logprobs", np.dtype(np.float32)) if has_logprobs else None,
                weights_versions=tuple((int(row), int(version)) for row, version in record["weights_versions"]),
                request_id=str(record["request_id"]),
                index=int(record["index"]),
                finish_reason=record["finish_reason"],
            )
        except KeyError as error:
            raise ValueError(f"{self.path}: completion {position} lacks {error} in its record") from error
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self.path}: completion {position} is damaged: {error}") from error

    def _read_model(self, metadata: dict[str, str]) -> RoutedModel:
        schema = metadata.get("schema")
        if schema != SCHEMA:
            raise ValueError(f"{self.path} has schema {schema!r}; only {SCHEMA!r} can be read")
        wanted = ("model", "architecture", "num_experts", "top_k", "layer_ids", "num_hidden_layers", "dtype")
        missing = [name for name in (*wanted, "completions") if name not in metadata]
        if missing:
            raise ValueError(f"{self.path} lacks {', '.join(missing)} in its metadata")
        try:
            model = RoutedModel(
                model=metadata["model"],
                architecture=metadata["architecture"],
                num_experts=int(metadata["num_experts"]),
                top_k=int(metadata["top_k"]),
                layer_ids=tuple(int(layer) for layer in self._json(metadata, "layer_ids")),
                num_hidden_layers=int(metadata["num_hidden_layers"]),
            )
        except ValueError as error:
            raise ValueError(f"{self.path} has metadata that does not fit together: {error}") from error
        if metadata["dtype"] != model.dtype.name:
            raise ValueError(
                f"{self.path} says dtype {metadata['dtype']}; {model.num_experts} experts are stored as "
                f"{model.dtype.name}"
            )
        return model

    def _json(self, metadata: dict[str, str], name: str) -> Any:
        try:
            found = json.loads(metadata[name])
        except ValueError as error:
            raise ValueError(f"{self.path}: metadata {name} is not JSON ({error})") from error
        if not isinstance(found, list):
            raise ValueError(f"{self.path}: metadata {name} must be a list")
        return found

    def _check_names(self) -> None:
        wanted = {f"{position}.{name}" for position in range(len(self)) for name in ("routed_experts", "token_ids")}
        if missing := sorted(wanted - self._names):
            raise ValueError(f"{self.path} names {len(self)} completions and lacks tensor {missing[0]}")
        optional = {f"{position}.logprobs" for position in range(len(self))}
        if unknown := sorted(self._names - wanted - optional):
            raise ValueError(f"{self.path} holds tensor {unknown[0]}, which no completion owns")

    def _tensor(self, name: str, dtype: np.dtype) -> np.ndarray:
        found = self._file.get_tensor(name)
        if found.dtype != dtype:
            raise ValueError(f"{self.path}: tensor {name} is {found.dtype}, it must be {dtype}")
        return found
