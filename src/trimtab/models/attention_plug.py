"""The attention plug: transformers' attention layers call the AttentionLayer bound to their module.

The registries of transformers are process-global, so the functions registered here hold no state: what a layer needs
hangs on the module instance. The mask function builds no mask; it returns a tag with the layer's window, which is
the only place where every architecture says it (some pass no window keyword, some have a wrong `sliding_window`).
"""

# T tokens  Hq query heads  Hkv key/value heads  Dk key size  Dv value size

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from trimtab.models.errors import UnsupportedModelError

IMPLEMENTATION = "trimtab"
_BOUND = "_trimtab_attention"

# Keywords that say nothing about the mathematics of a packed causal forward without dropout.
_NEUTRAL = frozenset(
    {
        "cache",
        "cache_position",
        "cu_seq_lens_k",
        "cu_seq_lens_q",
        "max_length_k",
        "max_length_q",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)


class AttentionLayer(Protocol):
    """Attention of one layer over a packed batch; knows by itself which tokens belong together and what came before."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float,
        window: int | None,
        sinks: Tensor | None,
        softcap: float | None,
    ) -> Tensor:
        """query [T, Hq, Dk], key [T, Hkv, Dk], value [T, Hkv, Dv] (views, any strides) -> [T, Hq, Dv].

        window: a token sees itself and the window - 1 tokens before it. sinks [Hq]: one extra logit per head.
        """
        ...


@dataclass(frozen=True, slots=True)
class MaskTag:
    """Stands where transformers passes a mask. `allowed` is its own predicate, kept for the probe to check."""

    window: int | None
    custom: bool
    allowed: Callable[..., Any]


def make_mask_tag(
    *, mask_function: Callable[..., Any], local_size: int | None = None, use_vmap: bool = False, **_: Any
) -> MaskTag:
    """Called by transformers once per kind of mask and forward, in place of building the mask."""
    return MaskTag(window=local_size, custom=use_vmap, allowed=mask_function)


def bind_attention(module: nn.Module, layer: AttentionLayer) -> None:
    object.__setattr__(module, _BOUND, layer)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: MaskTag | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [1, Hq, T, Dk], key [1, Hkv, T, Dk], value [1, Hkv, T, Dv] -> [1, T, Hq, Dv]."""
    layer: AttentionLayer | None = getattr(module, _BOUND, None)
    assert layer is not None, f"no attention layer was bound to {type(module).__name__}"
    refuse_unknown_keywords(module, kwargs)
    output = layer(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scaling=scaling if scaling is not None else query.shape[-1] ** -0.5,
        window=window_of(module, attention_mask),
        sinks=s_aux,
        softcap=softcap,
    )
    return output.unsqueeze(0), None


def window_of(module: nn.Module, mask: MaskTag | None) -> int | None:
    """The tag's window. Neither the keyword nor `module.sliding_window` is trusted: both are wrong somewhere."""
    if not isinstance(mask, MaskTag):
        raise UnsupportedModelError(
            f"{type(module).__name__} passes {type(mask).__name__} where its mask should be: "
            "it builds its own mask, which cannot be followed"
        )
    return mask.window


def refuse_unknown_keywords(module: nn.Module, kwargs: Mapping[str, Any]) -> None:
    """A keyword that is not understood may change the mathematics, so it is refused rather than ignored."""
    for name, value in kwargs.items():
        if value is not None and value is not False and name not in _NEUTRAL:
            raise UnsupportedModelError(
                f"{type(module).__name__} passes {name!r} to its attention function, which is not understood"
            )


def register() -> None:
    """Puts the functions into transformers' registries; harmless when repeated."""
    AttentionInterface.register(IMPLEMENTATION, attention_forward)
    AttentionMaskInterface.register(IMPLEMENTATION, make_mask_tag)
