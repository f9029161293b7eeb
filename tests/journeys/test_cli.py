"""The command line on a real, tiny checkpoint: prompts in, text and JSON out, with the exit codes promised."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from trimtab import LLM, SamplingParams
from trimtab.cli.main import run
from trimtab.testing.checkpoints import make_tiny_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), with_tokenizer=True)


def test_a_process_reads_stdin_prints_json_and_exits_one_when_a_prompt_failed(checkpoint):
    prompts = '{"prompt": "hello"}\n{"prompt_token_ids": [999999]}\n{"prompt_token_ids": [5, 6]}\n'
    command = [sys.executable, "-m", "trimtab", "generate", "-", "--model", str(checkpoint), "--json"]
    options = ["--max_tokens", "4", "--temperature", "0", "--enable-prefix-caching", "false", "--ignore-eos"]
    done = subprocess.run([*command, *options], input=prompts, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    hello, out_of_range, ids = map(json.loads, done.stdout.splitlines())
    assert [len(line["outputs"][0]["token_ids"]) for line in (hello, ids)] == [4, 4]
    assert "999999" in out_of_range["error"]
    assert "\r" not in done.stderr  # no progress bar into a pipe


def test_the_command_gives_the_tokens_of_the_python_door(checkpoint, capsys):
    argv = ["--max-tokens", "6", "--temperature", "0", "--json"]
    assert run(["generate", "--model", str(checkpoint), "--prompt", "hello", *argv]) == 0
    line = json.loads(capsys.readouterr().out)
    output = LLM(model=str(checkpoint)).generate("hello", SamplingParams(temperature=0, max_tokens=6))[0]
    assert line["outputs"][0]["token_ids"] == list(output.outputs[0].token_ids)
    assert line["outputs"][0]["text"] == output.outputs[0].text


def test_chat_answers_each_line_of_stdin(checkpoint, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n/reset\nthere\n/quit\n"))
    assert run(["chat", "--model", str(checkpoint), "--max-tokens", "3", "--temperature", "0"]) == 0
    assert "(forgotten)" in capsys.readouterr().out


def test_inspect_knows_the_model_without_reading_weights(checkpoint, capsys, monkeypatch):
    monkeypatch.setattr("trimtab.models.checkpoint.Checkpoint.read", None)  # would fail when called
    assert run(["inspect", str(checkpoint), "--json", "--data-parallel-size", "4"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["architecture"] == "MixtralForCausalLM"
    assert [layer["num_experts"] for layer in facts["moe"]] == [8, 8]
    assert facts["layout"]["num_slots_per_layer"] == 2
    stored = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
    assert facts["bytes_on_disk"] == stored
    assert 0 < facts["num_active_parameters"] < facts["num_parameters"] <= stored / 4

    assert run(["inspect", str(checkpoint)]) == 0
    shown = capsys.readouterr().out
    assert "2 of 2 (0-1): 8 experts, top-2" in shown
    assert facts["eplb"] == {"supported": True, "data_parallel_size": 4, "reason": ""}
    assert "--enable-eplb on 2 ranks: yes" in shown


def test_inspect_says_why_experts_cannot_be_balanced(capsys, tmp_path):
    from trimtab.testing.checkpoints import make_tiny_checkpoint

    checkpoint = make_tiny_checkpoint(tmp_path, num_local_experts=5)
    assert run(["inspect", str(checkpoint), "--json"]) == 0
    eplb = json.loads(capsys.readouterr().out)["eplb"]
    assert not eplb["supported"] and "5 experts" in eplb["reason"] and "2" in eplb["reason"]


def test_inspect_says_why_a_model_is_refused_and_exits_one(checkpoint, capsys, tmp_path):
    config = json.loads((checkpoint / "config.json").read_text())
    config |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((checkpoint / "model.safetensors").read_bytes())
    assert run(["inspect", str(tmp_path), "--json"]) == 1
    facts = json.loads(capsys.readouterr().out)
    assert facts["supported"] is False
    assert facts["architecture"] == "LlamaForCausalLM"
    assert "Llama" in facts["reason"]


def test_inspect_explains_the_kernels_of_this_machine_without_a_model(capsys):
    assert run(["inspect", "--kernels", "--json"]) == 0
    kernels = json.loads(capsys.readouterr().out)["kernels"]
    assert any(kernel["name"].startswith("linear") for kernel in kernels)
    assert all(kernel["chosen"] and kernel["reason"] for kernel in kernels)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "/nowhere"], "model (/nowhere) does not exist"),
        (["--model", "org/name"], "only local folders are read"),
    ],
)
def test_a_model_that_is_not_there_is_one_line_and_exit_code_two(options, message, capsys):
    assert run(["generate", "--prompt", "x", *options]) == 2
    assert message in capsys.readouterr().err


def test_bench_reports_rates_times_memory_and_the_machine(checkpoint, capsys):
    argv = ["--batch-sizes", "1,3", "--input-len", "6", "--output-len", "4", "--repetitions", "1", "--json"]
    assert run(["bench", "offline", "--model", str(checkpoint), *argv]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [result["batch_size"] for result in report["results"]] == [1, 3]
    assert [result["num_steps"] for result in report["results"]] == [3, 3]
    for result in report["results"]:
        assert result["prefill_tokens_per_s"] > 0
        assert result["decode_tokens_per_s"] > 0
        assert 0 < result["step_ms"]["p50"] <= result["step_ms"]["p99"]
    assert report["start_up_s"] > 0
    assert report["peak_memory_bytes"] > report["stats"]["memory_bytes"]["kv_cache"] > 0
    assert {"cpu", "cores", "threads", "torch", "date", "command"} <= set(report["machine"])


def test_the_demo_shows_answers_speed_and_experts(checkpoint, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("trimtab.cli.demo.MODEL", str(checkpoint))
    png = tmp_path / "out" / "experts.png"
    assert run(["demo", "--prompts-per-kind", "1", "--max-tokens", "4", "--png", str(png)]) == 0
    shown = capsys.readouterr().out
    assert "tokens per second" in shown
    assert "tokens routed, summed over layers: code" in shown
    assert all(kind in shown for kind in ("English", "German", "maths"))
    assert png.stat().st_size > 10_000
