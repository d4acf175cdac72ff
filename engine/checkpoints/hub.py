"""Models of the Hugging Face hub, in the cache of its library."""

import fcntl
import hashlib
import logging
import os
import re
from pathlib import Path

from engine.checkpoints.conversions import ModelError
from engine.checkpoints.packaged import PACKAGED

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
_SHA256 = re.compile("[0-9a-f]{64}")

log = logging.getLogger(__name__)


def is_hub_id(model: str) -> bool:
    """Return whether the name can be an id of the Hugging Face hub."""
    return _HUB_ID.fullmatch(model) is not None


def hub_folder() -> Path:
    """Return the folder in which the Hugging Face hub's library keeps models."""
    from huggingface_hub.constants import HF_HUB_CACHE  # noqa: PLC0415 - slow to import

    return Path(HF_HUB_CACHE)


def snapshot(model: str) -> Path | None:
    """Return the folder of the model version that was downloaded last, which may be incomplete, or None."""
    folder = _model_folder(model)
    try:
        return folder / "snapshots" / (folder / "refs" / "main").read_text().strip()
    except OSError:
        return None


def download(model: str) -> Path:
    """Download the missing files of a model, and continue a partial file of an earlier attempt. Raises ModelError.

    The hub's library starts partial files again from the beginning, so weights are first downloaded into its cache by
    this module.
    """
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - slow to import and not needed otherwise

    log.info("downloading %s from the Hugging Face hub into %s", model, hub_folder())
    bar = _bar()
    try:
        _fetch_weights(model, bar)
        return Path(snapshot_download(model, allow_patterns=_PATTERNS, tqdm_class=bar))
    except _errors() as error:
        raise ModelError(
            f"cannot get {model} from the Hugging Face hub ({type(error).__name__}: {str(error).splitlines()[0]}); "
            f"check the id, HF_TOKEN and the network, or name a local folder or one of {', '.join(PACKAGED)}"
        ) from error


def config_folder(model: str) -> Path | None:
    """Download the config.json of a model and return its folder; None if the hub does not provide it."""
    from huggingface_hub import hf_hub_download  # noqa: PLC0415

    try:
        return Path(hf_hub_download(model, "config.json", tqdm_class=_bar())).parent
    except _errors() as error:
        log.debug("no config.json of %s", model, exc_info=error)
        return None


def _errors() -> tuple[type[Exception], ...]:
    """Return the exceptions of a failed download."""
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError  # noqa: PLC0415
    from huggingface_hub.errors import HTTPError as HubHTTPError  # type: ignore[attr-defined]  # noqa: PLC0415

    return HubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError


def _bar() -> type:
    """Return the class of progress bars."""
    from tqdm import tqdm  # type: ignore[import-untyped]  # noqa: PLC0415

    class DownloadBar(tqdm):  # type: ignore[misc]
        """A bar on a terminal, and nothing in a file."""

        def __init__(self, *arguments: object, **options: object) -> None:
            options.pop("name", None)  # the hub's own
            super().__init__(*arguments, **{**options, "disable": options.get("disable") or None})

    return DownloadBar


def _fetch_weights(model: str, bar: type) -> None:
    from huggingface_hub import HfApi, get_hf_file_metadata, hf_hub_url  # noqa: PLC0415
    from huggingface_hub.constants import MAX_HTTP_DOWNLOAD_SIZE  # noqa: PLC0415

    blobs = _model_folder(model) / "blobs"
    names = [file.rfilename for file in HfApi().model_info(model).siblings or ()]
    weights = [name for name in names if name.endswith(".safetensors")]
    if not weights and (gguf := [name for name in names if name.endswith(".gguf")]):
        raise ModelError(
            f"{model} of the Hugging Face hub has GGUF files alone: fetch one, for example with hf download {model} "
            f"{gguf[0]}, and name the file"
        )
    for name in weights:
        url = hf_hub_url(model, name)
        facts = get_hf_file_metadata(url)
        if facts.etag and facts.size and facts.size <= MAX_HTTP_DOWNLOAD_SIZE:
            blobs.mkdir(parents=True, exist_ok=True)
            _fetch(url, facts.size, blobs / facts.etag, f"{model}/{name}", bar)


def _fetch(url: str, size: int, blob: Path, name: str, bar: type) -> None:
    """Download a file, or the rest of it, to a partial file beside its destination. Processes that download the same
    file take turns.
    """
    from huggingface_hub.file_download import http_get  # noqa: PLC0415
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # noqa: PLC0415

    part = blob.with_name(f"{blob.name}.trellis")
    with part.open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if blob.exists():
            part.unlink(missing_ok=True)
            return
        part.touch()
        with part.open("r+b") as file:
            done = file.seek(0, os.SEEK_END)
            if done:
                log.info("going on with %s at byte %d of %d", name, done, size)
            headers = build_hf_headers()
            http_get(url, file, resume_size=done, headers=headers, expected_size=size, tqdm_class=bar)
        if done and _SHA256.fullmatch(blob.name):  # the hub names files of weights by their digest
            with part.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != blob.name:
                part.unlink()
                raise ModelError(
                    f"{name} of the Hugging Face hub was damaged on the way; start again to download it again"
                )
        part.replace(blob)


def _model_folder(model: str) -> Path:
    return hub_folder() / f"models--{model.replace('/', '--')}"
