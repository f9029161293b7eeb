"""Packaging hook: compiles the native core into the wheel where a C++ compiler is present.

Without one the build prints a line and makes a pure wheel; trimtab then serves with its portable kernels.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import platform_tags

NATIVE_DIR = Path("src/trimtab/kernels/native")


class NativeCoreHook(BuildHookInterface):
    """Runs for wheels, editable ones too: those find the core in the source tree."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        builder = self._load_builder()
        try:
            core = builder.build()
        except builder.BuildError as error:
            # An old core must not ride along in a wheel that is called pure.
            builder.CORE_PATH.unlink(missing_ok=True)
            print(f"trimtab: native kernels not built, portable ones will serve: {error}")
            return
        build_data["pure_python"] = False
        # Loaded by ctypes: tied to the platform, not to a Python version.
        build_data["tag"] = f"py3-none-{next(platform_tags())}"
        build_data["artifacts"].append(str(NATIVE_DIR / core.name))

    def _load_builder(self) -> ModuleType:
        """The builder by path: the package itself cannot be imported before its dependencies are there."""
        path = Path(self.root) / NATIVE_DIR / "build.py"
        spec = importlib.util.spec_from_file_location("trimtab_native_build", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
