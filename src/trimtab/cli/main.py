"""The `trimtab` command: finds the subcommand, and turns faults into one clear line and an exit code."""

from __future__ import annotations

import difflib
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import trimtab

if TYPE_CHECKING:
    from cyclopts import App

EXIT_USER_ERROR = 2
EXIT_WORKER_FAILED = 3
EXIT_INTERRUPTED = 130  # 128 + SIGINT
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE
EXIT_TERMINATED = 143  # 128 + SIGTERM


class Command(NamedTuple):
    """`home` ("module:function") is imported only when the command runs: the front page needs none of them."""

    home: str
    text: str
    examples: tuple[str, ...]


COMMANDS = {
    "demo": Command(
        "trimtab.cli.demo:demo",
        "Build the small demo model, generate, and show which experts worked",
        ("trimtab demo", "trimtab demo --max-tokens 96 --layers"),
    ),
    "generate": Command(
        "trimtab.cli.generate:generate",
        "Complete prompts from arguments, a file or stdin",
        (
            'trimtab generate --prompt "The capital of France is" --temperature 0',
            'trimtab generate --chat --prompt "A haiku about rudders" --n 3 --seed 7',
            "trimtab generate --model PATH prompts.txt --json > answers.jsonl",
            "cat prompts.txt | trimtab generate - --max-tokens 64",
        ),
    ),
    "chat": Command(
        "trimtab.cli.chat:chat",
        "Talk with a model; the answer streams",
        (
            "trimtab chat",
            'trimtab chat --model PATH --system "You answer in one sentence."',
            'echo "What is the capital of France?" | trimtab chat --temperature 0',
        ),
    ),
    "routes": Command(
        "trimtab.cli.routes:routes",
        "Draw which experts every token used, and how evenly",
        (
            "trimtab routes routes.safetensors",
            "trimtab routes routes.safetensors --completion 3 --start 128 --output experts.png",
        ),
    ),
    "replay": Command(
        "trimtab.cli.replay:replay",
        "Compare a trainer's routing with a rollout's, without and with replay",
        (
            "trimtab replay demo routes.safetensors",
            "trimtab replay PATH routes.safetensors --dtype bfloat16 --json",
        ),
    ),
    "inspect": Command(
        "trimtab.cli.inspect:inspect",
        "Say what a checkpoint is, what it needs, and whether it runs",
        (
            "trimtab inspect PATH",
            "trimtab inspect PATH --data-parallel-size 4 --num-redundant-experts 8",
            "trimtab inspect --kernels",
        ),
    ),
    "doctor": Command(
        "trimtab.cli.doctor:doctor",
        "Check that a model's experts can be balanced, and that it works",
        ("trimtab doctor", "trimtab doctor --model PATH --quantization int8", "trimtab doctor --json"),
    ),
    "bench": Command(
        "trimtab.cli.bench:app",
        "Measure speed, start-up time and memory",
        (
            "trimtab bench offline --model PATH",
            "trimtab bench offline --model PATH --batch-sizes 1,32 --input-len 128 --json",
            "trimtab bench eplb --model demo --plot eplb.png",
        ),
    ),
    "sweep": Command(
        "trimtab.cli.sweep:sweep",
        "Try every architecture of the installed transformers, write the table",
        ("trimtab sweep", "trimtab sweep --markdown docs/supported-models.md"),
    ),
}

FRONT_EXAMPLES = (
    "trimtab demo",
    'trimtab generate --prompt "What is the capital of France?" --chat --temperature 0',
    "trimtab chat --model PATH",
    "trimtab inspect PATH",
)


def front_page(colour: bool) -> str:
    """What `trimtab` alone says. Written by hand: the parser and its help take a third of a second to import."""
    bold, dim, end = ("\033[1m", "\033[2m", "\033[0m") if colour else ("", "", "")
    lines = [f"{bold}trimtab{end} serves Mixture-of-Experts language models.", "", f"{bold}Commands{end}"]
    lines += [f"  {bold}{name:<10}{end}{text}" for name, (_, text, _) in COMMANDS.items()]
    lines += ["", f"{bold}Examples{end}", *(f"  {example}" for example in FRONT_EXAMPLES), ""]
    lines += [f"{dim}trimtab COMMAND --help explains a command; trimtab --version prints the version.{end}"]
    return "\n".join(lines)


def make_app(command: str) -> App:
    """The parser with the one command that was asked for: the others need not be imported."""
    from cyclopts import App, Parameter

    app = App(
        name="trimtab",
        version=trimtab.__version__,
        help_format="rich",
        default_parameter=Parameter(negative_iterable=()),
        suppress_keyboard_interrupt=False,  # main() ends it
        exit_on_error=False,
        print_error=False,
        result_action="return_value",
    )
    home, _, examples = COMMANDS[command]
    app.help_epilogue = "\n".join(["[bold]Examples[/bold]", *(f"  {example}" for example in examples)])
    app.command(home, name=command)
    return app


def run(argv: Sequence[str]) -> int:
    """Runs one command and returns its exit code. Faults other than a user's mistake are raised."""
    if not argv or list(argv) in (["--help"], ["-h"], ["help"]):
        colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        print(front_page(colour))
        return 0
    if list(argv) in (["--version"], ["-V"]):
        print(trimtab.__version__)
        return 0

    if argv[0] not in COMMANDS:
        near = difflib.get_close_matches(argv[0], COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(COMMANDS)}"
        print(f"error: {argv[0]} is not a command; {hint}", file=sys.stderr)
        return EXIT_USER_ERROR

    from cyclopts import CycloptsError

    from trimtab.cli.argv import normalise_argv
    from trimtab.engine.executor.collector import WorkerFailedError

    try:
        result = make_app(argv[0])(normalise_argv(argv))
    except CycloptsError as error:
        print(f"error: {error}\n  trimtab {argv[0]} --help explains", file=sys.stderr)
        return EXIT_USER_ERROR
    except BrokenPipeError:
        raise  # main() ends quietly
    except WorkerFailedError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_WORKER_FAILED
    except (ValueError, OSError) as error:  # OSError: a folder that cannot be read, a disk that is full
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    return result if isinstance(result, int) else 0


def _open_what_is_closed() -> None:
    """A stream that was closed before the start (as by `>&-`) is None; from here on it is one that holds nothing."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115


def _on_terminate(number: int, frame: FrameType | None) -> NoReturn:
    """SIGTERM as an orderly end: worker processes and folders are cleared away by what runs at exit."""
    sys.exit(EXIT_TERMINATED)


def main() -> NoReturn:
    """Entry point. Exit codes: 0 done, 1 some prompts failed, 2 a mistake in what was asked, 3 a worker did not start,
    130 interrupted, 143 terminated."""
    _open_what_is_closed()
    signal.signal(signal.SIGTERM, _on_terminate)
    try:
        code = run(sys.argv[1:])
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output left. Python would complain again when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = EXIT_BROKEN_PIPE
    except OSError as error:  # the last of the output did not fit on the disk
        print(f"error: {error}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = EXIT_USER_ERROR
    sys.exit(code)


if __name__ == "__main__":
    main()
