"""Compiles the native core with the system's C++ compiler: `python -m trimtab.kernels.native.build`.

Standard library only, and importable by path: the packaging hook runs it before any dependency is installed.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCE_DIR = Path(__file__).resolve().parent / "csrc"
CORE_PATH = Path(__file__).resolve().parent / "_core.so"

_AVX512_FLAGS = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")
# Each instruction set has its own file and flags; what runs on every CPU is compiled without any.
SOURCE_FLAGS: dict[str, tuple[str, ...]] = {
    "api.cpp": (),
    "attention.cpp": (),
    "attention_avx2.cpp": ("-mavx2", "-mfma"),
    "attention_avx512.cpp": _AVX512_FLAGS,
    "checksum.cpp": ("-mavx2", "-mfma"),
    "combine.cpp": ("-mavx2", "-mfma"),
    "copy.cpp": ("-mavx2", "-mfma"),
    "dispatch.cpp": (),
    "exchange.cpp": (),
    "layers.cpp": (),
    "layout.cpp": (),
    "norm.cpp": (),
    "routing.cpp": (),
    "self_test.cpp": (),
    "kernels_avx2.cpp": ("-mavx2", "-mfma"),
    "kernels_avx512.cpp": _AVX512_FLAGS,
    "kernels_avx512_bf16.cpp": (*_AVX512_FLAGS, "-mavx512bf16"),
    "kernels_avx512_vnni.cpp": (*_AVX512_FLAGS, "-mavx512vnni"),
}
# No contraction and no fast-math: rounding must not depend on how a loop was compiled (row invariance).
_COMMON_FLAGS = (
    "-std=c++17",
    "-fPIC",
    "-fopenmp",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wall",
    "-Wextra",
)


class BuildError(RuntimeError):
    """The core cannot be built here; the message says why."""


def find_compiler() -> str | None:
    """The C++ compiler of `CXX`, else the system's, else None."""
    candidates = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    return next((found for name in candidates if (found := shutil.which(name))), None)


def build(
    target: Path = CORE_PATH,
    *,
    optimize: str = "-O3",
    extra_flags: Sequence[str] = (),
    source_flags: Mapping[str, Sequence[str]] = SOURCE_FLAGS,
) -> Path:
    """Builds the core at `target` and returns it; an existing file is replaced only by a complete one.

    Raises BuildError without an x86-64 machine, without a compiler, or when compilation fails.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        raise BuildError(f"the native kernels are written for x86-64, and this machine is {platform.machine()}")
    compiler = find_compiler()
    if compiler is None:
        raise BuildError("no C++ compiler (looked for CXX, c++, g++, clang++)")
    with tempfile.TemporaryDirectory(prefix="trimtab-build-") as scratch:

        def compile_source(name: str) -> str:
            out = str(Path(scratch) / f"{name}.o")
            flags = (*_COMMON_FLAGS, optimize, *source_flags[name], *extra_flags)
            _run([compiler, *flags, "-c", str(SOURCE_DIR / name), "-o", out])
            return out

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compile_source, source_flags))
        # In the target's folder, so that the final rename is atomic.
        partial = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            _run([compiler, "-shared", "-fopenmp", *extra_flags, *objects, "-o", str(partial)])
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
    return target


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise BuildError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Build trimtab's native core.")
    parser.add_argument("--output", type=Path, default=CORE_PATH, help="where the library goes")
    parser.add_argument("--optimize", default="-O3", help="optimisation flag")
    parser.add_argument("--flag", action="append", default=[], help="further compiler and linker flag (repeatable)")
    arguments = parser.parse_args()
    try:
        print(build(arguments.output, optimize=arguments.optimize, extra_flags=arguments.flag))
    except BuildError as error:
        print(f"native core not built: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
