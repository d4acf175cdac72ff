"""The command line, `python -m server`: serve (the default), `config` to print the settings, `doctor` to check this
machine.
"""

import logging
import sys
import time
from collections.abc import Iterator, Sequence

from pydantic import ValidationError
from pydantic_settings import SettingsError

from server import __version__
from server.roles import missing_setting, role_of
from server.settings import EngineArgsError, Settings, read_settings
from server.settings.environment import provide, visible_devices

COMMANDS = ("serve", "config", "doctor")
"""Values of the first argument; `serve` is the default."""
_WRONG_SETTINGS = 2
_ENVIRONMENT = {
    # Compute threads that spin long at barriers take the cores from HTTP, and from each other when something else
    # runs; those that never spin are slow to wake (docs/log.md has the figures).
    "GOMP_SPINCOUNT": "20000",
    "UCX_WARN_UNUSED_ENV_VARS": "n",
}
"""Defaults of variables that libraries read when they are loaded, here and in the processes started from here."""
_ENVIRONMENT_OF_OUR_TRANSFERS = {
    # Otherwise UCX, by which NIXL moves blocks, keeps the GPU memory of a replica that has died (docs/decisions/0012).
    # TensorRT-LLM's transceiver uses UCX too, and would open the memory for each transfer again.
    "UCX_CUDA_IPC_CACHE": "n"
}
"""Those of other engines than TensorRT-LLM."""

log = logging.getLogger(__name__)


def main(arguments: Sequence[str]) -> int:
    """Run a command and return the exit code. Serving lasts until a signal."""
    started = time.monotonic()
    if "--version" in arguments:
        sys.stdout.write(f"trellis {__version__}\n")
        return 0
    command, arguments = (
        (arguments[0], arguments[1:]) if arguments and arguments[0] in COMMANDS else ("serve", arguments)
    )
    probe = command == "doctor" and "--probe" in arguments
    arguments = [argument for argument in arguments if not (probe and argument == "--probe")]
    try:
        settings = read_settings(arguments)
        if command == "doctor":
            from server import doctor  # noqa: PLC0415 - serving does without

            if probe and settings.engine != "trtllm":
                raise SettingsError("--probe: checks TensorRT-LLM, and needs --engine trtllm")
            return doctor.run(settings, probe=probe)
        listing = _listing(settings) if command == "config" or settings.engine == "trtllm" else []
        if command == "serve":
            _check_servable(settings)
    except (SettingsError, ValidationError) as error:
        sys.stderr.writelines(f"error: {line}\n" for line in explain(error))
        return _WRONG_SETTINGS
    if command == "config":
        sys.stdout.writelines(f"{line}\n" for line in listing)
        return 0
    return run(settings, arguments, started)


def _listing(settings: Settings) -> list[str]:
    """Return what `config` prints. Raises EngineArgsError if the engine's arguments are wrong."""
    from server.compose.listing import listing  # noqa: PLC0415 - takes a moment, and most commands do without

    return list(listing(settings))


def _check_servable(settings: Settings) -> None:
    """Raise SettingsError for settings that the role lacks, missing packages, and more ranks than GPUs."""
    if (lacking_of_role := missing_setting(settings)) is not None:
        raise SettingsError(": ".join(lacking_of_role))
    if settings.engine == "embedded" and settings.cpu_isa != "auto" and not settings.engine_address:
        _check_instruction_set(settings)
    if settings.otel_endpoint:
        try:
            from server.http import tracing  # noqa: F401, PLC0415 - most replicas do without
        except ImportError as error:
            raise SettingsError(
                f"--otel-endpoint (OTEL_ENDPOINT): needs more packages (pip install 'trellis[otel]'): {error}"
            ) from error
    if settings.engine == "trtllm" and not settings.engine_address and role_of(settings).has_model:
        from server.compose import engine_args  # noqa: PLC0415 - most engines do without
        from server.process import gpus  # noqa: PLC0415 - most engines do without

        answer = gpus.nvidia_smi()
        present = gpus.visible(gpus.parse_gpus(answer), visible_devices())
        lacking = None if answer is None else gpus.shortage(len(present), engine_args.parallelism(settings))
        if lacking is not None:
            raise SettingsError("; ".join(lacking))


def _check_instruction_set(settings: Settings) -> None:
    """Raise SettingsError if this processor lacks the instruction set."""
    from engine.embedded.models.native.levels import chosen  # noqa: PLC0415 - other engines do without
    from engine.errors import EngineFailure  # noqa: PLC0415

    try:
        chosen(settings.cpu_isa)
    except EngineFailure as error:
        raise SettingsError(str(error)) from error


def run(settings: Settings, arguments: Sequence[str], started: float) -> int:
    """Serve with `settings`. Several API processes are started with the same `arguments`."""
    from server.process import launch, logs, serving  # noqa: PLC0415

    ours = {} if settings.engine == "trtllm" else _ENVIRONMENT_OF_OUR_TRANSFERS
    for name, value in {**_ENVIRONMENT, **ours}.items():
        provide(name, value)
    logs.configure(settings.log_level, settings.log_format)
    share = settings.api_processes > 1
    try:
        listener = serving.listen(settings.host, settings.port, share)
    except OSError as error:
        log.error("cannot listen on %s:%d: %s", settings.host, settings.port, error)
        return serving.FAILURE
    with listener:
        if share:
            return launch.launch(settings, arguments, listener, started)
        return serving.serve(settings, listener, started)


def explain(error: SettingsError | ValidationError) -> Iterator[str]:
    """Yield one line for each wrong setting, with its name but without its value, which may be a secret."""
    if isinstance(error, EngineArgsError):
        yield from error.faults
        return
    if isinstance(error, SettingsError):
        yield str(error).removeprefix("error parsing CLI: ")
        return
    for entry in error.errors(include_url=False, include_input=False):
        name = str(entry["loc"][0])
        if entry["type"] == "extra_forbidden":
            yield f"unknown setting {name.upper()} in .env"
        else:
            yield f"--{name.replace('_', '-')} ({name.upper()}): {entry['msg']}"
