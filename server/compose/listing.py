"""The listing of `trellis config`: settings, and the engine's arguments that follow from them."""

import json
from collections.abc import Iterator, Sequence

from engine.errors import EngineFailure
from server.compose.config import embedded_config
from server.compose.engine_args import effective, from_files
from server.compose.model import model_here
from server.compose.sizing import ChosenValue, Size, api_processes, embedding_transfer, explained, this_machine
from server.roles import role_of
from server.settings import EngineArgsError, Settings
from server.settings.flags import groups, shown
from server.settings.reading import origins

_ORIGIN_COLUMN = 48


def listing(settings: Settings, arguments: Sequence[str]) -> Iterator[str]:
    """Yield lines for people: every setting, and every argument of the engine, with the layer that set it. Secrets are
    not shown. `arguments` are those of the command line.
    """
    said = origins(arguments)
    found = effective(settings) if settings.engine == "trtllm" else None
    overridden = from_files(found) if found else {}
    chosen = _chosen(settings)
    for title, names in groups(type(settings)).items():
        yield f"# {title}"
        for name in names:
            value, origin = overridden.get(name, (getattr(settings, name), said.get(name, "default")))
            if name in chosen:
                value, origin = chosen[name].value, f"chosen by device: {chosen[name].why}"
            yield f"{name.upper()}={shown(value)}".ljust(_ORIGIN_COLUMN) + f"  # {origin}"
        yield ""
    if settings.engine == "embedded" and role_of(settings).has_engine and not settings.engine_address:
        yield "# the embedded engine computes with"
        yield from _computing(settings)
    if found:
        name = "llmapi.MultimodalEncoder" if role_of(settings).core == "encoder" else "LLM"
        yield f"# arguments of tensorrt_llm.{name}"
        for path, layer in sorted(found.origins.items()):
            yield f"{path}: {json.dumps(found.value(path))}  # {layer}"
        for name, reason in found.ignored.items():
            yield f"# {name} is ignored: {reason}"


def _chosen(settings: Settings) -> dict[str, Size | ChosenValue]:
    """Return what fits this machine. Without the model's folder some sizes are not known yet."""
    folder = model_here(settings)
    chosen: dict[str, Size | ChosenValue] = (
        {} if settings.api_processes else {"api_processes": api_processes(settings, folder, this_machine())}
    )
    if settings.engine == "embedded" and role_of(settings).has_engine and not settings.engine_address:
        chosen |= explained(settings, folder, this_machine())
    if settings.embedding_transfer == "auto" and (way := embedding_transfer(settings, this_machine())) is not None:
        chosen["embedding_transfer"] = way
    return chosen


def _computing(settings: Settings) -> Iterator[str]:
    """Yield lines on the device, the type and the code, if the model's folder is present. Raises EngineArgsError."""
    from engine.checkpoints.conversions import ModelError  # noqa: PLC0415
    from engine.checkpoints.store import present_model  # noqa: PLC0415
    from engine.embedded.models.load import forecast  # noqa: PLC0415 - torch: most commands do without

    try:
        folder = present_model(settings.model, settings.cache_dir)
        if folder is None:
            yield "# known once the model has been fetched or converted, at the first start"
            return
        yield from (f"{name}: {value}" for name, value in forecast(embedded_config(settings, folder)))
    except (EngineFailure, ModelError) as error:
        raise EngineArgsError([str(error)]) from error
