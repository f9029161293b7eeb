"""A linear layer over plain packed weights: bf16 or fp32 activations, fp32, bf16 or int8 weights."""

# R rows  K input features  N output features
from __future__ import annotations

import torch

from trimtab.kernels.native.library import SCALARS, Format, NativeCore, NativeKernels, check_status
from trimtab.kernels.native.moe import MAX_INT8_DEPTH, WEIGHT_DTYPES, address_of, contiguous_as


class NativeLinear:
    """One packed weight matrix; holds no other copy of it.

    weight [N, K] of the format's dtype; `scale` [N] fp32 for int8 only; `bias` [N] or None.
    """

    def __init__(
        self,
        kernels: NativeKernels,
        weight_format: Format,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        scale: torch.Tensor | None = None,
    ) -> None:
        assert kernels.core is not None and kernels.supports(weight_format), "ask supports() before packing"
        self.out_features, self.in_features = weight.shape
        if weight_format is Format.INT8 and self.in_features > MAX_INT8_DEPTH:
            raise ValueError(f"int8 weights deeper than {MAX_INT8_DEPTH} would overflow int32 sums; use bf16")
        self._core: NativeCore = kernels.core
        self.weight_format = weight_format
        self._level = int(kernels.levels[weight_format])
        self._geometry = (int(weight_format), self.out_features, self.in_features)
        self.packed = torch.empty(self._core.linear_bytes(*self._geometry), dtype=torch.uint8)
        self._core.advise_huge_pages(self.packed.data_ptr(), self.packed.nbytes)
        self.pack(weight, bias, scale)

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None = None, scale: torch.Tensor | None = None) -> None:
        """Writes values of the same shapes and types as the first ones over them, where they are."""
        assert weight.shape == (self.out_features, self.in_features), f"weight is {tuple(weight.shape)}"
        assert weight.dtype == WEIGHT_DTYPES[self.weight_format], f"weight is {weight.dtype}"
        assert (scale is not None) == (self.weight_format is Format.INT8), "int8 weights need a scale, others have none"
        held = (
            weight.contiguous(),
            contiguous_as(bias, torch.float32),
            contiguous_as(scale, torch.float32),
        )
        self._core.pack_linear(*self._geometry, *(address_of(t) for t in held), self.packed.data_ptr())

    def unpack(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """(weight, bias as fp32 with zeros for None, scale) as they were packed."""
        weight = torch.empty(self.out_features, self.in_features, dtype=WEIGHT_DTYPES[self.weight_format])
        bias = torch.empty(self.out_features, dtype=torch.float32)
        scale = torch.empty(self.out_features, dtype=torch.float32) if self.weight_format is Format.INT8 else None
        self._core.unpack_linear(
            *self._geometry, weight.data_ptr(), bias.data_ptr(), address_of(scale), self.packed.data_ptr()
        )
        return weight, bias, scale

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., K] fp32 or bf16 -> [..., N] in x's dtype; a row is bitwise the same in any batch."""
        assert x.shape[-1] == self.in_features, f"input has {x.shape[-1]} features, expected {self.in_features}"
        x = x.contiguous()
        out = x.new_empty(*x.shape[:-1], self.out_features)
        scalar = SCALARS[x.dtype]
        check_status(
            self._core.linear(
                self._level,
                *self._geometry,
                self.packed.data_ptr(),
                x.data_ptr(),
                scalar,
                out.data_ptr(),
                scalar,
                x.numel() // self.in_features,
                torch.get_num_threads(),
            )
        )
        return out
