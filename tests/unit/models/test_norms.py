"""Norms become native only where transformers' own and ours agree."""

import pytest
import torch
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.mixtral.modeling_mixtral import MixtralRMSNorm

from trimtab.kernels.native.library import native_kernels
from trimtab.models.norms import NativeRMSNorm, replace_norms

pytestmark = pytest.mark.skipif(native_kernels().core is None, reason="the native core is not built")


def network(norm: nn.Module, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(1 + 0.2 * torch.randn_like(parameter))
    return nn.ModuleDict({"norm": norm.to(dtype)})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [1, 15, 64, 100])
def test_a_llama_style_norm_is_replaced_and_gives_the_same(columns: int, dtype: torch.dtype) -> None:
    owner = network(MixtralRMSNorm(columns, eps=1e-5), dtype)
    original = owner["norm"]
    assert replace_norms(owner, dtype) == 1 and isinstance(owner["norm"], NativeRMSNorm)
    x = torch.randn(2, 37, columns).to(dtype) * 3
    rtol = 4e-6 if dtype == torch.float32 else 2.0**-7  # one step of the type: the sum runs in another order
    torch.testing.assert_close(owner["norm"](x), original(x), rtol=rtol, atol=0)
    transposed = x.transpose(0, 1)
    torch.testing.assert_close(owner["norm"](transposed), original(transposed), rtol=rtol, atol=0)


def test_a_norm_that_scales_by_one_plus_its_weight_is_left_alone() -> None:
    owner = network(Gemma2RMSNorm(64), torch.float32)
    assert replace_norms(owner, torch.float32) == 0 and isinstance(owner["norm"], Gemma2RMSNorm)


def test_a_norm_with_something_of_its_own_beside_the_weight_is_left_alone() -> None:
    norm = MixtralRMSNorm(64)
    norm.bias = nn.Parameter(torch.zeros(64))  # unused by its forward: attributes only suggest, so we keep away
    assert replace_norms(network(norm, torch.float32), torch.float32) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_bitwise_the_same_alone_and_in_a_batch(dtype: torch.dtype) -> None:
    owner = network(MixtralRMSNorm(70), dtype)
    replace_norms(owner, dtype)
    rows = torch.randn(1200, 70).to(dtype)  # enough for two threads
    together = owner["norm"](rows)
    assert all(torch.equal(owner["norm"](rows[i : i + 1])[0], together[i]) for i in (0, 1, 599, 600, 1199))


def test_a_norm_kept_in_float32_beside_half_precision_activations_is_left_alone() -> None:
    assert replace_norms(network(MixtralRMSNorm(64), torch.float32), torch.bfloat16) == 0
