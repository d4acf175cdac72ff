"""The command line, `trellis` or `python -m server`: one function for each command."""

import argparse
import asyncio
import errno
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

import uvloop
from pydantic import ValidationError
from pydantic_settings import SettingsError

from server import __version__
from server.process import logs
from server.roles import missing_setting, role_of
from server.settings import EngineArgsError, Settings, read_settings
from server.settings.environment import impose, provide, read_env_file, visible_devices
from server.settings.flags import dashed, did_you_mean, help_page, nearest
from server.settings.reading import misspelt_variables, unknown_in_file

if TYPE_CHECKING:
    from engine.process.child import SpareHost

_WRONG_SETTINGS = 2
_INTERRUPTED = 130
_ALONE = {"--version": "version", "--help": "help", "-h": "help"}
"""Commands that may be spelled as a flag."""
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
"""More defaults, for engines other than TensorRT-LLM."""

log = logging.getLogger(__name__)


def main(arguments: Sequence[str]) -> int:
    """Run a command, `serve` if none is named, and return the exit code. Serving lasts until a signal."""
    verb = "serve"
    if arguments and not arguments[0].startswith("-"):
        verb, arguments = arguments[0], arguments[1:]
    elif arguments and dashed(arguments[0]) in _ALONE:
        verb, arguments = _ALONE[arguments[0]], arguments[1:]
    try:
        if verb not in COMMANDS:
            meant = did_you_mean(nearest(verb, COMMANDS, 0.6))
            raise SettingsError(f"unknown command {verb}{meant or f'; to serve a model: trellis serve {verb}'}")
        for name, value in read_env_file().foreign.items():
            provide(name, value)
        topics = [index for index, argument in enumerate(arguments) if dashed(argument) in ("-h", "--help")]
        if topics and verb != "help":
            return _help([verb, *arguments[topics[0] + 1 :]])
        return COMMANDS[verb][0](arguments)
    except (SettingsError, ValidationError) as error:
        sys.stderr.writelines(f"error: {line}\n" for line in explain(error))
        return _WRONG_SETTINGS
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:  # `trellis config | head`
        sys.stderr.close()
        return 1


def _serve(arguments: Sequence[str]) -> int:
    """Serve a model."""
    started = time.monotonic()
    settings = read_settings(arguments)
    if settings.engine == "trtllm":
        list(_listing(settings, arguments))  # raises what is wrong with the engine's arguments
    _check_servable(settings)
    _check_possible(settings)
    return run(settings, arguments, started)


def _chat(arguments: Sequence[str]) -> int:
    """Talk to a running server."""
    from server.commands import chat  # noqa: PLC0415 - each command imports what it needs

    return _as_client(chat.main, arguments)


def _config(arguments: Sequence[str]) -> int:
    """Show every setting, and what set it."""
    lines = list(_listing(read_settings(arguments), arguments))
    sys.stdout.writelines(f"{line}\n" for line in lines)
    sys.stderr.writelines(f"warning: {sentence}\n" for sentence in misspelt_variables())
    return 0


def _doctor(arguments: Sequence[str]) -> int:
    """Check this machine for the settings."""
    from server import doctor  # noqa: PLC0415

    probe = "--probe" in arguments
    settings = read_settings([argument for argument in arguments if argument != "--probe"])
    if probe and settings.engine != "trtllm":
        raise SettingsError("--probe: checks TensorRT-LLM, and needs --engine trtllm")
    return doctor.run(settings, probe=probe)


def _bench(arguments: Sequence[str]) -> int:
    """Load a running server and show what its clients see."""
    from server.commands import bench  # noqa: PLC0415

    return _as_client(bench.main, arguments)


def _memory(arguments: Sequence[str]) -> int:
    """Own the memory of weights that engines share."""
    from server.commands import memory  # noqa: PLC0415

    return memory.main(arguments)


def _sweep(arguments: Sequence[str]) -> int:
    """Measure configurations under many loads, and draw the trade-offs."""
    from server.commands import sweep  # noqa: PLC0415

    return _as_client(sweep.main, arguments)


def _profile(arguments: Sequence[str]) -> int:
    """Find the smallest deployment that meets targets of latency."""
    from server.commands import profile  # noqa: PLC0415

    return _as_client(profile.main, arguments)


def _plan(arguments: Sequence[str]) -> int:
    """Scale the replicas of a role by metrics, here or on Kubernetes."""
    from server.commands import plan  # noqa: PLC0415

    return plan.main(arguments)


def _convert(arguments: Sequence[str]) -> int:
    """Turn a configuration from aggregated to prefill and decode, or back, or set sizes."""
    from server.commands import convert  # noqa: PLC0415

    return convert.main(arguments)


def _models(arguments: Sequence[str]) -> int:
    """List built-in and cached models, with their sizes."""
    from server.commands import models  # noqa: PLC0415

    return models.main(arguments)


def _version(_: Sequence[str]) -> int:
    """Show the version."""
    sys.stdout.write(f"trellis {__version__}\n")
    return 0


def _help(arguments: Sequence[str]) -> int:
    """Show this list, or the help on a command."""
    verb, topic = [*arguments, "", ""][:2]
    sys.stdout.write(_overview() if verb not in COMMANDS or verb == "help" else _help_on(verb, topic))
    return 0


def _as_client(command: Callable[[Sequence[str]], int], arguments: Sequence[str]) -> int:
    from server.commands.remote import RemoteError  # noqa: PLC0415

    try:
        return command(arguments)
    except RemoteError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1


COMMANDS: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "serve": (_serve, "trellis serve [MODEL] [--FLAG VALUE ...]"),
    "chat": (_chat, "trellis chat [MESSAGE] [--url URL]"),
    "doctor": (_doctor, "trellis doctor [MODEL] [--FLAG VALUE ...] [--probe]"),
    "config": (_config, "trellis config [MODEL] [--FLAG VALUE ...]"),
    "bench": (_bench, "trellis bench [--url URL]"),
    "memory": (_memory, "trellis memory [--memory-service SOCKET] [--FLAG VALUE ...] [--status]"),
    "sweep": (_sweep, "trellis sweep [FILE] [--url URL] [--output FOLDER]"),
    "profile": (_profile, "trellis profile --ttft MS --itl MS --isl TOKENS --osl TOKENS [FILE]"),
    "convert": (_convert, "trellis convert FILE [--to aggregated|disaggregated] [--tp INT]"),
    "plan": (_plan, "trellis plan [--role ROLE] [--min INT] [--max INT] [-- --FLAG VALUE ...]"),
    "models": (_models, "trellis models"),
    "version": (_version, "trellis version"),
    "help": (_help, "trellis help [COMMAND] [TOPIC]"),
}
"""Each command and its usage."""


_PRECEDENCE = [
    "--max-batch-size 16 is MAX_BATCH_SIZE=16 in the environment or in .env. Flags win over the environment,",
    "and the environment over .env.",
    "",
]


def _overview() -> str:
    lines = ["Trellis serves a language model with OpenAI's API.", "", "usage: trellis COMMAND [...]", ""]
    lines += [f"  {verb:<9} {_purpose(verb)}" for verb in COMMANDS]
    lines += [
        "",
        "Start with `trellis serve`, then `trellis chat` in another terminal. `trellis COMMAND --help` says more.",
    ]
    return "\n".join(lines) + "\n"


def _purpose(verb: str) -> str:
    return (COMMANDS[verb][0].__doc__ or "").rstrip(".")


def _help_on(verb: str, topic: str) -> str:
    """Return the help on a command, one screen unless a topic asks for more."""
    if verb in ("chat", "bench", "sweep", "profile", "convert", "plan"):
        parser: argparse.ArgumentParser = import_module(f"server.commands.{verb}").parser()
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
        return parser.format_help()
    lines = [f"{_purpose(verb)}.", "", f"usage: {COMMANDS[verb][1]}", ""]
    if verb == "doctor":
        lines += ["--probe asks TensorRT-LLM itself too, on its GPU: docs/tensorrt-llm.md.", ""]
    if verb in ("serve", "doctor", "config", "models"):
        lines += _PRECEDENCE
        lines += [help_page(Settings, topic or ("cache_dir" if verb == "models" else ""))]
    if verb == "memory":
        lines += ["--status shows what a running service owns. docs/shared-weights.md says more.", "", *_PRECEDENCE]
        lines += [help_page(Settings, topic or "memory_service")]
    return "\n".join(lines) + "\n"


def _listing(settings: Settings, arguments: Sequence[str]) -> Iterator[str]:
    """Yield what `config` prints. Raises EngineArgsError if the engine's arguments are wrong."""
    from server.compose.listing import listing  # noqa: PLC0415 - takes a moment, and most commands do without

    return listing(settings, arguments)


def _check_servable(settings: Settings) -> None:
    """Raise SettingsError for settings that the role lacks, missing packages, and more ranks than GPUs."""
    if (lacking_of_role := missing_setting(settings)) is not None:
        raise SettingsError(": ".join(lacking_of_role))
    if settings.engine_standby not in (False, "auto") and settings.engine_address:
        raise SettingsError(
            "--engine-standby (ENGINE_STANDBY): whoever started the engine at ENGINE_ADDRESS restarts it; leave one out"
        )
    if settings.engine == "embedded" and settings.cpu_isa != "auto" and not settings.engine_address:
        _check_instruction_set(settings)
    if settings.otel_endpoint:
        try:
            from server.http import tracing  # noqa: F401, PLC0415 - most replicas do without
        except ImportError as error:
            raise SettingsError(
                f"--otel-endpoint (OTEL_ENDPOINT): needs more packages (pip install 'trellis[otel]'): {error}"
            ) from error
    if settings.dynamo:
        _provide_dynamo(settings)
        try:
            from routers.dynamo import worker  # noqa: F401, PLC0415 - most replicas do without
        except ImportError as error:
            raise SettingsError(
                f"--dynamo (DYNAMO): needs Dynamo's runtime (pip install 'trellis[dynamo]', on Linux): {error}"
            ) from error
    if settings.engine == "trtllm" and role_of(settings).core == "visual":
        from engine.trtllm.versions import lacks_visual  # noqa: PLC0415 - most replicas do without

        if reason := lacks_visual():
            raise SettingsError(f"ENGINE=trtllm: {reason}")
    elif settings.engine == "trtllm" and not settings.engine_address and role_of(settings).has_model:
        from server.compose import engine_args  # noqa: PLC0415 - most engines do without
        from server.process import gpus  # noqa: PLC0415 - most engines do without

        answer = gpus.nvidia_smi()
        present = gpus.visible(gpus.parse_gpus(answer), visible_devices())
        lacking = None if answer is None else gpus.shortage(len(present), engine_args.parallelism(settings))
        if lacking is not None:
            raise SettingsError("; ".join(lacking))
        if find_spec("tensorrt_llm") is None:
            raise SettingsError(
                "ENGINE=trtllm: the package tensorrt_llm is not installed. Cure: run in NVIDIA's container, build the "
                "Dockerfile's target trtllm (docs/tensorrt-llm.md), or ENGINE=embedded"
            )


def _provide_dynamo(settings: Settings) -> None:
    """Set what Dynamo's runtime reads from the environment when it is imported, unless it is set; where etcd is, our
    setting says. The runtime logs as we do, but not at its level `info`, which has several lines for each request.
    """
    level = {"debug": "debug", "info": "warn", "warning": "warn"}.get(settings.log_level, "error")
    provide("DYN_LOG", f"{level},request_span={level}")
    provide("DYN_LOGGING_JSONL", "1" if settings.log_format == "json" else "0")
    impose("ETCD_ENDPOINTS", ",".join(settings.dynamo_etcd))


def _check_possible(settings: Settings) -> None:
    """Raise EngineArgsError for settings that cannot work on this machine or with this model."""
    from server.compose.model import model_here  # noqa: PLC0415
    from server.compose.sizing import this_machine  # noqa: PLC0415
    from server.preflight import impossible  # noqa: PLC0415

    if found := list(impossible(settings, this_machine(), model_here(settings))):
        raise EngineArgsError([f"{finding.text}. Cure: {finding.cure}" for finding in found])


def _check_instruction_set(settings: Settings) -> None:
    """Raise SettingsError if this processor lacks the instruction set."""
    from engine.embedded.models.native.levels import chosen  # noqa: PLC0415 - other engines do without
    from engine.errors import EngineFailure  # noqa: PLC0415

    try:
        chosen(settings.cpu_isa, settings.dtype)
    except EngineFailure as error:
        raise SettingsError(str(error)) from error


def run(settings: Settings, arguments: Sequence[str], started: float) -> int:
    """Serve with `settings`. Several API processes are started with the same `arguments`."""
    from server.process.spare import spare_host  # noqa: PLC0415 - other commands do without

    ours = {} if settings.engine == "trtllm" else _ENVIRONMENT_OF_OUR_TRANSFERS
    for name, value in {**_ENVIRONMENT, **ours}.items():
        provide(name, value)
    logs.configure(settings.log_level, settings.log_format)
    if not settings.api_processes:
        settings = settings.model_copy(update={"api_processes": _api_processes(settings)})
    share = settings.api_processes > 1
    with asyncio.Runner(loop_factory=None if share else uvloop.new_event_loop) as runner:
        spare = runner.run(spare_host(settings))
        try:
            return _run(settings, arguments, started, runner, spare)
        finally:
            if spare is not None:
                runner.run(spare.close())


def _run(
    settings: Settings,
    arguments: Sequence[str],
    started: float,
    runner: asyncio.Runner,
    spare: "SpareHost | None",
) -> int:
    from server.process import banner, launch, serving  # noqa: PLC0415 - takes a second

    for sentence in misspelt_variables():
        log.warning("%s", sentence)
    if role_of(settings).is_public and (sentence := banner.warning(settings)):
        log.warning("%s", sentence)
    share = settings.api_processes > 1
    try:
        listener = serving.listen(settings.host, settings.port, share)
    except OSError as error:
        cure = "stop what listens there (ss -ltnp names it), or choose another with --port"
        cure = cure if error.errno == errno.EADDRINUSE else "set HOST to an address of this machine, or PORT above 1023"
        log.error("cannot listen on %s:%d: %s; %s", settings.host, settings.port, error.strerror or error, cure)
        return serving.FAILURE
    with listener:
        if share:
            return launch.launch(settings, arguments, listener, runner, spare)
        return serving.serve(settings, listener, started, runner, spare=spare)


def _api_processes(settings: Settings) -> int:
    """Return the number of API processes that fits this machine and the model."""
    from server.compose.model import config_here  # noqa: PLC0415
    from server.compose.sizing import api_processes, this_machine  # noqa: PLC0415

    most = api_processes(settings, None, this_machine()).value
    return api_processes(settings, config_here(settings), this_machine()).value if most > 1 else most


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
            yield unknown_in_file(name)
            continue
        fault = entry["msg"].partition(", unable to")[0].removeprefix("Value error, ")
        yield f"--{name.replace('_', '-')} ({name.upper()}): {fault.replace('Input should be', 'must be')}"
