"""The words of paged attention: one step's metadata, the backend's contract, and the per-layer object models call."""

# T tokens of the step  R rows (sequences) of the step  B blocks per row
# Hq query heads  Hkv key/value heads  Dk key size  Dv value size

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from trimtab.runner.attention.kv_cache import LayerCache, PagedKVCache, PageLayout

if TYPE_CHECKING:
    from trimtab.models.spec import AttentionSpec


@dataclass(frozen=True, slots=True, eq=False)
class AttentionMetadata:
    """One step as one KV cache group sees it. Tokens of a row are adjacent and in order; rows follow one another.

    The fields that end in `_host` are the same numbers on the host, for backends that loop over rows.
    Entries of a block table that lie before a sliding window may name the null block; those after the last used block
    are never read.
    """

    query_start: torch.Tensor  # int32 [R + 1]: the step's tokens of row r are query_start[r] .. query_start[r + 1]
    seq_lens: torch.Tensor  # int32 [R]: length of the row, this step's tokens included
    block_table: torch.Tensor  # int32 [R, B]
    slot_mapping: torch.Tensor  # int64 [T]: block * block_size + offset, where each token's key and value go
    query_start_host: np.ndarray  # int64 [R + 1]
    seq_lens_host: np.ndarray  # int64 [R]

    @classmethod
    def from_host(
        cls,
        query_start: np.ndarray,
        seq_lens: np.ndarray,
        block_table: np.ndarray,
        slot_mapping: np.ndarray,
        device: torch.device | str = "cpu",
    ) -> AttentionMetadata:
        """Metadata from host arrays, copied: the caller may overwrite its arrays while the step is in flight."""

        def tensor(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(array, dtype=dtype, device=device)

        return cls(
            query_start=tensor(query_start, torch.int32),
            seq_lens=tensor(seq_lens, torch.int32),
            block_table=tensor(block_table, torch.int32),
            slot_mapping=tensor(slot_mapping, torch.int64),
            query_start_host=np.array(query_start, dtype=np.int64),
            seq_lens_host=np.array(seq_lens, dtype=np.int64),
        )


class AttentionBackend(Protocol):
    """Reads the paged cache.

    1. `prepare(metadata, window, block_size)` runs once per step and KV cache group: all that depends on the shape of
       the batch alone. Its result is shared by the layers of the group.
    2. `attend(...)` runs once per layer, after the layer's keys and values of this step are in the cache.

    Query i of a row attends to the positions up to its own; with a window w only to the last w of them, its own
    included. `sinks [Hq]` are extra logits in the softmax's denominator that add no value. `softcap` c turns a
    score s into c * tanh(s / c). Positions that were never written are never read.
    """

    name: str

    @property
    def pages(self) -> PageLayout:
        """The layout of the cache it reads."""
        ...

    def prepare(self, metadata: AttentionMetadata, window: int | None, block_size: int) -> Any: ...

    def attend(
        self,
        query: torch.Tensor,  # [T, Hq, Dk]
        cache: LayerCache,
        prepared: Any,
        *,
        scaling: float,
        sinks: torch.Tensor | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor: ...  # [T, Hq, Dv] in the query's dtype


class AttentionStep:
    """Holds the metadata of the step being run: the runner fills it before the forward and clears it after.

    One object per runner, shared by its `PagedAttention` layers: no globals, two engines in one process do not meet.
    """

    def __init__(self, backend: AttentionBackend, block_size: int, windows: tuple[int | None, ...]) -> None:
        self.backend = backend
        self._block_size = block_size
        self._windows = windows  # per group
        self._metadata: dict[int, AttentionMetadata] = {}
        self._prepared: dict[int, Any] = {}

    def begin(self, metadata_by_group: dict[int, AttentionMetadata]) -> None:
        assert not self._metadata, "the last attention step was not cleared"
        assert set(metadata_by_group) == set(range(len(self._windows))), "a step needs metadata for every KV group"
        self._metadata = dict(metadata_by_group)
        self._prepared = {
            group: self.backend.prepare(metadata, self._windows[group], self._block_size)
            for group, metadata in metadata_by_group.items()
        }

    def clear(self) -> None:
        self._metadata = {}
        self._prepared = {}

    def metadata(self, group: int) -> AttentionMetadata:
        assert self._metadata, "attention ran outside a step: call AttentionStep.begin before the forward"
        return self._metadata[group]

    def prepared(self, group: int) -> Any:
        return self._prepared[group]


class PagedAttention:
    """One layer's attention as models call it: writes the step's keys and values, then attends to all of the row."""

    def __init__(self, spec: AttentionSpec, group: int, step: AttentionStep, cache: PagedKVCache) -> None:
        self._spec = spec
        self._group = group
        self._step = step
        self._cache = cache
        self._layer = cache.layer(spec.layer_id)

    def __call__(
        self,
        query: torch.Tensor,  # [T, Hq, Dk]
        key: torch.Tensor,  # [T, Hkv, Dk]
        value: torch.Tensor,  # [T, Hkv, Dv]
        *,
        scaling: float,
        window: int | None = None,
        sinks: torch.Tensor | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:  # [T, Hq, Dv]
        metadata = self._step.metadata(self._group)
        spec = self._spec
        assert window == spec.window, f"layer {spec.layer_id} asked for window {window}, its KV group has {spec.window}"
        self._cache.write(spec.layer_id, key, value, metadata.slot_mapping)
        return self._step.backend.attend(
            query, self._layer, self._step.prepared(self._group), scaling=scaling, sinks=sinks, softcap=softcap
        )
