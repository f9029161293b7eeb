"""RMS norms in one native call: a transformers norm is eight small operations, and a step has dozens of them."""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn

from trimtab.kernels.native.library import SCALARS, NativeCore, native_kernels

logger = logging.getLogger(__name__)


class NativeRMSNorm(nn.Module):
    """weight * round(x / rms(x)), rounded again, as transformers' Llama-style norms compute it. x [..., C]."""

    def __init__(self, core: NativeCore, weight: Tensor, eps: float) -> None:
        super().__init__()
        self._core = core
        self.weight = nn.Parameter(weight.detach().contiguous(), requires_grad=False)
        self.variance_epsilon = eps
        self._scalar = SCALARS[weight.dtype]

    def forward(self, x: Tensor) -> Tensor:
        assert x.dtype == self.weight.dtype, f"norm of {self.weight.dtype} was given {x.dtype}"
        x = x.contiguous()
        out = torch.empty_like(x)
        columns = x.shape[-1]
        self._core.rms_norm(
            self._scalar,
            x.data_ptr(),
            self.weight.data_ptr(),
            out.data_ptr(),
            x.numel() // columns,
            columns,
            self.variance_epsilon,
            torch.get_num_threads(),
        )
        return out


def replace_norms(network: nn.Module, dtype: torch.dtype) -> int:
    """Replaces the norms that the native one computes alike, and returns their number.

    Families write their norms in many ways (1 + weight, weight before rounding, no weight). Names and attributes only
    suggest; what decides is that both give the same on random rows, with the weights as loaded. Norms kept in another
    type than the activations' `dtype` stay as they are.
    """
    core = native_kernels().core
    if core is None:
        return 0
    replaced = 0
    for name, module in list(network.named_modules()):
        native = _native_twin(core, module)
        if native is not None and native.weight.dtype == dtype and _alike(module, native):
            parent, _, child = name.rpartition(".")
            setattr(network.get_submodule(parent), child, native)
            replaced += 1
    logger.info("norms: %d are native", replaced)
    return replaced


def _native_twin(core: NativeCore, module: nn.Module) -> NativeRMSNorm | None:
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    weight = module._parameters.get("weight")
    if not type(module).__name__.endswith("RMSNorm") or not isinstance(eps, float) or weight is None:
        return None
    others: list[object] = [value for key, value in module._parameters.items() if key != "weight"]
    others += [*module._buffers.values(), *module.children()]
    if weight.ndim != 1 or weight.dtype not in SCALARS or weight.device.type != "cpu" or others:
        return None
    return NativeRMSNorm(core, weight, eps)


@torch.inference_mode()
def _alike(module: nn.Module, native: NativeRMSNorm) -> bool:
    """Large, usual and tiny rows (where eps shows) agree to the last place but one."""
    columns = native.weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(3, columns, generator=generator) * torch.tensor([[100.0], [1.0], [1e-3]])
    x = rows.to(native.weight.dtype)
    expected, found = module(x), native(x)
    if expected.dtype != found.dtype or expected.shape != found.shape:
        return False
    # Float32 sums of `columns` squares in another order differ by a few parts in 10^7; bfloat16 by one step (2^-7).
    rtol = 4e-6 if x.dtype == torch.float32 else 2.0**-7
    return torch.allclose(found.float(), expected.float(), rtol=rtol, atol=0)
