"""The command as a whole: its front page, its exit codes, and that faults are one clear line."""

import io
import os
import signal
import subprocess
import sys

import pytest

import trimtab
from trimtab.cli import main as main_module
from trimtab.cli.main import COMMANDS, front_page, main, run


def fail_with(error):
    def command(*args, **kwargs):
        raise error

    return command


def exit_code(monkeypatch, *argv: str) -> int:
    monkeypatch.setattr("sys.argv", ["trimtab", *argv])
    with pytest.raises(SystemExit) as exit_info:
        main()
    return exit_info.value.code


def test_the_front_page_names_every_command_and_gives_examples(capsys):
    for argv in ([], ["--help"], ["-h"]):
        assert run(argv) == 0
        page = capsys.readouterr().out
        assert all(f"  {name} " in page for name in COMMANDS)
        assert "trimtab generate --prompt" in page
    assert "\033[" not in page  # no colours into a pipe
    assert "\033[1m" in front_page(colour=True)


def test_help_and_version_import_neither_torch_nor_the_parser():
    code = (
        "import sys\n"
        "from trimtab.cli.main import run\n"
        "assert run(['--help']) == 0 and run(['--version']) == 0\n"
        "heavy = {'torch', 'transformers', 'numpy', 'cyclopts', 'rich', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(trimtab.__version__ + "\n")


def test_help_of_every_command_imports_no_torch():
    code = (
        "import sys\n"
        "from trimtab.cli.main import COMMANDS, run\n"
        "assert all(run([name, '--help']) == 0 for name in COMMANDS)\n"
        "heavy = {'torch', 'transformers', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name, command in COMMANDS.items():
        assert command.examples[0] in done.stdout, f"{name} --help shows no example"


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["gnerate"], "error: gnerate is not a command; did you mean generate?"),
        (["generate", "--modl", "x"], "error: Unknown option: --modl. Did you mean --model?"),
        (["generate", "--n", "x"], 'unable to convert "x" into int'),
        (["generate", "--prompt", "x", "--temperature", "-1"], "error: temperature (-1.0) must be in [0.0, 100.0]"),
        (["generate", "--prompt", "x", "--max-num-seqs", "0"], "error: max_num_seqs (0) must be an integer in"),
        (["generate", "nowhere.txt"], "error: prompt file nowhere.txt cannot be read"),
        (["inspect"], "error: no model; give a checkpoint folder"),
        (["chat", "--n", "2"], "error: n (2) must be 1 in a chat"),
        (["bench", "offline", "--batch-sizes", "0"], "error: batch_sizes ('0')"),
    ],
)
def test_a_users_mistake_is_one_line_on_stderr_and_exit_code_two(monkeypatch, capsys, argv, line):
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert exit_code(monkeypatch, *argv) == 2
    printed = capsys.readouterr()
    assert line in printed.err
    assert printed.out == ""
    assert "Traceback" not in printed.err


def test_a_value_error_of_the_model_is_one_line_too(monkeypatch, capsys):
    monkeypatch.setattr("trimtab.cli.generate.open_llm", fail_with(ValueError("model (x) is not there")))
    assert exit_code(monkeypatch, "generate", "--prompt", "x") == 2
    assert capsys.readouterr().err == "error: model (x) is not there\n"


def test_our_own_faults_keep_their_traceback(monkeypatch):
    monkeypatch.setattr("trimtab.cli.generate.open_llm", fail_with(AssertionError("ours")))
    monkeypatch.setattr("sys.argv", ["trimtab", "generate", "--prompt", "x"])
    with pytest.raises(AssertionError, match="ours"):
        main()


def test_ctrl_c_ends_with_130_and_no_traceback(monkeypatch, capsys):
    monkeypatch.setattr(main_module, "run", fail_with(KeyboardInterrupt()))
    assert exit_code(monkeypatch, "generate") == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_real_sigint_ends_the_process_with_130():
    code = (
        "import sys, trimtab.cli.generate as g\n"
        "from trimtab.cli.main import main\n"
        "def wait(model, engine):\n"
        "    print('ready', flush=True)\n"
        "    sys.stdin.read()\n"
        "g.open_llm = wait\n"
        "sys.argv = ['trimtab', 'generate', '--prompt', 'x']\n"
        "main()\n"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        os.kill(process.pid, signal.SIGINT)
        # stdin stays open until the process is gone, so only the signal can have ended it
        assert process.wait(timeout=60) == 130
        assert process.stderr.read() == "interrupted\n"


def test_a_reader_that_leaves_ends_the_process_quietly():
    code = (
        "import sys, trimtab.cli.main as m\n"
        "def run(argv):\n"
        "    sys.stdin.read()\n"
        "    print('x' * 100_000, flush=True)\n"
        "m.run = run\n"
        "m.main()\n"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        process.stdout.close()
        process.stdin.close()
        assert process.wait(timeout=60) == 141
        assert process.stderr.read() == ""


@pytest.mark.parametrize(
    ("redirect", "code", "error"), [(">&- <&- 2>&-", 0, ""), (">/dev/full", 2, "error: [Errno 28]")]
)
def test_a_stdout_that_takes_nothing_is_no_traceback(redirect, code, error):
    program = "import trimtab.cli.main as m; m.run = lambda argv: print('x') or 0; m.main()"
    command = f'{sys.executable} -c "{program}" {redirect}'
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stderr[: len(error)]) == (code, error)
    assert "Traceback" not in done.stderr


def test_a_file_that_cannot_be_read_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(
        "trimtab.cli.generate.open_llm", fail_with(PermissionError(13, "Permission denied", "/m/config"))
    )
    assert exit_code(monkeypatch, "generate", "--prompt", "x") == 2
    assert capsys.readouterr().err == "error: [Errno 13] Permission denied: '/m/config'\n"
