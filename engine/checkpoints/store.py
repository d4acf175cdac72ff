"""Resolve the model setting to a folder that an engine can load: converted once, downloaded once, or used as it is.

This module imports neither torch nor transformers, and nothing slow if the folder exists: the API process uses it too.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from blake3 import blake3

from engine.checkpoints.conversions import FORMAT, ModelError, converted, converted_gguf, known_gguf, make_room
from engine.checkpoints.hub import download, is_hub_id, snapshot
from engine.checkpoints.packaged import (
    HEADS,
    PACKAGED,
    WHISPER,
    installed_files,
    packaged_head,
    weights_file,
)
from engine.errors import EngineFailure

if TYPE_CHECKING:
    from engine.checkpoints.tensor_file import Progress


def resolve_model(model: str, cache_dir: Path, *, weights: bool = True) -> Path:
    """Return the folder with config.json, safetensors and tokenizer.json for a model setting.

    `model` is a name in PACKAGED, a folder, a GGUF file, or a Hugging Face id. Packaged models and GGUF files are
    converted once per `cache_dir`, by one of the processes that ask for it, while the others wait. `weights=False`
    accepts a folder without weights, for random ones. Raises ModelError.
    """
    cache_dir = cache_dir.expanduser()
    if model in PACKAGED:
        return _packaged(model, cache_dir)
    path = Path(model).expanduser()
    if path.is_dir():
        return _checked(path, weights)
    if path.is_file():
        return _from_gguf(path, cache_dir)
    if not is_hub_id(model) or path.suffix == ".gguf":
        raise ModelError(
            f"there is no folder or file {model}; name a model folder, a GGUF file, a Hugging Face id (owner/name) or "
            f"one of {', '.join(PACKAGED)}"
        )
    return downloaded(model, weights=weights) or _checked(download(model), weights)


def resolve_head(head: str) -> Path:
    """Return the folder of an EAGLE-3 head: a folder, a Hugging Face id, or a model in PACKAGED that has one. Raises
    ModelError."""
    if head in HEADS:
        return packaged_head(head)
    path = Path(head).expanduser()
    if path.is_dir():
        return path
    if not is_hub_id(head):
        raise ModelError(f"there is no folder {head}; name the folder or Hugging Face id of an EAGLE-3 head")
    return snapshot(head) or download(head)


def present_model(model: str, cache_dir: Path, *, weights: bool = True) -> Path | None:
    """Return what `resolve_model` would find without converting or downloading, or None. Raises ModelError."""
    cache_dir = cache_dir.expanduser()
    path = packaged_folder(model, cache_dir) if model in PACKAGED else Path(model).expanduser()
    if path.is_file():
        try:
            return known_gguf(path, cache_dir)
        except (EngineFailure, OSError) as error:
            raise ModelError(str(error)) from error
    return path if path.is_dir() else downloaded(model, weights=weights)


def downloaded(model: str, *, weights: bool = True) -> Path | None:
    """Return the folder of a model of the hub if the cache has all of it."""
    found = snapshot(model) if is_hub_id(model) else None
    return found if found is not None and _is_whole(found, weights) else None


def _checked(folder: Path, weights: bool) -> Path:
    missing = [name for name in ("config.json", "tokenizer.json") if not (folder / name).is_file()]
    if weights and not any(folder.glob("*.safetensors")):
        missing.insert(1 if "config.json" in missing else 0, "*.safetensors")
    if missing:
        binary = "*.safetensors" in missing and any(folder.glob("*.bin"))
        cure = (
            "PyTorch's .bin files can run code and are not read: convert them"
            if binary
            else f"name the file: MODEL={gguf[0]}"
            if (gguf := sorted(folder.glob("*.gguf")))
            else "name a folder in Hugging Face format"
        )
        raise ModelError(f"the model folder {folder} has no {', no '.join(missing)}; {cure}")
    return folder


def _is_whole(folder: Path, weights: bool) -> bool:
    """Return whether a folder of the cache has what is needed; after an interrupted download it has not."""
    try:
        _checked(folder, weights)
        index = folder / "model.safetensors.index.json"
        shards = json.loads(index.read_bytes())["weight_map"].values() if weights and index.is_file() else ()
        return all((folder / shard).is_file() for shard in shards)
    except (ModelError, ValueError, LookupError, TypeError, AttributeError):
        return False


def weight_bytes(folder: Path) -> int:
    """Return the size of a model's weights in its folder."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def packaged_folder(model: str, cache_dir: Path) -> Path:
    """Return where a packaged model is, or will be. Raises ModelError if its package is not installed and cannot be."""
    parts = [part for part in (PACKAGED[model].base, PACKAGED[model].third) if part]
    made_of = b"".join(packaged_folder(part, cache_dir).name.encode() for part in parts)
    return cache_dir / f"{model}-{_name(model, made_of)}"


def _name(model: str, made_of: bytes) -> str:
    """Return a digest of the weights, of what they are made on top of, and of the way in which they are converted."""
    digest = blake3(made_of + PACKAGED[model].sha256.encode())
    if PACKAGED[model].sampling:
        digest.update(repr(PACKAGED[model].sampling).encode())
    if not PACKAGED[model].sha256:
        for part in installed_files(model):
            digest.update_mmap(part)
    return digest.update(bytes([FORMAT])).hexdigest(6)


def _packaged(model: str, cache_dir: Path) -> Path:
    folder = packaged_folder(model, cache_dir)
    if folder.is_dir():
        return folder
    base, third = (
        _packaged(part, cache_dir) if part else None for part in (PACKAGED[model].base, PACKAGED[model].third)
    )

    def make(made: Path, progress: "Progress") -> None:
        from engine.checkpoints.ctranslate2 import convert_whisper  # noqa: PLC0415 - as below
        from engine.checkpoints.gguf.convert import convert  # noqa: PLC0415 - imports libraries only for converting
        from engine.checkpoints.gguf.file import GgufFile  # noqa: PLC0415
        from engine.checkpoints.merge import merge, unpack  # noqa: PLC0415

        with weights_file(model, cache_dir) as source:
            if PACKAGED[model].pipeline:
                unpack(source, made, progress)
                return
            if base is not None:
                merge(base, source, made, progress, third)
                return
            if model == WHISPER:
                convert_whisper(source, made, progress)
                return
            file = GgufFile(source)
            make_room(cache_dir, 2 * file.weights)
            file.metadata |= {f"general.sampling.{key}": value for key, value in PACKAGED[model].sampling}
            convert(file, made, progress)

    try:
        return converted(folder, model, make)
    except OSError as error:
        raise ModelError(
            f"cannot convert {model} into {cache_dir} ({error}); make room there or set CACHE_DIR"
        ) from error
    except (ValueError, LookupError, EngineFailure) as error:
        raise ModelError(f"cannot convert {model}: {error}; install it again: {PACKAGED[model].install}") from error


def _from_gguf(path: Path, cache_dir: Path) -> Path:
    try:
        return converted_gguf(path, cache_dir)
    except EngineFailure as error:
        raise ModelError(str(error)) from error
    except OSError as error:
        raise ModelError(
            f"cannot convert {path} into {cache_dir} ({error}); make room there or set CACHE_DIR"
        ) from error
