"""Weights that a network multiplies with by itself: a router's `F.linear(hidden, self.weight)` is no module to replace.

Such a weight becomes a tensor that answers `F.linear` with a packed layer. What it buys is row invariance: torch's
product of a few float32 rows gives other bits than that of many, so a router's choice between near-equal experts, and
with it a token, could depend on batch mates (B109). Everything else one may do with the tensor stays torch's own.
"""

# E experts  H hidden size

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trimtab.kernels.linear import PackedLinear, pack_linear


class FunctionalWeight(Tensor):
    """A [N, K] weight and its packed layers by dtype: routers often multiply in float32, however they are stored."""

    packed: dict[torch.dtype, PackedLinear]
    stored: Tensor

    @staticmethod
    def wrap(weight: Tensor) -> FunctionalWeight:
        plain = weight.detach()
        wrapped: FunctionalWeight = plain.as_subclass(FunctionalWeight)
        wrapped.stored = plain
        wrapped.packed = {}
        return wrapped

    def times(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """F.linear(x, self, bias), in x's dtype; each row's bits are its own."""
        if x.dtype not in self.packed:
            self.packed[x.dtype] = pack_linear(self.stored.to(x.dtype))
        out: Tensor = self.packed[x.dtype](x)
        return out if bias is None else out + bias

    def load(self, weight: Tensor) -> None:
        """Other values [N, K] in place, in the packed layers too. Called on: the runner's thread, between forwards."""
        self.stored.copy_(weight)
        for dtype, layer in self.packed.items():
            layer.load_weight(self.stored.to(dtype))

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.linear and len(args) >= 2 and isinstance(args[1], cls) and not isinstance(args[0], cls):
            x, weight = args[0], args[1]
            bias = args[2] if len(args) > 2 else kwargs.get("bias")
            if x.dtype in (weight.dtype, torch.float32):
                return weight.times(x, bias)
        if func in _CASTS and isinstance(args[0], cls) and _target_dtype(func, args[1:], kwargs) is not None:
            return args[0]  # `times` goes by the dtype of what it is multiplied with
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


_CASTS = (Tensor.type, Tensor.to, Tensor.float)


def _target_dtype(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.dtype | None:
    """float32 when the call asks for that and nothing else."""
    if func is Tensor.float:
        return torch.float32
    asked = args[0] if len(args) == 1 and not kwargs else kwargs.get("dtype") if len(kwargs) == 1 and not args else None
    return asked if asked is torch.float32 else None


def wrap_router_weights(network: nn.Module, names: Sequence[str]) -> None:
    """Replaces the parameters `names` (dotted) by functional weights."""
    for name in names:
        owner, _, key = name.rpartition(".")
        parameters = network.get_submodule(owner)._parameters
        weight = parameters[key]
        assert weight is not None and weight.ndim == 2, f"{name} is not a matrix"
        parameters[key] = FunctionalWeight.wrap(weight)  # type: ignore[assignment]


def router_weights(network: nn.Module) -> list[str]:
    """Matrices that sit directly in a module which is neither a linear layer nor an embedding: routers, in the networks
    of transformers. One that its module uses in another way than by F.linear keeps working, unpacked."""
    return [
        f"{name}.weight"
        for name, module in network.named_modules()
        if not isinstance(module, (nn.Linear, nn.Embedding, PackedLinear))
        and (weight := module._parameters.get("weight")) is not None
        and weight.ndim == 2
        and weight.dtype in (torch.float32, torch.bfloat16)
        and weight.device.type == "cpu"
    ]
