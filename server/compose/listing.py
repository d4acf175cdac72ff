"""The listing of `python -m server config`: settings, and what the engine makes of them."""

import json
from collections.abc import Iterator
from typing import Any

from engine.errors import EngineFailure
from server.compose.config import embedded_config
from server.compose.engine_args import effective
from server.roles import role_of
from server.settings import EngineArgsError, Settings


def listing(settings: Settings) -> Iterator[str]:
    """Yield lines for people: every setting, and every argument of the engine with the layer that set it. Secrets are
    not shown.
    """
    yield "# settings"
    for name in type(settings).model_fields:
        origin = "set" if name in settings.model_fields_set else "default"
        yield f"{name.upper()}={_shown(getattr(settings, name))}  # {origin}"
    if settings.engine == "embedded" and role_of(settings).has_engine and not settings.engine_address:
        yield "# the embedded engine computes with"
        yield from _computing(settings)
    if settings.engine == "trtllm":
        found = effective(settings)
        name = "llmapi.MultimodalEncoder" if role_of(settings).core == "encoder" else "LLM"
        yield f"# arguments of tensorrt_llm.{name}"
        for path, layer in sorted(found.origins.items()):
            yield f"{path}: {json.dumps(found.value(path))}  # {layer}"
        for name, reason in found.ignored.items():
            yield f"# {name} is ignored: {reason}"


def _computing(settings: Settings) -> Iterator[str]:
    """Yield lines on the device, the type and the code, if the model's folder is present. Raises EngineArgsError."""
    from engine.checkpoints.store import ModelError, present_model  # noqa: PLC0415
    from engine.embedded.models.load import forecast  # noqa: PLC0415 - torch: most commands do without

    try:
        folder = present_model(settings.model, settings.cache_dir)
        if folder is None:
            yield "# known once the model has been fetched or converted, at the first start"
            return
        yield from (f"{name}: {value}" for name, value in forecast(embedded_config(settings, folder)))
    except (EngineFailure, ModelError) as error:
        raise EngineArgsError([str(error)]) from error


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(_shown, value))
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None else str(value)
