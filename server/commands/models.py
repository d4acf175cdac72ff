"""`trellis models`: models that need no download, what is in the caches, and how large it is."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from engine.checkpoints.store import BUILTIN, PACKAGED, ModelError, hub_folder, packaged_files, present_model
from engine.kit.logs import size_text
from server.settings import DEFAULT_MODEL, read_settings


class Listed(NamedTuple):
    """One line of the list."""

    name: str
    size: int
    """In bytes; 0 if there is nothing here yet."""
    where: str


def main(arguments: Sequence[str]) -> int:
    """Print the models; the settings CACHE_DIR and HF_HOME say where to look. Raises SettingsError."""
    rows = list(models(read_settings(arguments).cache_dir.expanduser()))
    width = max(len(row.name) for row in rows) + 2
    sys.stdout.write(f"{'MODEL':<{width}}{'SIZE':>9}  WHERE\n")
    for row in rows:
        sys.stdout.write(f"{row.name:<{width}}{size_text(row.size) if row.size else '-':>9}  {row.where}\n")
    sys.stdout.write("\nServe one with: trellis serve MODEL. Folders and other Hugging Face ids work as well.\n")
    return 0


def models(cache_dir: Path) -> Iterator[Listed]:
    """Yield the packaged models, then those of the Hugging Face hub that are in its cache."""
    for name in PACKAGED:
        mark = " (default)" if name == DEFAULT_MODEL else ""
        try:
            parts, folder = packaged_files(name), present_model(name, cache_dir)
        except ModelError:  # smolvision also needs the default model's
            missing = next(each for each in (name, BUILTIN) if not installed(each))
            yield Listed(name, 0, f"{PACKAGED[missing].install}{mark}")
            continue
        if folder is not None:
            yield Listed(name, _bytes(folder), f"converted in {folder}{mark}")
        else:
            size = sum(part.stat().st_size for part in parts)
            yield Listed(name, size, f"installed, converted at the first start{mark}")
    for folder in sorted(hub_folder().glob("models--*")):
        if any(folder.glob("snapshots/*/config.json")):
            yield Listed(folder.name.removeprefix("models--").replace("--", "/"), _bytes(folder / "blobs"), str(folder))


def installed(name: str) -> bool:
    """Return whether the weights of a packaged model are installed."""
    try:
        return bool(packaged_files(name))
    except ModelError:
        return False


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
