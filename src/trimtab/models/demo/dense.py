"""The dense source model read from its GGUF file: float32 tensors under Hugging Face names, tokenizer, chat template.

transformers can read GGUF too, but needs `accelerate` for it and drops the tokenizer's digit splitting when saving it.
"""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CONTROL_TOKEN_TYPE = 3  # llama.cpp's LLAMA_TOKEN_TYPE_CONTROL

_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True)
class DenseShape:
    """The sizes a Llama-style model is described by."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    max_position: int
    rope_theta: float
    norm_epsilon: float


class DenseModel:
    """A Llama-architecture GGUF file. Tensors are dequantized when asked for, so that few are in memory at once."""

    def __init__(self, path: Path) -> None:
        self._reader = gguf.GGUFReader(path)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        architecture = self._field("general.architecture")
        assert architecture == "llama", f"{path} holds a {architecture!r} model; the demo recipe reads llama"
        assert "output.weight" not in self._tensors, f"{path} has an output layer of its own; the demo ties it"

    def _field(self, name: str) -> Any:
        field = self._reader.get_field(name)
        assert field is not None, f"the GGUF file has no field {name}"
        return field.contents()

    @cached_property
    def shape(self) -> DenseShape:
        return DenseShape(
            num_layers=self._field("llama.block_count"),
            hidden_size=self._field("llama.embedding_length"),
            intermediate_size=self._field("llama.feed_forward_length"),
            num_heads=self._field("llama.attention.head_count"),
            num_kv_heads=self._field("llama.attention.head_count_kv"),
            vocab_size=len(self._field("tokenizer.ggml.tokens")),
            max_position=self._field("llama.context_length"),
            rope_theta=self._field("llama.rope.freq_base"),
            norm_epsilon=float(f"{self._field('llama.attention.layer_norm_rms_epsilon'):.6g}"),  # a float32 in the file
        )

    def _tensor(self, name: str) -> torch.Tensor:
        tensor = self._tensors[name]
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        return torch.from_numpy(np.array(values, dtype=np.float32))  # a copy: the file's own pages are read-only

    def outer_tensors(self) -> dict[str, torch.Tensor]:
        """Embedding and final norm, float32, under Hugging Face names; the output layer is tied to the embedding."""
        return {
            "model.embed_tokens.weight": self._tensor("token_embd.weight"),
            "model.norm.weight": self._tensor("output_norm.weight"),
        }

    def layer_tensors(self, layer_id: int) -> dict[str, torch.Tensor]:
        """One layer's tensors, float32, under Hugging Face names without the `model.layers.N.` in front."""
        tensors = {}
        for ours, theirs in _LAYER_TENSORS.items():
            weight = self._tensor(f"blk.{layer_id}.{ours}.weight")
            if ours == "attn_q":
                weight = _halves_from_pairs(weight, self.shape.num_heads)
            elif ours == "attn_k":
                weight = _halves_from_pairs(weight, self.shape.num_kv_heads)
            tensors[f"{theirs}.weight"] = weight
        return tensors

    @cached_property
    def chat_template(self) -> str:
        return self._field("tokenizer.chat_template")

    @cached_property
    def special_token_ids(self) -> dict[str, int]:
        names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
        return {ours: self._field(f"tokenizer.ggml.{theirs}_token_id") for ours, theirs in names.items()}

    @cached_property
    def tokens(self) -> list[str]:
        return self._field("tokenizer.ggml.tokens")

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Byte-level BPE in which every digit stands alone (llama.cpp calls this pre-tokenizer `smollm`)."""
        kind = (self._field("tokenizer.ggml.model"), self._field("tokenizer.ggml.pre"))
        assert kind == ("gpt2", "smollm"), f"the demo recipe builds smollm's byte-level tokenizer, not {kind}"
        merges = [tuple(merge.split(" ")) for merge in self._field("tokenizer.ggml.merges")]
        vocabulary = {token: token_id for token_id, token in enumerate(self.tokens)}
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        tokenizer.decoder = decoders.ByteLevel()
        kinds = zip(self.tokens, self._field("tokenizer.ggml.token_type"), strict=True)
        control_tokens = [token for token, kind_id in kinds if kind_id == CONTROL_TOKEN_TYPE]
        tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control_tokens])
        return tokenizer

    def save_tokenizer(self, folder: Path) -> None:
        """Write the files that `AutoTokenizer.from_pretrained(folder)` reads, chat template included."""
        self.tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "chat_template.jinja").write_text(self.chat_template, encoding="utf-8")
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": self.shape.max_position,
            "clean_up_tokenization_spaces": False,
        }
        config |= {f"{name}_token": self.tokens[token_id] for name, token_id in self.special_token_ids.items()}
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _halves_from_pairs(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of a query or key projection from llama.cpp's order into Hugging Face's.

    llama.cpp rotates neighbours (0,1), (2,3), ...; Hugging Face rotates row i with row i + head_size / 2, so within
    each head the even rows come first and then the odd ones.
    """
    return weight.unflatten(0, (num_heads, -1, 2)).transpose(1, 2).reshape(weight.shape)
