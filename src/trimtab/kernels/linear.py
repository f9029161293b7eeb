"""The one place that decides how a linear layer is stored and multiplied."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class PackedLinear(nn.Module):
    """A linear layer in the storage this CPU multiplies fastest; holds the only copy of its weight."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._weight = weight
        self._bias = bias

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)

    def unpack(self) -> Tensor:
        """Returns the weight as [out_features, in_features]."""
        return self._weight


def pack_linear(weight: Tensor, bias: Tensor | None = None, *, shared: bool = False) -> PackedLinear:
    """Packs weight [N, K]; `shared` keeps the tensor in place because something else (an embedding) reads it too."""
    return PackedLinear(weight, bias)
