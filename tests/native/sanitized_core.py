"""A pytest plugin of scripts/sanitize_native.sh: whoever asks for the native core gets the sanitized build."""

from __future__ import annotations

import os
from pathlib import Path

from trimtab.kernels.native import library

library.CORE_PATH = Path(os.environ["TRIMTAB_TEST_CORE"])
assert library.native_kernels().core is not None, f"{library.CORE_PATH} does not load"
