"""The model that the settings name: its name in requests, its folder, its tokenizer and chat template."""

import logging
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from engine.checkpoints.facts import read_model_facts
from engine.checkpoints.gguf.split import stem_of
from engine.checkpoints.pipelines import present_pipeline, resolve_pipeline
from engine.errors import EngineFailure
from multimodal.answers.formats import AnswerFormat
from multimodal.answers.parsers.choose import choose, family
from multimodal.answers.parsers.formats import OutputFormat
from multimodal.answers.parsers.response_templates import RESPONSE_TEMPLATE, family_of
from multimodal.request import OPENAI_DEFAULTS, RANGES, SamplingDefaults
from multimodal.text.control import ControlTokens
from multimodal.text.templates import ChatTemplate
from multimodal.text.tokenizer import IMAGE, Tokenizer, byte_tokenizer, response_template
from server.roles import makes_pictures, role_of
from server.settings import DEFAULT_MODEL, Settings

log = logging.getLogger(__name__)


def served_name(settings: Settings) -> str:
    """Return the model's name in requests: the one set, else that of the folder, GGUF file or hub id."""
    if settings.served_model_name:
        return settings.served_model_name
    if settings.engine == "fake" and settings.model == DEFAULT_MODEL:
        return "fake"
    path = Path(settings.model).expanduser()
    if path.is_file():
        return stem_of(path)
    return path.resolve().name if path.is_dir() else settings.model


def model_folder(settings: Settings) -> Path | None:
    """Return the folder of the model, downloaded and converted first if needed, which may take minutes. None if the
    fake engine runs without one.
    """
    if settings.engine == "fake":
        folder = Path(settings.model).expanduser()
        return folder if folder.is_dir() else None
    if makes_pictures(settings):
        return resolve_pipeline(settings.model, settings.cache_dir) if role_of(settings).has_model else None
    from engine.checkpoints.store import resolve_model  # noqa: PLC0415 - the fake engine does without

    return resolve_model(settings.model, settings.cache_dir, weights=_needs_weights(settings))


def draft_folder(settings: Settings) -> Path | None:
    """Return the folder of the draft model or head, downloaded and converted first if needed; None without one."""
    if settings.speculative not in ("draft", "eagle3"):
        return None
    from engine.checkpoints.store import resolve_head, resolve_model  # noqa: PLC0415 - most replicas do without

    if settings.speculative == "eagle3":
        return resolve_head(settings.speculative_model or settings.model)
    return resolve_model(settings.speculative_model, settings.cache_dir, weights=_needs_weights(settings))


def model_here(settings: Settings) -> Path | None:
    """Return the folder of the model if it needs neither download nor conversion."""
    from engine.checkpoints.conversions import ModelError  # noqa: PLC0415
    from engine.checkpoints.store import present_model  # noqa: PLC0415

    try:
        if makes_pictures(settings):
            return present_pipeline(settings.model, settings.cache_dir)
        return present_model(settings.model, settings.cache_dir, weights=_needs_weights(settings))
    except ModelError:
        return None


def config_here(settings: Settings) -> Path | None:
    """Return a folder with the model's config.json, downloaded from the Hugging Face hub if needed, or None."""
    from engine.checkpoints.hub import config_folder, is_hub_id  # noqa: PLC0415
    from engine.checkpoints.packaged import PACKAGED  # noqa: PLC0415

    folder = model_here(settings)
    remote = settings.model not in PACKAGED and not Path(settings.model).expanduser().exists()
    return config_folder(settings.model) if folder is None and remote and is_hub_id(settings.model) else folder


def _needs_weights(settings: Settings) -> bool:
    return role_of(settings).has_model and settings.load_format != "dummy"


def load_text(settings: Settings, folder: Path | None) -> tuple[Tokenizer, ChatTemplate | None]:
    """Load the tokenizer of a model folder, and its chat template if it has one. Without a folder the tokenizer maps
    bytes to tokens.
    """
    tokenizer = Tokenizer.load(folder) if folder is not None else byte_tokenizer()
    source = settings.chat_template.read_text() if settings.chat_template is not None else tokenizer.chat_template
    if not source:
        return tokenizer, None
    control = ControlTokens(tokenizer, _control_texts(settings, folder, tokenizer))
    return tokenizer, ChatTemplate(source, tokenizer.special_tokens, control)


def sampling_defaults(settings: Settings, folder: Path | None, refused: Collection[str]) -> SamplingDefaults:
    """Return the default sampling parameters, which are the model's own if the settings say so. Those that the engine
    has `refused` are left out. Raises EngineFailure for a value out of range.
    """
    if folder is None or settings.engine == "fake" or settings.sampling_defaults == "openai":
        return OPENAI_DEFAULTS
    found = read_model_facts(folder).sampling_defaults
    for name, value in found.items():
        low, high = RANGES[name]
        if not low <= value <= high or (name == "top_p" and not value):
            raise EngineFailure(
                f"{name} in the generation_config.json of {folder} is {value}, which is not from {low:g} to {high:g}; "
                "SAMPLING_DEFAULTS=openai leaves it out"
            )
    used = {name: value for name, value in found.items() if name not in refused}
    if used:
        log.info("default sampling parameters of the model: %s", used)
    return replace(OPENAI_DEFAULTS, **used)


def answer_format(settings: Settings, folder: Path | None, template: ChatTemplate | None) -> AnswerFormat:
    """Return the format of the model's tool calls and reasoning: the settings, or with auto its template and type, or
    its own response template if that describes more. A chat template without a place for tools gets them in Hermes'
    form, so calls have that form, too.
    """
    asked = {settings.tool_call_parser, settings.reasoning_parser}
    source = template.source if template is not None else None
    kind = read_model_facts(folder).text_type if folder is not None and settings.engine != "fake" else None
    tools, reasoning = choose(source, kind)
    own = _own_format(folder) if asked & {"auto", RESPONSE_TEMPLATE} else None
    if RESPONSE_TEMPLATE in asked and own is None:
        raise ValueError("TOOL_CALL_PARSER or REASONING_PARSER is response_template, and the model has none")
    more = own is not None and bool((own.tools and not tools) or (own.reasoning and not reasoning))
    if own is not None and (RESPONSE_TEMPLATE in asked or (asked == {"auto"} and more)):
        return AnswerFormat(own, settings.stream_tool_arguments, settings.thinking_token_budget)
    if tools is None and template is not None and not template.shows_tools:
        tools = "hermes"
    names = {"auto": (tools, reasoning), "none": (None, None)}
    chosen = family(
        names.get(settings.tool_call_parser, (settings.tool_call_parser, None))[0],
        names.get(settings.reasoning_parser, (None, settings.reasoning_parser))[1],
    )
    return AnswerFormat(chosen, settings.stream_tool_arguments, settings.thinking_token_budget)


def _own_format(folder: Path | None) -> OutputFormat | None:
    """Return the format of the model's own response template (transformers from 5.13 on); None without one, or if it
    cannot be parsed.
    """
    template = response_template(folder) if folder is not None else None
    try:
        return None if template is None else family_of(template)
    except ValueError as error:
        log.warning("ignoring the model's response_template: %s", error)
        return None


def _control_texts(settings: Settings, folder: Path | None, tokenizer: Tokenizer) -> frozenset[str]:
    """Return the tokens that messages cannot write: special tokens, unless the settings allow them, and tokens of
    media."""
    special = tokenizer.special_texts if settings.special_tokens_in_content != "allow" else frozenset()
    if folder is None:
        return special | {IMAGE}
    ids = read_model_facts(folder).media_token_ids if settings.engine != "fake" else frozenset()
    return special | {text for token_id in ids if (text := tokenizer.backend.id_to_token(token_id))}
