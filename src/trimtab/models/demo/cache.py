"""The demo model on disk: built once per set of parameters, complete or not there at all.

Life of a cache entry:
1. `ensure_demo` looks for the entry; a complete one is used at once, without a lock.
2. Otherwise it takes the cache folder's lock, so one process builds at a time, and looks again.
3. It builds into a hidden folder beside the entry, writes the manifest last, and renames the folder into place.
4. A failed or interrupted build removes its folder; one that was killed outright is swept by the next builder.
"""

import fcntl
import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from trimtab.models.demo import source
from trimtab.models.demo.domains import calibration_texts
from trimtab.observability.progress import Progress, progress_bar

RECIPE_VERSION = 1  # raise it when the same parameters give other bytes

# Enough that no two experts are equal, so that routing matters to every bit of the output; little enough that the text
# stays the dense model's: half of Q4_1's own rounding error (8 % of the weights' spread), and the calibration texts'
# loss rises by 0.03 nats per token at most.
DEFAULT_NOISE = 0.04

DTYPES = ("bfloat16", "float16", "float32")
MAX_EXPERTS = 256
MANIFEST = "manifest.json"
_BUILDING = ".building-"


def ensure_demo(
    num_experts: int = 8,
    noise: float = DEFAULT_NOISE,
    progress: Progress | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    dtype: str = "bfloat16",
) -> Path:
    """The folder of the demo checkpoint, built on first use (half a minute, 1.4 GB with 8 experts).

    `noise` is each expert's own gaussian noise relative to the standard deviation of the weights; take 0.5 where
    a swapped expert must show in the text. `progress(stage, done, total)` replaces the bar that is shown on a terminal.
    `cache_dir` defaults to `$XDG_CACHE_HOME/trimtab/demo`, or `~/.cache/trimtab/demo`.

    Raises ValueError for parameters out of bounds, and DemoSourceError when the dense weights cannot be had.
    """
    _check_parameters(num_experts, noise, dtype)
    cache = Path(cache_dir) if cache_dir is not None else _default_cache()
    entry = cache / _entry_name(num_experts, noise, dtype)
    if is_complete(entry):
        return entry
    cache.mkdir(parents=True, exist_ok=True)
    bar = progress_bar("demo model") if progress is None else nullcontext(progress)
    with bar as report, _only_builder(cache, report):
        if not is_complete(entry):  # another process may have built it meanwhile
            _sweep(cache, entry)
            _build(entry, num_experts, noise, dtype, report)
    return entry


def is_complete(entry: Path) -> bool:
    """True if every file of the entry's manifest is there in its full size."""
    try:
        sizes = json.loads((entry / MANIFEST).read_text(encoding="utf-8"))["file_bytes"]
        return all((entry / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _check_parameters(num_experts: int, noise: float, dtype: str) -> None:
    if not 2 <= num_experts <= MAX_EXPERTS:
        raise ValueError(f"num_experts ({num_experts}) must be from 2 (top-2 routing) to {MAX_EXPERTS}; try 8")
    if not (math.isfinite(noise) and noise >= 0):
        raise ValueError(f"noise ({noise}) must be a finite number of at least 0; try {DEFAULT_NOISE}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype ({dtype!r}) must be one of {', '.join(DTYPES)}")


def _default_cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification: a relative path there is to be ignored.
    base = Path(home) if os.path.isabs(home) else Path.home() / ".cache"
    return base / "trimtab" / "demo"


def _entry_name(num_experts: int, noise: float, dtype: str) -> str:
    recipe = json.dumps([RECIPE_VERSION, source.SOURCE_SHA256, calibration_texts()]).encode()
    digest = hashlib.sha256(recipe).hexdigest()[:10]
    return f"smollm2-{num_experts}x-noise{float(noise)!r}-{dtype}-{digest}"


@contextmanager
def _only_builder(cache: Path, report: Progress) -> Iterator[None]:
    """Hold the cache folder's lock; the kernel frees it when a builder dies."""
    descriptor = os.open(cache, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("waiting for another process that builds it", 0, 1)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _sweep(cache: Path, entry: Path) -> None:
    """Remove what a killed builder left, and the entry itself if it is damaged. Called under the lock."""
    for left_over in [*cache.glob(f"{_BUILDING}*"), entry]:
        if left_over.exists():
            shutil.rmtree(left_over)


def _build(entry: Path, num_experts: int, noise: float, dtype: str, report: Progress) -> None:
    # Here, not above: torch and transformers take seconds to import, and a cached demo needs neither.
    import torch

    from trimtab.models.demo.dense import DenseModel
    from trimtab.models.demo.upcycle import checkpoint_bytes, write_upcycled

    torch_dtype = getattr(torch, dtype)
    report("fetching the dense model", 0, 1)
    with source.dense_weights() as weights:
        dense = DenseModel(weights)
        needed = checkpoint_bytes(dense.shape, num_experts, torch_dtype.itemsize)
        _check_disk(entry.parent, needed, num_experts)
        folder = Path(tempfile.mkdtemp(prefix=_BUILDING, dir=entry.parent))
        try:
            write_upcycled(dense, folder, num_experts=num_experts, noise=noise, dtype=torch_dtype, progress=report)
            _write_manifest(folder, num_experts, noise, dtype)
            _open_to_readers(folder)
            folder.rename(entry)
        except BaseException:  # Ctrl-C too
            shutil.rmtree(folder, ignore_errors=True)
            raise


def _open_to_readers(folder: Path) -> None:
    """Undo the owner-only modes of mkdtemp and safetensors, which would shut others out of a shared cache."""
    folder.chmod(0o755)
    for path in folder.iterdir():
        path.chmod(0o644)


def _check_disk(cache: Path, needed: int, num_experts: int) -> None:
    free = shutil.disk_usage(cache).free
    if free < needed * 1.02:
        raise ValueError(
            f"the demo model with num_experts={num_experts} takes {needed / 1e9:.2f} GB, but {cache} has "
            f"{free / 1e9:.2f} GB free; make room, or point XDG_CACHE_HOME to a larger disk"
        )


def _write_manifest(folder: Path, num_experts: int, noise: float, dtype: str) -> None:
    manifest = {
        "recipe_version": RECIPE_VERSION,
        "source": f"{source.SOURCE_FILE} of {source.SOURCE_REQUIREMENT}",
        "source_sha256": source.SOURCE_SHA256,
        "num_experts": num_experts,
        "noise": noise,
        "dtype": dtype,
        "file_bytes": {path.name: path.stat().st_size for path in sorted(folder.iterdir())},
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
