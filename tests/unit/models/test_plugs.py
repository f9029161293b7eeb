"""The two plug files by themselves: layouts of experts, recognised activations, windows and refused keywords."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers.masking_utils import causal_mask_function, chunked_causal_mask_function
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from trimtab.models.attention_plug import MaskTag, attention_forward, bind_attention, make_mask_tag
from trimtab.models.errors import UnsupportedModelError
from trimtab.models.experts_plug import read_activation, read_expert_shape, to_canonical
from trimtab.models.probe import _refuse_other_masks
from trimtab.testing.checkpoints import tiny_config


def oss_experts(limit: float = 7.0) -> GptOssExperts:
    config = tiny_config("gpt_oss", swiglu_limit=limit)
    torch.manual_seed(0)
    module = GptOssExperts(config)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module.requires_grad_(False)


def test_interleaved_transposed_biased_experts_become_canonical() -> None:
    """B94: one expert computed from its canonical tensors equals the module's own forward."""
    module = oss_experts()
    num_experts, shape = read_expert_shape(module)
    assert (num_experts, shape.has_bias, shape.activation.kind) == (8, True, "swiglu_clamped")
    assert (shape.activation.alpha, shape.activation.limit) == (1.702, 7.0)
    expert = to_canonical(module, {name: tensor[3] for name, tensor in module.named_parameters()})
    assert (expert.gate_up.shape, expert.down.shape) == ((64, 64), (64, 32))
    hidden = torch.randn(5, 64)
    ours = shape.activation.function(hidden @ expert.gate_up.T + expert.gate_up_bias) @ expert.down.T + expert.down_bias
    ids, weights = torch.full((5, 1), 3), torch.ones(5, 1)
    module.config._experts_implementation = "eager"
    torch.testing.assert_close(ours, module(hidden, ids, weights), atol=2e-3, rtol=1e-5)


def test_an_activation_nobody_knows_still_computes() -> None:
    module = SimpleNamespace(has_gate=True, is_concatenated=True, _apply_gate=lambda pre: pre.chunk(2, -1)[0].sin())
    activation = read_activation(module)
    assert activation.kind == "custom"
    pre = torch.randn(3, 8)
    torch.testing.assert_close(activation.function(pre), pre[:, :4].sin())


@pytest.mark.parametrize(
    ("act", "kind"),
    [(nn.SiLU(), "silu"), (nn.GELU(), "gelu"), (nn.GELU(approximate="tanh"), "gelu_tanh"), (nn.ReLU(), "relu")],
)
@pytest.mark.parametrize("has_gate", [True, False])
def test_known_activations_are_recognised_by_their_values(act: nn.Module, kind: str, has_gate: bool) -> None:
    def gate(pre: torch.Tensor) -> torch.Tensor:
        left, right = pre.chunk(2, dim=-1)
        return act(left) * right

    module = SimpleNamespace(has_gate=has_gate, is_concatenated=True, _apply_gate=gate, act_fn=act)
    assert read_activation(module).kind == kind


def test_a_clamp_that_is_tighter_than_silu_is_not_taken_for_silu() -> None:
    def clamped(pre: torch.Tensor) -> torch.Tensor:
        gate, up = pre.chunk(2, dim=-1)
        return nn.functional.silu(gate.clamp(max=10.0)) * up.clamp(-10.0, 10.0)

    module = SimpleNamespace(has_gate=True, is_concatenated=True, _apply_gate=clamped, limit=10.0)
    assert read_activation(module).kind == "custom"


def test_experts_with_a_norm_or_unknown_parameters_are_refused() -> None:
    module = oss_experts()
    module.has_post_expert_norm = True
    with pytest.raises(UnsupportedModelError, match="GptOssExperts normalises"):
        read_expert_shape(module)
    module.has_post_expert_norm = False
    module.scale = nn.Parameter(torch.ones(8))
    with pytest.raises(UnsupportedModelError, match="scale"):
        read_expert_shape(module)


class Recorder:
    def __init__(self) -> None:
        self.calls: list[dict] = []

    def __call__(self, query, key, value, **kwargs):
        self.calls.append(kwargs)
        return query[..., : value.shape[-1]]


def call(mask: MaskTag | None, **kwargs):
    module = nn.Module()
    recorder = Recorder()
    bind_attention(module, recorder)
    tensors = [torch.randn(1, heads, 3, 4) for heads in (2, 1, 1)]
    output, weights = attention_forward(module, *tensors, mask, **kwargs)
    assert output.shape == (1, 3, 2, 4) and weights is None
    torch.testing.assert_close(output[0], tensors[0][0].transpose(0, 1))
    return recorder.calls[0]


def test_the_window_is_the_tags_never_the_keyword() -> None:
    tag = MaskTag(window=8, custom=False, allowed=causal_mask_function)
    assert call(tag, sliding_window=None)["window"] == 8
    assert call(MaskTag(None, False, causal_mask_function), sliding_window=8)["window"] is None


def test_scaling_defaults_to_the_key_size_and_extras_arrive() -> None:
    tag = MaskTag(None, False, causal_mask_function)
    assert call(tag)["scaling"] == 0.5
    sinks = torch.zeros(2)
    seen = call(tag, scaling=0.25, s_aux=sinks, softcap=30.0, position_ids=torch.zeros(1, 3))
    assert seen["scaling"] == 0.25 and seen["sinks"] is sinks and seen["softcap"] == 30.0


def test_a_keyword_that_may_change_the_mathematics_is_refused() -> None:
    tag = MaskTag(None, False, causal_mask_function)
    with pytest.raises(UnsupportedModelError, match="'position_bias'"):
        call(tag, position_bias=torch.zeros(1))
    with pytest.raises(UnsupportedModelError, match="builds its own mask"):
        call(None)


def test_chunked_and_custom_masks_are_not_taken_for_windows() -> None:
    chunked = make_mask_tag(
        mask_function=chunked_causal_mask_function(8, torch.zeros(1, dtype=torch.int64)), local_size=8
    )
    with pytest.raises(UnsupportedModelError, match="neither causal nor a causal sliding window"):
        _refuse_other_masks("layer", chunked)
    with pytest.raises(UnsupportedModelError, match="mask of its own"):
        _refuse_other_masks("layer", make_mask_tag(mask_function=causal_mask_function, use_vmap=True))
    _refuse_other_masks("layer", make_mask_tag(mask_function=causal_mask_function))
