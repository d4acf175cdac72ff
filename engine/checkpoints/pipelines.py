"""Folders of `diffusers`: a model_index.json names the pipeline, whose parts are in folders below."""

import json
import logging
from pathlib import Path

from engine.checkpoints.conversions import INDEX, ModelError
from engine.checkpoints.hub import is_hub_id, snapshot
from engine.checkpoints.packaged import PACKAGED
from engine.checkpoints.store import present_model, resolve_model

_PATTERNS = [INDEX, "*/*.json", "*/*.txt", "*/*.model", "*/*.safetensors"]
_VARIANTS = ["*.fp16.*", "*.bf16.*", "*.non_ema.*"]
"""Files of the same weights in another form."""

log = logging.getLogger(__name__)


def pipeline_class(folder: Path) -> str:
    """Return the class of the pipeline in a folder; empty if it is not a folder of diffusers."""
    try:
        return str(json.loads((folder / INDEX).read_bytes())["_class_name"])
    except (OSError, ValueError, LookupError, TypeError):
        return ""


def is_pipeline(model: str) -> bool:
    """Return whether the model setting names a pipeline that is built in or here."""
    return PACKAGED[model].pipeline if model in PACKAGED else _here(model) is not None


def present_pipeline(model: str, cache_dir: Path) -> Path | None:
    """Return the folder of a pipeline, if the model setting names one that is here. Raises ModelError."""
    return present_model(model, cache_dir) if model in PACKAGED else _here(model)


def _here(model: str) -> Path | None:
    path = Path(model).expanduser()
    if pipeline_class(path):
        return path
    found = None if path.exists() or "/" not in model or not is_hub_id(model) else snapshot(model)
    return found if found is not None and pipeline_class(found) else None


def pipeline_bytes(folder: Path) -> int:
    """Return the size of a pipeline's weights in its folder."""
    return sum(path.stat().st_size for path in folder.glob("*/*.safetensors"))


def resolve_pipeline(model: str, cache_dir: Path) -> Path:
    """Return the folder of a pipeline, unpacked into `cache_dir` or downloaded first if needed. Raises ModelError."""
    found = resolve_model(model, cache_dir) if model in PACKAGED else _here(model)
    if found is None and not Path(model).expanduser().exists() and is_hub_id(model):
        found = _downloaded(model)
    if found is None or not pipeline_class(found):
        raise ModelError(
            f"{model} has no {INDEX}, so it is not a folder of diffusers; name one, or its Hugging Face id"
        )
    if not pipeline_bytes(found):
        raise ModelError(f"the folder {found} has no */*.safetensors: weights that can run code are not read")
    return found


def _downloaded(model: str) -> Path:
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - slow to import

    log.info("downloading %s from the Hugging Face hub", model)
    try:
        return Path(snapshot_download(model, allow_patterns=_PATTERNS, ignore_patterns=_VARIANTS))
    except Exception as error:  # of any kind: the hub's library has many
        raise ModelError(f"cannot get {model} from the Hugging Face hub ({type(error).__name__}: {error})") from error
