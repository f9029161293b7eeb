"""trimtab serves Mixture-of-Experts language models and keeps their experts in balance while they run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trimtab.config import EngineConfig
    from trimtab.llm import LLM
    from trimtab.outputs import CompletionOutput, Logprob, RequestOutput
    from trimtab.sampling_params import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "CompletionOutput", "EngineConfig", "Logprob", "RequestOutput", "SamplingParams"]

_HOMES = {
    "LLM": "trimtab.llm",
    "EngineConfig": "trimtab.config",
    "SamplingParams": "trimtab.sampling_params",
    "CompletionOutput": "trimtab.outputs",
    "Logprob": "trimtab.outputs",
    "RequestOutput": "trimtab.outputs",
}


def __getattr__(name: str) -> Any:
    # Lazy, so that `trimtab --help` and `import trimtab` do not pay for torch.
    if name not in _HOMES:
        raise AttributeError(f"module 'trimtab' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
