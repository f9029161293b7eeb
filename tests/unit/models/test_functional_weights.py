"""A router's weight answers F.linear with packed rows, and is an ordinary tensor for all else."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from trimtab.kernels.linear import PackedLinear
from trimtab.models.functional_weights import FunctionalWeight, router_weights, wrap_router_weights


class Router(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 70, dtype=torch.float32).to(dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.randn(8).to(dtype), requires_grad=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_torchs_own_up_to_the_order_of_their_sums(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    router = Router(dtype)
    plain = router.weight.detach().clone()
    x = torch.randn(37, 70).to(dtype)
    wrap_router_weights(router, ["weight"])
    rtol = 1e-5 if dtype == torch.float32 else 2.0**-7
    torch.testing.assert_close(F.linear(x, router.weight), F.linear(x, plain), rtol=rtol, atol=1e-5)
    torch.testing.assert_close(
        F.linear(x, router.weight, router.bias),
        F.linear(x, plain, router.bias),
        rtol=rtol,
        atol=2e-2 if rtol > 1e-3 else 1e-5,
    )
    for cast in (lambda t: t.type(torch.float32), lambda t: t.float(), lambda t: t.to(torch.float32)):
        out = F.linear(cast(x), cast(router.weight))
        torch.testing.assert_close(out, F.linear(x.float(), plain.float()), rtol=1e-5, atol=1e-5)
        assert out.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_of_logits_is_bitwise_the_same_alone_and_in_any_batch(dtype: torch.dtype) -> None:
    """B109. Torch's own product fails this in float32 (the negative control)."""
    torch.manual_seed(2)
    router = Router(dtype)
    plain = router.weight.detach().clone()
    wrap_router_weights(router, ["weight"])
    x = torch.randn(100, 70).to(dtype)
    whole = F.linear(x, router.weight)
    assert all(torch.equal(F.linear(x[i : i + 1], router.weight)[0], whole[i]) for i in range(100))
    if dtype == torch.float32:
        theirs = F.linear(x, plain)
        assert not all(torch.equal(F.linear(x[i : i + 1], plain)[0], theirs[i]) for i in range(100))


def test_other_operations_see_an_ordinary_tensor() -> None:
    router = Router(torch.bfloat16)
    plain = router.weight.detach().clone()
    wrap_router_weights(router, ["weight"])
    assert torch.equal(router.weight * 2, plain * 2) and type(router.weight * 2) is torch.Tensor
    assert router.weight.shape == plain.shape and router.weight.dtype == plain.dtype
    assert torch.equal(router.weight.to(torch.float64), plain.double())
    assert torch.equal(router.weight.t(), plain.t())


def test_only_matrices_outside_linear_layers_and_embeddings_are_routers() -> None:
    network = nn.ModuleDict(
        {
            "embedding": nn.Embedding(4, 70),
            "linear": nn.Linear(70, 4),
            "norm": nn.LayerNorm(70),
            "router": Router(torch.float32),
        }
    )
    assert router_weights(network) == ["router.weight"]


def test_the_packed_layer_is_made_once_per_dtype() -> None:
    router = Router(torch.bfloat16)
    wrap_router_weights(router, ["weight"])
    weight = router.weight
    assert isinstance(weight, FunctionalWeight) and weight.packed == {}
    for _ in range(2):
        F.linear(torch.randn(2, 70).bfloat16(), weight)
        F.linear(torch.randn(2, 70), weight.float())
    assert set(weight.packed) == {torch.bfloat16, torch.float32}
    assert all(isinstance(layer, PackedLinear) for layer in weight.packed.values())
