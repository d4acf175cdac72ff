"""Settings to parts: what an engine, a tokenizer and a request limit are made of."""

import dataclasses
import logging
from pathlib import Path

import msgspec
from prometheus_client import CollectorRegistry

from engine.base import Engine
from engine.checkpoints.facts import read_model_facts
from engine.config import EmbeddedConfig, EngineConfig, FakeConfig, TrtllmConfig
from engine.errors import EngineFailure
from engine.kit.processors import HelloWorld, ProcessorConfig
from multimodal.sampling import Limits
from multimodal.text.templates import ChatTemplate
from multimodal.text.tokenizer import Tokenizer, byte_tokenizer
from server.settings.replica import DEFAULT_MODEL, Settings

_HELLO_WORLD = "hello_world"

log = logging.getLogger(__name__)


def served_name(settings: Settings) -> str:
    """The model's name in requests: the one set, else that of the folder or hub id."""
    if settings.served_model_name:
        return settings.served_model_name
    if settings.engine == "fake" and settings.model == DEFAULT_MODEL:
        return "fake"
    folder = Path(settings.model).expanduser()
    return folder.resolve().name if folder.is_dir() else settings.model


def model_folder(settings: Settings) -> Path | None:
    """The folder of a ready model, fetched and converted first if need be; None if the fake engine does without. May take minutes."""
    if settings.engine == "fake":
        folder = Path(settings.model).expanduser()
        return folder if folder.is_dir() else None
    from engine.checkpoints.store import resolve_model  # noqa: PLC0415 - the fake engine does without

    return resolve_model(
        settings.model, settings.cache_dir, weights=has_model(settings) and settings.load_format != "dummy"
    )


def load_text(settings: Settings, folder: Path | None) -> tuple[Tokenizer, ChatTemplate | None]:
    """Tokenizer and chat template, if there is one, of a model folder; without a folder, those that make tokens of bytes."""
    tokenizer = Tokenizer.load(folder) if folder is not None else byte_tokenizer()
    source = settings.chat_template.read_text() if settings.chat_template is not None else tokenizer.chat_template
    return tokenizer, ChatTemplate(source, tokenizer.special_tokens) if source else None


def engine_config(settings: Settings, folder: Path | None) -> EngineConfig:
    """What the chosen backend is told. The embedded engine's fields have the settings' names."""
    if settings.engine == "fake":
        default = FakeConfig()
        return FakeConfig(
            model=str(folder or served_name(settings)),
            token_delay=settings.fake_token_delay_ms / 1e3,
            context_length=settings.max_seq_len or default.context_length,
            max_num_seqs=settings.max_batch_size
            if "max_batch_size" in settings.model_fields_set
            else default.max_num_seqs,
        )
    if settings.engine == "trtllm":
        from server.compose import engine_args  # noqa: PLC0415 - other engines do without

        found = engine_args.effective(settings)
        for name, reason in found.ignored.items():
            log.warning("the argument %s is ignored: %s", name, reason)
        role = settings.disaggregation_mode
        assert role != "router", "a router has no engine"
        arguments = dict(found.arguments)
        return TrtllmConfig(
            model=str(folder),
            backend=arguments.pop("backend", settings.backend),
            role=role,
            max_image_pixels=settings.max_image_pixels,
            arguments=arguments,
            processors=_processors(settings, folder),
        )
    return msgspec.structs.replace(embedded_config(settings, folder), processors=_processors(settings, folder))


def embedded_config(settings: Settings, folder: Path | None) -> EmbeddedConfig:
    """Without logits processors."""
    names = set(EmbeddedConfig.__struct_fields__) & set(Settings.model_fields) - {"model"}
    values = {name: getattr(settings, name) for name in names} | {"cache_dir": str(settings.cache_dir.expanduser())}
    if settings.disaggregation_mode == "aggregated":
        values["kv_transfer"] = ""
    return EmbeddedConfig(model=str(folder), **values)


def serving_engine(settings: Settings, local: Engine, registry: CollectorRegistry) -> Engine:
    """The engine that requests go to: `local`, and in a decode replica one that has prompts computed elsewhere."""
    if settings.disaggregation_mode != "decode":
        return local
    from engine.replicas.prefill_engine import DisaggregatedEngine  # noqa: PLC0415 - most replicas do without
    from engine.replicas.prefill_pool import PrefillPool  # noqa: PLC0415
    from server.metrics.peers import PeerMetrics  # noqa: PLC0415

    name = served_name(settings)
    observer = PeerMetrics(registry, name, "prefill")
    pool = PrefillPool(settings.prefill_urls, internal_secret(settings), settings.prefill_attempts, observer)
    min_tokens = settings.prefill_min_tokens if settings.prefill_fallback == "local" else None
    return DisaggregatedEngine(local, pool, name, min_tokens, observer)


def internal_secret(settings: Settings) -> str:
    return settings.internal_secret.get_secret_value() if settings.internal_secret else ""


def has_text(settings: Settings) -> bool:
    """Whether text comes and goes here: prefill replicas see token ids alone, encode replicas images."""
    return settings.disaggregation_mode not in ("prefill", "encode")


def has_engine(settings: Settings) -> bool:
    """Whether tokens are computed here: encode replicas and routers make none."""
    return settings.disaggregation_mode not in ("encode", "router")


def has_model(settings: Settings) -> bool:
    """Whether a model runs here: a router needs no more of it than its tokenizer."""
    return settings.disaggregation_mode != "router"


def entrance(settings: Settings) -> str:
    """The path under which requests come in."""
    return "/v1" if has_text(settings) else f"/{settings.disaggregation_mode}"


def default_processors(settings: Settings) -> tuple[str, ...]:
    """Names of the logits processors of every request."""
    return (_HELLO_WORLD,) if settings.enable_test_logits_processor else ()


def _processors(settings: Settings, folder: Path | None) -> tuple[ProcessorConfig, ...]:
    """What is registered where the engine runs. Raises EngineFailure if the model's tokens cannot say it."""
    if not settings.enable_test_logits_processor or folder is None:
        return ()
    ends = read_model_facts(folder).eos_token_ids
    if not ends:
        raise EngineFailure("ENABLE_TEST_LOGITS_PROCESSOR: the model names no token that ends a sequence")
    token_ids = spelled(HelloWorld.TEXT.encode(), Tokenizer.load(folder))
    log.warning("ENABLE_TEST_LOGITS_PROCESSOR: every answer is %r", HelloWorld.TEXT)
    return (ProcessorConfig(_HELLO_WORLD, "hello_world", {"token_ids": token_ids, "eos_token_id": ends[0]}),)


def spelled(text: bytes, tokenizer: Tokenizer) -> list[int]:
    """Tokens whose bytes are exactly `text`, the longest first: what a tokenizer encodes may begin with a space of its own."""
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


def limits(settings: Settings) -> Limits:
    """What one request may ask for; the fields have the settings' names."""
    return Limits(**{field.name: getattr(settings, field.name) for field in dataclasses.fields(Limits)})
