"""Settings to parts: what an engine, a tokenizer and a request limit are made of."""

import dataclasses
from pathlib import Path

from engine.config import EmbeddedConfig, EngineConfig, FakeConfig, TrtllmConfig
from multimodal.sampling import Limits
from multimodal.templates import ChatTemplate
from multimodal.tokenizer import Tokenizer, byte_tokenizer
from server.settings import DEFAULT_MODEL, Settings


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
    from engine.embedded.model_store import resolve_model  # noqa: PLC0415 - the fake engine does without

    return resolve_model(settings.model, settings.cache_dir)


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
            max_num_seqs=settings.max_batch_size if "max_batch_size" in settings.model_fields_set else default.max_num_seqs,
        )
    if settings.engine == "trtllm":
        from server import engine_args  # noqa: PLC0415 - other engines do without

        arguments = engine_args.effective(settings).arguments
        return TrtllmConfig(model=str(folder), backend=arguments.pop("backend", settings.backend), arguments=arguments)
    names = set(EmbeddedConfig.__struct_fields__) & set(Settings.model_fields) - {"model"}
    return EmbeddedConfig(model=str(folder), **{name: getattr(settings, name) for name in names})


def limits(settings: Settings) -> Limits:
    """What one request may ask for; the fields have the settings' names."""
    return Limits(**{field.name: getattr(settings, field.name) for field in dataclasses.fields(Limits)})
