"""From a rollout to a trainer: capture in the engine, a file of routes, replay in transformers' own network."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from eager_network import EagerNetwork
from safetensors.torch import load_file, save_file

from trimtab import LLM, SamplingParams
from trimtab.cli.main import run
from trimtab.replay import RoutesFile, record_routed_experts, replay_routed_experts, report_replay
from trimtab.testing.checkpoints import make_tiny_checkpoint

FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "qwen3_moe": {},
    "gpt_oss": {},
    "deepseek_v3": {},
    "olmoe": {},
    "qwen2_moe": {"num_hidden_layers": 3, "mlp_only_layers": [1], "layer_types": ["full_attention"] * 3},
    "glm4_moe": {},
    "granitemoe": {},
    "gemma4_text": {},
}
OPTIONS: dict[str, Any] = {
    "max_model_len": 48,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "block_size": 4,
    "kv_cache_memory_bytes": "2MiB",
    "num_threads": 1,
    "enable_return_routed_experts": True,
}
PROMPTS = [{"prompt_token_ids": list(range(3, 3 + length))} for length in (5, 13, 9)]


def roll_out(path: Path, file: Path, **sampling: Any) -> RoutesFile:
    params = SamplingParams(
        temperature=1.0, max_tokens=8, logprobs=0, seed=11, ignore_eos=True, detokenize=False, **sampling
    )
    with LLM(str(path), **OPTIONS) as llm:
        llm.save_routed_experts(file, llm.generate(PROMPTS, params, use_tqdm=False))
    return RoutesFile(file)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_rollout_replays_in_the_trainer_with_the_same_probabilities(tmp_path: Path, family: str) -> None:
    path = make_tiny_checkpoint(tmp_path / "model", family, seed=6, **FAMILIES[family])
    file = roll_out(path, tmp_path / "routes.safetensors")
    assert [routes.num_rows for routes in file] == [5 + 7, 13 + 7, 9 + 7]
    report = report_replay(EagerNetwork(path).network, file)
    assert report.without.num_tokens == 3 * 8
    assert report.with_replay.agreement == 1.0
    assert report.without.agreement > 0.99, "equal weights in float32 choose alike but for ties"
    assert abs(report.with_replay.kl_k1) < 1e-4 and report.with_replay.kl_k3 < 1e-6


def perturbed(path: Path, folder: Path) -> Path:
    """The checkpoint after some training: its routers moved."""
    folder.mkdir()
    (folder / "config.json").write_text((path / "config.json").read_text())
    state = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    moved = [name for name in state if name.endswith(("gate.weight", "router.weight"))]
    assert moved
    for name in moved:
        state[name] += 0.05 * torch.randn(state[name].shape, generator=generator)
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_the_command_reports_a_mismatch_without_replay_and_none_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_tiny_checkpoint(tmp_path / "model", "mixtral", with_tokenizer=True)
    file = tmp_path / "routes.safetensors"
    prompts = [part for text in ("hello there", "a rudder", "x") for part in ("--prompt", text)]
    options = ["--max-tokens", "12", "--seed", "3", "--ignore-eos", "--num-threads", "1"]
    written = ["--enable-return-routed-experts", "--return-routed-experts", str(file)]
    assert run(["generate", "--model", str(path), *prompts, *options, *written]) == 0
    assert f"routed experts: {file} (trimtab routes FILE shows them" in capsys.readouterr().err
    assert [routes.num_tokens for routes in RoutesFile(file)] == [11 + 12, 8 + 12, 1 + 12]
    assert all(len(routes.logprobs) == 12 for routes in RoutesFile(file))

    none = tmp_path / "none.safetensors"
    unanswerable = ["--prompt", "x" * 3000, "--max-model-len", "64", *options, *written[:2], str(none)]
    assert run(["generate", "--model", str(path), *unanswerable]) == 1
    assert "no prompt was answered" in capsys.readouterr().err and not none.exists()

    trainer = perturbed(path, tmp_path / "trained")
    assert run(["replay", str(trainer), str(file), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["with_replay"]["agreement"] == 1.0
    assert {layer["row_mismatch"] for layer in facts["with_replay"]["layers"]} == {0.0}
    assert 0.5 < facts["without_replay"]["agreement"] < 1.0
    assert facts["without_replay"]["kl_k3"] > 0 and facts["num_sampled_tokens"] == 36

    assert run(["replay", str(trainer), str(file)]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines()[1:])) <= 80
    agreeing = next(line for line in shown.splitlines() if line.startswith("experts that agree"))
    assert agreeing.split()[-1] == "100%" and agreeing.split()[-2] != "100%"

    other = make_tiny_checkpoint(tmp_path / "other", "qwen3_moe", num_experts=16)
    assert run(["replay", str(other), str(file)]) == 2
    assert (
        "routes of MixtralForCausalLM have 8 experts, layer 0 of Qwen3MoeForCausalLM has 16" in capsys.readouterr().err
    )


def test_a_padded_batch_of_rollouts_trains_one_step_with_gradients_everywhere(tmp_path: Path) -> None:
    """What a trainer does: a right-padded batch, masked loss, one step; the routes stay the rollout's."""
    path = make_tiny_checkpoint(tmp_path / "model", "qwen3_moe")
    file = roll_out(path, tmp_path / "routes.safetensors", routed_experts_prompt_start=2)
    batch = list(file)
    assert {routes.start for routes in batch} == {2}
    network = EagerNetwork(path).network.train().requires_grad_(True)
    length = max(routes.num_tokens for routes in batch)
    ids = torch.zeros(len(batch), length, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, routes in enumerate(batch):
        ids[row, : routes.num_tokens] = torch.from_numpy(routes.token_ids)
        mask[row, : routes.num_tokens] = 1
    with replay_routed_experts(network, batch), record_routed_experts(network) as recording:
        logits = network(input_ids=ids, attention_mask=mask, use_cache=False).logits
        targets = torch.where(mask[:, 1:].bool(), ids[:, 1:], -100)
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets.flatten()).backward()
    found = recording.experts.reshape(len(batch), length, *recording.experts.shape[1:])
    for row, routes in enumerate(batch):
        assert np.array_equal(found[row, 2 : 2 + routes.num_rows], routes.experts)
    for name, weight in network.named_parameters():
        if "gate.weight" in name or ".experts." in name:
            assert weight.grad is not None and float(weight.grad.abs().max()) > 0, name
