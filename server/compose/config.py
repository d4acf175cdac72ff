"""Make the configuration of the chosen backend from the settings."""

import logging
from pathlib import Path
from typing import Annotated

import msgspec

from engine.checkpoints.facts import read_model_facts, transcribes
from engine.config import (
    EmbeddedConfig,
    EngineConfig,
    FakeConfig,
    SleepConfig,
    TrtllmConfig,
    TrtllmEncoderConfig,
    VideoOptions,
)
from engine.errors import EngineFailure
from engine.kit.processors import HelloWorld, ProcessorConfig
from engine.media import FrameSampling
from multimodal.text.tokenizer import Tokenizer, byte_tokenizer
from server.compose.model import draft_folder, served_name
from server.compose.sizing import sizes, this_machine
from server.preflight import too_long
from server.roles import role_of
from server.settings import Settings

_HELLO_WORLD = "hello_world"
_Script = Annotated[list[str], msgspec.Meta(min_length=1)]

log = logging.getLogger(__name__)


def engine_config(settings: Settings, folder: Path | None) -> EngineConfig:
    """Return the configuration of the chosen backend."""
    return msgspec.structs.replace(
        _backend_config(settings, folder), sleep=sleep_config(settings) if role_of(settings).has_engine else None
    )


def sleep_config(settings: Settings) -> SleepConfig | None:
    """Return how the engine, or an encode replica's encoder, sleeps; None if it never sleeps."""
    if not role_of(settings).has_model or not (settings.admin_key or settings.sleep_after_idle_seconds):
        return None
    return SleepConfig(
        idle_seconds=settings.sleep_after_idle_seconds,
        idle_level=1 if settings.sleep_level == 1 else 2,
        wake_on_demand=settings.wake_on_demand,
    )


def _backend_config(settings: Settings, folder: Path | None) -> EngineConfig:
    if settings.engine == "fake":
        default = FakeConfig()
        return FakeConfig(
            model=str(folder or served_name(settings)),
            token_delay=settings.fake_token_delay_ms / 1e3,
            context_length=settings.max_seq_len or default.context_length,
            max_num_seqs=settings.max_batch_size or default.max_num_seqs,
            script=_script(settings, folder),
        )
    if folder is not None and transcribes(folder):
        _check_transcription(settings)
    if settings.engine == "trtllm":
        from server.compose import engine_args  # noqa: PLC0415 - other engines do without

        found = engine_args.effective(settings, folder)
        for name, reason in found.ignored.items():
            log.warning("the argument %s is ignored: %s", name, reason)
        arguments = dict(found.arguments)
        kind = TrtllmConfig if role_of(settings).has_engine else TrtllmEncoderConfig
        return kind(
            model=str(folder),
            backend=arguments.pop("backend", settings.backend),
            max_image_pixels=settings.max_image_pixels,
            videos=video_options(settings),
            max_audio_seconds=settings.max_audio_seconds,
            arguments=arguments,
            sampling=settings.trtllm_sampling,
            hang_seconds=settings.engine_hang_seconds,
            processors=_processors(settings, folder),
        )
    if folder is not None and (sentence := too_long(settings, read_model_facts(folder))):
        raise EngineFailure(sentence)
    return msgspec.structs.replace(
        embedded_config(settings, folder),
        processors=_processors(settings, folder),
        speculative_model=str(draft_folder(settings) or ""),
    )


def _check_transcription(settings: Settings) -> None:
    """Raise EngineFailure if the settings cannot serve a model that transcribes."""
    if settings.engine == "trtllm":
        raise EngineFailure(
            "TensorRT-LLM 1.2 serves no Whisper model (its LLM API has had them since 1.3): set ENGINE=embedded"
        )
    role = role_of(settings)
    if role.moves_kv_blocks:
        raise EngineFailure(
            f"prompts of a model that transcribes are too short to be prefilled elsewhere: DISAGGREGATION_MODE must be "
            f"aggregated, not {role.name}"
        )
    if settings.speculative != "none":
        raise EngineFailure("SPECULATIVE cannot be used with a model that transcribes: leave it out")


def _script(settings: Settings, folder: Path | None) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of the answers in FAKE_SCRIPT. Raises EngineFailure if it is no list of texts."""
    if settings.fake_script is None:
        return ()
    try:
        answers = msgspec.json.decode(settings.fake_script.read_bytes(), type=_Script)
    except (OSError, msgspec.DecodeError) as error:
        raise EngineFailure(f"FAKE_SCRIPT: {error}") from error
    tokenizer = Tokenizer.load(folder) if folder is not None else byte_tokenizer()
    return tuple(tuple(tokenizer.encode(answer)) for answer in answers)


def embedded_config(settings: Settings, folder: Path | None) -> EmbeddedConfig:
    """Return the configuration of the embedded engine, without processors. Fields are named like the settings."""
    names = set(EmbeddedConfig.__struct_fields__) & set(Settings.model_fields) - {"model"}
    values = {name: getattr(settings, name) for name in names} | {"cache_dir": str(settings.cache_dir)}
    values["kv_disk_cache_dir"] = str(settings.kv_disk_cache_dir)
    values["memory_service"] = str(settings.memory_service or "")
    values |= {name: choice.value for name, choice in sizes(settings, folder, this_machine()).items()}
    if not role_of(settings).moves_kv_blocks:
        values["kv_transfer"] = ""
    return EmbeddedConfig(model=str(folder), **values)


def default_processors(settings: Settings) -> tuple[str, ...]:
    """Return the names of the logits processors that every request uses."""
    return (_HELLO_WORLD,) if settings.enable_test_logits_processor else ()


def spelled(text: bytes, tokenizer: Tokenizer) -> list[int]:
    """Return tokens whose bytes are exactly `text`, the longest first; encoding could add a space at the beginning."""
    ordinary = [token for token in range(tokenizer.vocab_size) if token not in tokenizer.special_ids]
    ids = {tokenizer.bytes_of(token): token for token in ordinary}
    token_ids: list[int] = []
    while text:
        size = next((size for size in range(len(text), 0, -1) if text[:size] in ids), 0)
        if not size:
            raise EngineFailure(f"ENABLE_TEST_LOGITS_PROCESSOR: no token of the model begins {text.decode()!r}")
        token_ids.append(ids[text[:size]])
        text = text[size:]
    return token_ids


def _processors(settings: Settings, folder: Path | None) -> tuple[ProcessorConfig, ...]:
    """Return the logits processors to register in the engine's process. Raises EngineFailure if the model's tokens
    cannot spell the text.
    """
    if not settings.enable_test_logits_processor or folder is None:
        return ()
    ends = read_model_facts(folder).eos_token_ids
    if not ends:
        raise EngineFailure("ENABLE_TEST_LOGITS_PROCESSOR: the model names no token that ends a sequence")
    token_ids = spelled(HelloWorld.TEXT.encode(), Tokenizer.load(folder))
    log.warning("ENABLE_TEST_LOGITS_PROCESSOR: every answer is %r", HelloWorld.TEXT)
    return (ProcessorConfig(_HELLO_WORLD, "hello_world", {"token_ids": token_ids, "eos_token_id": ends[0]}),)


def video_options(settings: Settings) -> VideoOptions:
    """Return the limits of videos, and the default choice of frames."""
    return VideoOptions(
        max_seconds=settings.max_video_seconds,
        max_pixels=settings.max_video_pixels,
        max_frames=settings.max_video_frames,
        sampling=FrameSampling(settings.video_fps, settings.video_num_frames),
    )
