"""`trellis models`: models that need no download, what is in the caches, and how large it is."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from engine.checkpoints.conversions import conversions
from engine.checkpoints.hub import hub_folder
from engine.checkpoints.packaged import PACKAGED, installed_files
from engine.checkpoints.store import packaged_folder
from engine.kit.logs import size_text
from server.settings import DEFAULT_MODEL, read_settings


class Listed(NamedTuple):
    """One line of the list."""

    name: str
    size: int
    """Size in bytes; 0 if there is nothing here yet."""
    where: str


def main(arguments: Sequence[str]) -> int:
    """Print the models; the settings CACHE_DIR and HF_HOME say where to look. Raises SettingsError."""
    rows = list(models(read_settings(arguments).cache_dir.expanduser()))
    width = max(len(row.name) for row in rows) + 2
    sys.stdout.write(f"{'MODEL':<{width}}{'SIZE':>9}  WHERE\n")
    for row in rows:
        sys.stdout.write(f"{row.name:<{width}}{size_text(row.size) if row.size else '-':>9}  {row.where}\n")
    sys.stdout.write(
        "\nServe one with: trellis serve MODEL. Folders, GGUF files and other Hugging Face ids work as well.\n"
    )
    return 0


def models(cache_dir: Path) -> Iterator[Listed]:
    """Yield the built-in models, converted GGUF files, and the models of the Hugging Face hub that are in its cache."""
    for name, packaged in PACKAGED.items():
        mark = " (default)" if name == DEFAULT_MODEL else ""
        folder, parts = packaged_folder(name, cache_dir), installed_files(name)
        if folder.is_dir():
            yield Listed(name, _bytes(folder), f"converted in {folder}{mark}")
        elif parts:
            size = sum(part.stat().st_size for part in parts)
            yield Listed(name, size, f"installed, converted at the first start{mark}")
        else:
            yield Listed(name, 0, f"downloaded at the first start{mark}: {packaged.about}")
    for each in conversions(cache_dir):
        yield Listed(str(each.source), _bytes(each.folder), f"converted in {each.folder}")
    for folder in sorted(hub_folder().glob("models--*")):
        if any(folder.glob("snapshots/*/config.json")):
            yield Listed(folder.name.removeprefix("models--").replace("--", "/"), _bytes(folder / "blobs"), str(folder))


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
