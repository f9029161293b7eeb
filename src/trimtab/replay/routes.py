"""Which experts every token of one completion used, with all that a trainer needs to use them again."""

# S tokens of prompt and output  L MoE layers  K top-k

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from trimtab.experts.routed_experts import RoutedExpertsLayout, routed_experts_layout

if TYPE_CHECKING:
    from trimtab.models.spec import ModelSpec
    from trimtab.outputs import RequestOutput


@dataclass(frozen=True, slots=True)
class RoutedModel:
    """The model that routes were captured from: what their rows' axes and numbers mean."""

    model: str  # its name, for people
    architecture: str
    num_experts: int  # ids are in [0, num_experts)
    top_k: int
    layer_ids: tuple[int, ...]  # of the decoder layers, one per MoE layer of the arrays
    num_hidden_layers: int  # dense layers included

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(f"top_k ({self.top_k}) must be in [1, {self.num_experts}], the number of experts")
        ids = self.layer_ids
        if not ids or list(ids) != sorted(set(ids)) or ids[0] < 0 or ids[-1] >= self.num_hidden_layers:
            raise ValueError(
                f"layer_ids ({ids}) must ascend within num_hidden_layers ({self.num_hidden_layers}); "
                "give the decoder layers that hold experts"
            )

    @classmethod
    def of(cls, spec: ModelSpec) -> RoutedModel:
        """Of a checkpoint as trimtab reads it."""
        layout = routed_experts_layout(spec.moe_layers)
        return cls(
            model=spec.path.name,
            architecture=spec.architecture,
            num_experts=layout.num_experts,
            top_k=layout.top_k,
            layer_ids=layout.layer_ids,
            num_hidden_layers=spec.num_layers,
        )

    @property
    def dtype(self) -> np.dtype:
        """The narrowest unsigned type that holds every id: one byte up to 256 experts, else two."""
        return RoutedExpertsLayout(self.layer_ids, self.num_experts, self.top_k).dtype


@dataclass(frozen=True, slots=True, eq=False)
class Routes:
    """One completion's routed experts.

    Row r of `experts` is the token at position `start + r` of `token_ids`. There are S - 1 - start rows, because the
    last sampled token was never forwarded, or S - start where a trainer forwarded it; fewer only where the request was
    aborted or failed. Raises ValueError naming what does not fit.
    """

    model: RoutedModel
    experts: np.ndarray  # integers [rows, L, K], logical ids in the router's order
    token_ids: np.ndarray  # integers [S]: prompt, then output
    num_prompt_tokens: int
    start: int = 0
    logprobs: np.ndarray | None = None  # float32 [S - num_prompt_tokens]: of the output tokens as they were sampled
    weights_versions: tuple[tuple[int, int], ...] = ((0, 0),)  # (first row, version that computed it and the next ones)
    request_id: str = ""
    index: int = 0  # of the completion, where a request has several
    finish_reason: str | None = None

    def __post_init__(self) -> None:
        self._check_tokens()
        self._check_experts()
        starts = [row for row, _ in self.weights_versions]
        if not starts or starts[0] != 0 or starts != sorted(set(starts)):
            raise ValueError(f"{self.label}: weights_versions ({self.weights_versions}) must start at row 0 and ascend")

    @property
    def label(self) -> str:
        """How messages call this completion."""
        return f"request {self.request_id or '?'} completion {self.index}"

    @property
    def num_rows(self) -> int:
        return int(self.experts.shape[0])

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def truncate(self, num_tokens: int) -> Routes:
        """The same for the first `num_tokens` tokens: rows and log-probabilities are cut alike (B73)."""
        if not self.num_prompt_tokens <= num_tokens <= self.num_tokens:
            raise ValueError(
                f"{self.label}: num_tokens ({num_tokens}) must be in [{self.num_prompt_tokens}, {self.num_tokens}], "
                "from the prompt alone to all tokens"
            )
        if num_tokens == self.num_tokens:
            return self
        rows = min(self.num_rows, max(num_tokens - 1 - self.start, 0))
        return replace(
            self,
            experts=self.experts[:rows],
            token_ids=self.token_ids[:num_tokens],
            logprobs=None if self.logprobs is None else self.logprobs[: num_tokens - self.num_prompt_tokens],
            weights_versions=tuple(entry for entry in self.weights_versions if entry[0] == 0 or entry[0] < rows),
        )

    def _check_tokens(self) -> None:
        ids = self.token_ids
        if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
            raise ValueError(f"{self.label}: token_ids ({ids.dtype} {list(ids.shape)}) must be one row of integers")
        if not 0 <= self.num_prompt_tokens <= len(ids):
            raise ValueError(
                f"{self.label}: num_prompt_tokens ({self.num_prompt_tokens}) must be in [0, {len(ids)}], all tokens"
            )
        if not 0 <= self.start <= len(ids):
            raise ValueError(f"{self.label}: start ({self.start}) must be in [0, {len(ids)}], a position of a token")
        expected = len(ids) - self.num_prompt_tokens
        if self.logprobs is not None and self.logprobs.shape != (expected,):
            raise ValueError(
                f"{self.label}: logprobs ({list(self.logprobs.shape)}) must be one per output token, [{expected}]"
            )

    def _check_experts(self) -> None:
        experts, model = self.experts, self.model
        layers, top_k = len(model.layer_ids), model.top_k
        if not np.issubdtype(experts.dtype, np.integer):
            raise ValueError(f"{self.label}: routed experts ({experts.dtype}) must be integers")
        if experts.ndim != 3 or experts.shape[1:] != (layers, top_k):
            raise ValueError(
                f"{self.label}: routed experts {list(experts.shape)} must be [rows, {layers} MoE layers, top-{top_k}]"
            )
        most = self.num_tokens - self.start
        cut_short = self.finish_reason in ("abort", "error")
        if len(experts) > most or (len(experts) < most - 1 and not cut_short):
            raise ValueError(
                f"{self.label}: {len(experts)} rows of routed experts must be {max(most - 1, 0)} or {most} for "
                f"{self.num_tokens} tokens from start {self.start}; give the tokens that the rows were captured with"
            )
        if not experts.size:
            return
        lowest, highest = int(experts.min()), int(experts.max())
        if lowest < 0 or highest >= model.num_experts:
            raise ValueError(
                f"{self.label}: expert ids in [{lowest}, {highest}] must be in [0, {model.num_experts}) (B76)"
            )
        ordered = np.sort(experts, axis=-1)
        if top_k > 1 and bool((ordered[..., 1:] == ordered[..., :-1]).any()):
            row, layer = np.argwhere((ordered[..., 1:] == ordered[..., :-1]).any(axis=-1))[0]
            raise ValueError(
                f"{self.label}: row {row} names an expert twice in layer {model.layer_ids[layer]}: "
                f"{experts[row, layer].tolist()}"
            )


def routes_of(output: RequestOutput, model: RoutedModel) -> list[Routes]:
    """One per completion of `output`. Raises ValueError where routed experts were not returned."""
    found: list[Routes] = []
    for completion in output.outputs:
        experts, meta = completion.routed_experts, completion.routed_experts_meta
        label = f"request {output.request_id} completion {completion.index}"
        if experts is None or meta is None:
            if completion.finish_reason in ("abort", "error"):  # nothing was computed (B71)
                continue
            raise ValueError(
                f"{label} has no routed experts; start the engine with enable_return_routed_experts and leave "
                "SamplingParams.return_routed_experts on"
            )
        if meta.layer_ids != model.layer_ids or meta.num_experts != model.num_experts:
            raise ValueError(
                f"{label} has layers {meta.layer_ids} of {meta.num_experts} experts, the model "
                f"{model.layer_ids} of {model.num_experts}; give the model that made the output"
            )
        logprobs = None
        if completion.logprobs is not None:
            pairs = zip(completion.token_ids, completion.logprobs, strict=True)
            logprobs = np.array([entry[token].logprob for token, entry in pairs], np.float32)
        found.append(
            Routes(
                model=model,
                experts=np.asarray(experts),
                token_ids=np.array([*output.prompt_token_ids, *completion.token_ids], np.int64),
                num_prompt_tokens=len(output.prompt_token_ids),
                start=meta.start,
                logprobs=logprobs,
                weights_versions=meta.weights_versions,
                request_id=output.request_id,
                index=completion.index,
                finish_reason=completion.finish_reason,
            )
        )
    return found
