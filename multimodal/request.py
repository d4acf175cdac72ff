"""The neutral request, common to all APIs, and its conversion into the engine's sampling parameters.

The routers convert wire bodies into an `Ask`; nothing below them sees a wire type. Defaults and ranges are written
here, once. Errors name the field.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar

from msgspec.structs import replace

from engine.errors import ContextOverflow
from engine.kit.work import INLINE_LENGTH
from engine.media import ANY_FRAMES, Detail, FrameSampling, MediaKind
from engine.types import EngineInfo, Guide, GuideKind, ReasoningBudget, SamplingParams
from multimodal.errors import RequestError, shown
from multimodal.text.tokenizer import Tokenizer

Number = TypeVar("Number", int, float)

MAX_TOKENS = (1 << 31) - 1
MAX_STRING = 1024
"""Characters of a stop string or bad word."""
TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")
"""An id with a single spelling, so that no key of `logit_bias` overrides another."""
BIAS = (-100.0, 100.0)
"""Smallest and largest value of `logit_bias`."""
RANGES: Mapping[str, tuple[float, float]] = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "top_k": (-1, 1 << 30),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}
"""Smallest and largest value of each field; `top_p` excludes the smallest."""
CONTEXT_LENGTH = "This model's maximum context length is"
"""The words by which clients, such as LiteLLM, recognise that a prompt is too long: OpenAI's message begins so."""
_TAG_DEPTH = 12
"""Levels that a structural tag may have around a schema."""
_MARKUP = 32
"""Characters that templates write for a message, or a part of one, in addition to its text."""


@dataclass(frozen=True, slots=True)
class MediaRef:
    """A file that a content part of a message names, by its URL; `param` names the field."""

    url: str
    detail: Detail
    param: str
    kind: MediaKind = "image"
    sampling: FrameSampling = ANY_FRAMES
    """Frames to take of a video."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call; `parameters` is the JSON schema of its arguments."""

    name: str
    parameters: dict[str, Any] = field(default_factory=dict)
    strict: bool = False
    """Whether arguments must fit the schema."""
    text: "TextGrammar | None" = None
    """A grammar for the only argument, the text `input`."""


class TextGrammar(NamedTuple):
    """A grammar that a text must match."""

    syntax: Literal["lark", "regex"]
    definition: str
    field: str
    """The field of the request that has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """The tools of a request that the model may call, by name. The prompt may show more."""

    offered: Mapping[str, Tool]
    mode: Literal["auto", "required"] = "auto"
    parallel: bool = True
    """Whether one answer may have several calls."""
    guided: str = ""
    """The field that requires calls to be valid by grammar; empty for none."""
    param: str = "tools"
    """The field that lists the tools."""
    schemas: Sequence[str] = ()
    """The fields that have the schemas of the tools that the prompt shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """The messages of a request of any API.

    A message's content is one text or, with images in it, a list: {"type": "text", "text": …} and {"type": "image"} in
    order.
    """

    messages: list[dict[str, Any]]
    media: list[MediaRef] = field(default_factory=list)
    """The media of all messages, in order."""
    tools: list[dict[str, Any]] = field(default_factory=list)
    """The tools that the template shows, as OpenAI's requests have them."""
    as_sent: bool = False
    """Whether messages and tools correspond to those of the request one by one, so that errors can name one."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Template variables that the client sets; a setting of the server lists the allowed ones."""
    variables: dict[str, Any] = field(default_factory=dict)
    """Template variables for which the API has fields; `template_kwargs` override them."""

    @property
    def characters(self) -> int:
        """Rough length of all contents, each message and part included, and of the tools, which are counted only up to
        the length at which work leaves the event loop.
        """
        return rough_length(self.tools) + sum(map(_length, (message["content"] for message in self.messages)))


class AskedGuide(NamedTuple):
    """One way in which a request constrains its output."""

    field: str
    """The field's name in the request."""
    kind: GuideKind
    value: Any
    """The schema, expression, grammar or choices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A client's request. Values are typed but not checked for range: `Sampling` does that.

    For errors, `fields` translates names of this class into those of the request, such as `prompt` into `messages`.
    """

    prompt: Conversation | Sequence[str | list[int]]
    """A chat, or one or several texts to continue, as text or token ids."""
    tools: Tools | None = None
    fields: Mapping[str, str] = field(default_factory=dict)
    model: str | None = None
    request_id: str | None = None
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    n: int = 1
    """Choices for each prompt."""

    # The prompt.
    add_special_tokens: bool = False
    truncate_prompt_tokens: int | None = None
    """Number of tokens to keep at the end of the prompt; -1 keeps as many as leave room for the output."""
    echo: bool = False
    """Repeat the prompt before the output."""
    cache_salt: str = ""
    skip_save: bool = False
    """Keep no KV blocks on the host or the disk."""
    priority: int = 0
    prediction: str | None = None
    """Predicted output, which only speeds up generation."""

    # Sampling.
    max_tokens: int | None = None
    default_max_tokens: int | None = None
    """Used if `max_tokens` is None, as far as there is room; None fills the context."""
    min_tokens: int = 0
    temperature: float | None = None
    """None takes the default (`SamplingDefaults`), also in the next four fields."""
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logit_bias: Mapping[str, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] = ()
    bad_words: Sequence[str] = ()
    guides: Sequence[AskedGuide] = ()
    """Guides of the output; at most one is allowed."""

    # Stopping.
    ignore_eos: bool = False
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False

    # The answer.
    logprobs: int | None = None
    """Alternatives for each token; None is off."""
    prompt_logprobs: int | None = None
    return_token_ids: bool = False
    skip_special_tokens: bool = True
    include_reasoning: bool = True
    reasoning_budget: int | None = None
    """Maximum number of tokens of reasoning in a choice, whose end is then forced; -1 is no limit, None the server's
    setting."""
    needs_budget: bool = True
    """Whether an engine that cannot apply the budget refuses the request instead of ignoring the budget."""

    def spelled(self, name: str | None) -> str | None:
        """Return the request's own name for a field."""
        return None if name is None else self.fields.get(name, name)

    @property
    def schema_length(self) -> int:
        """Rough length of tools and guides, counted only up to the length at which work leaves the event loop."""
        tools = self.prompt.tools if isinstance(self.prompt, Conversation) else []
        return rough_length([tools, [guide.value for guide in self.guides]])


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of one request; the settings of the same names describe them."""

    max_n: int = 128
    min_priority: int = 0
    max_messages: int = 4096
    max_tools: int = 128
    max_stop: int = 16
    max_logit_bias: int = 1024
    max_top_logprobs: int = 20
    max_schema_kb: int = 1024
    max_schema_depth: int = 32
    max_tokenize_tokens: int = 0
    chat_template_kwargs: tuple[str, ...] = ()
    special_tokens_in_content: Literal["text", "allow", "refuse"] = "text"
    request_timeout_seconds: float = 600.0

    def tokens(self, info: EngineInfo) -> int:
        """Return the maximum number of tokens that /tokenize returns and /detokenize accepts."""
        return self.max_tokenize_tokens or 4 * info.context_length


@dataclass(frozen=True)
class SamplingDefaults:
    """Sampling parameters of requests that do not set them: OpenAI's defaults, unless the model has its own."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def of(self, ask: Ask, name: str) -> float:
        """Return a request's own value of a parameter, or the default."""
        value: float | None = getattr(ask, name)
        return getattr(self, name) if value is None else value


OPENAI_DEFAULTS = SamplingDefaults()


def check_tools(ask: Ask, limits: Limits) -> None:
    """Raise RequestError for more tools, or larger or deeper schemas, than the limits allow."""
    if not isinstance(ask.prompt, Conversation) or not (tools := ask.prompt.tools):
        return
    name = ask.tools.param if ask.tools is not None else "tools"
    if len(tools) > limits.max_tools:
        raise RequestError(f"{name!r} may have {limits.max_tools} entries at most.", name)
    for place, tool in enumerate(tools):
        spelled = ask.tools.schemas[place] if ask.tools is not None else f"tools.{place}.function.parameters"
        spec = _spec(spelled, "json_schema", tool["function"].get("parameters") or {}, limits.max_schema_depth)
        if len(spec.encode(errors="surrogatepass")) > limits.max_schema_kb * 1024:
            raise RequestError(f"{spelled!r} may have {limits.max_schema_kb} KiB at most.", spelled)


@dataclass(frozen=True)
class Sampling:
    """Makes `SamplingParams` for the requests of one model."""

    info: EngineInfo
    tokenizer: Tokenizer | None
    """Encodes bad words; None if requests have none."""
    limits: Limits
    processors: tuple[str, ...] = ()
    """Logits processors of every request."""
    defaults: SamplingDefaults = OPENAI_DEFAULTS

    def params(self, ask: Ask, lengths: Sequence[int], budget: ReasoningBudget | None = None) -> list[SamplingParams]:
        """Return the parameters of every choice: `ask.n` for each prompt, whose tokens are `lengths` in number."""
        max_tokens = [self._max_tokens(ask, length) for length in lengths]
        common = SamplingParams(
            max_tokens=min(max_tokens),
            min_tokens=_min_tokens(ask.min_tokens, min(max_tokens)),
            temperature=_in_range("temperature", self.defaults.of(ask, "temperature")),
            top_p=_top_p(self.defaults.of(ask, "top_p")),
            top_k=max(0, int(_in_range("top_k", self.defaults.of(ask, "top_k")))),
            min_p=_in_range("min_p", self.defaults.of(ask, "min_p")),
            repetition_penalty=_in_range("repetition_penalty", self.defaults.of(ask, "repetition_penalty")),
            presence_penalty=_in_range("presence_penalty", ask.presence_penalty),
            frequency_penalty=_in_range("frequency_penalty", ask.frequency_penalty),
            logit_bias=self._logit_bias(ask.logit_bias),
            allowed_token_ids=self._ids("allowed_token_ids", ask.allowed_token_ids, self.info.vocab_size),
            bad_words=self._bad_words(ask.bad_words),
            ignore_eos=ask.ignore_eos,
            stop_token_ids=self._ids("stop_token_ids", ask.stop_token_ids, self.limits.max_logit_bias),
            logprobs=self._logprobs(ask.spelled("logprobs") or "", ask.logprobs),
            prompt_logprobs=self._prompt_logprobs(ask),
            guide=guide_of(ask, self.info.guides, self.limits.max_schema_kb * 1024, self.limits.max_schema_depth),
            processors=self.processors,
            reasoning_budget=budget,
        )
        return [
            replace(common, max_tokens=most, seed=None if ask.seed is None else (ask.seed + choice) % (1 << 63))
            for most in max_tokens
            for choice in range(ask.n)
        ]

    def check_stops(self, ask: Ask) -> None:
        """Raise RequestError for stop strings beyond the limits."""
        name = ask.spelled("stop") or ""
        _at_most(name, ask.stop, self.limits.max_stop)
        if not all(ask.stop):
            raise RequestError(f"{name!r} must not contain an empty string.", name)
        _short(name, ask.stop)

    def _max_tokens(self, ask: Ask, prompt: int) -> int:
        context = self.info.context_length
        asked = ask.max_tokens
        if asked is not None:
            # More than the context is refused below.
            _within(ask.spelled("max_tokens") or "", min(asked, context), 0 if ask.echo else 1, context)
        room = context - prompt
        least = 1 if asked is None else asked
        if room < least:
            more = ", which leaves no room for an answer" if asked is None else ""
            if asked:
                more = f" and asks for {asked} more, {prompt + asked} in all"
            raise ContextOverflow(
                f"{CONTEXT_LENGTH} {context} tokens. However, the request has {prompt} prompt tokens{more}.",
                ask.spelled("prompt"),
            )
        if asked is not None:
            return asked
        return room if ask.default_max_tokens is None else min(room, ask.default_max_tokens)

    def _logprobs(self, name: str, count: int | None) -> int | None:
        most = min(self.limits.max_top_logprobs, self.info.max_logprobs)
        return None if count is None else _within(name, count, 0, most)

    def _prompt_logprobs(self, ask: Ask) -> int | None:
        if ask.prompt_logprobs is not None:
            return self._logprobs("prompt_logprobs", ask.prompt_logprobs)
        return ask.logprobs if ask.echo else None

    def _logit_bias(self, bias: Mapping[str, float]) -> dict[int, float]:
        _at_most("logit_bias", bias, self.limits.max_logit_bias)
        found: dict[int, float] = {}
        for key, value in bias.items():
            name = f"logit_bias.{shown(key)}"
            if not (TOKEN_ID.fullmatch(key) and int(key) < self.info.vocab_size):
                raise RequestError(
                    f"The key '{shown(key)}' of 'logit_bias' must be a token id from 0 to {self.info.vocab_size - 1}.",
                    name,
                )
            found[int(key)] = _within(name, value, *BIAS)
        return found

    def _bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Each word at the start of a line and after a space."""
        _at_most("bad_words", words, self.limits.max_logit_bias)
        _short("bad_words", words)
        if not words:
            return ()
        assert self.tokenizer is not None
        spelled = {tuple(self.tokenizer.encode(form)) for word in words for form in (word, " " + word.lstrip())}
        return tuple(sorted(ids for ids in spelled if ids))

    def _ids(self, name: str, ids: Iterable[int], most: int) -> tuple[int, ...]:
        found = tuple(ids)
        _at_most(name, found, most)
        if any(token >= self.info.vocab_size for token in found):
            raise RequestError(f"{name!r} must be token ids from 0 to {self.info.vocab_size - 1}.", name)
        return found


def guide_of(ask: Ask, kinds: tuple[GuideKind, ...], max_bytes: int, max_depth: int) -> Guide | None:
    """Return the request's only guide, checked for size; None without one."""
    if not ask.guides:
        return None
    name, kind, value = ask.guides[0]
    if len(ask.guides) > 1:
        names = " and ".join(repr(guide.field) for guide in ask.guides)
        raise RequestError(
            f"A request may constrain its output in one way only; this one has {names}.", ask.guides[1].field
        )
    if ask.allowed_token_ids:
        raise RequestError(f"'allowed_token_ids' and {name!r} exclude each other.", "allowed_token_ids")
    if kind not in kinds:
        raise RequestError(f"The engine cannot constrain output by {kind}.", name, "unsupported_parameter")
    if kind == "choice" and (not value or not all(value)):
        raise RequestError(f"{name!r} needs at least one choice, and none may be empty.", name)
    spec = _spec(name, kind, value, max_depth)
    try:
        size = len(spec.encode())
    except UnicodeEncodeError as error:  # JSON text inside the JSON can spell half a surrogate pair
        raise RequestError(f"{name!r} is not valid Unicode.", name) from error
    if size > max_bytes:
        raise RequestError(f"{name!r} may have {max_bytes // 1024} KiB at most.", name)
    return Guide(kind, spec)


def _spec(name: str, kind: GuideKind, value: Any, max_depth: int) -> str:
    if kind in ("regex", "grammar"):
        return str(value)
    if kind == "json_object":
        return ""
    if kind in ("json_schema", "structural_tag") and isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{name!r} is not valid JSON.", name) from error
    max_depth += _TAG_DEPTH * (kind == "structural_tag")
    if _depth(value, max_depth) > max_depth:
        raise RequestError(f"{name!r} is nested more than {max_depth} levels deep.", name)
    return json.dumps(value, ensure_ascii=False)


def _depth(value: Any, limit: int) -> int:
    """Count levels of nesting, up to one beyond the limit."""
    if limit < 0:
        return 0
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    nested = (child for child in children if isinstance(child, (dict, list)))
    return 1 + max((_depth(child, limit - 1) for child in nested), default=0)


def _in_range(name: str, value: Number) -> Number:
    return _within(name, value, *RANGES[name])


def _within(name: str, value: Number, low: float, high: float) -> Number:
    if not low <= value <= high:
        raise RequestError(f"{name!r} must be from {low:.15g} to {high:.15g}.", name)
    return value


def _min_tokens(value: int, most: int) -> int:
    if not 0 <= value <= most:
        raise RequestError(
            f"'min_tokens' must be from 0 to {most}, the most tokens that the answer may have.", "min_tokens"
        )
    return value


def _top_p(value: float) -> float:
    low, high = RANGES["top_p"]
    if not low < value <= high:
        raise RequestError("'top_p' must be above 0 and at most 1.", "top_p")
    return value


def _at_most(name: str, items: Sequence[object] | Mapping[str, float], most: int) -> None:
    if len(items) > most:
        raise RequestError(f"{name!r} may have {most} entries at most.", name)


def _short(name: str, strings: Sequence[str]) -> None:
    if any(len(string) > MAX_STRING for string in strings):
        raise RequestError(f"A string of {name!r} may have {MAX_STRING} characters at most.", name)


def rough_length(value: Any) -> int:
    """Count the characters of a value in JSON, roughly, up to the length at which work leaves the event loop."""
    length, left = 0, [value]
    while left and length <= INLINE_LENGTH:
        value = left.pop()
        length += 4
        if isinstance(value, str):
            length += len(value)
        elif isinstance(value, dict):
            left += [*value, *value.values()]
        elif isinstance(value, (list, tuple)):
            left += value
    return length


def _length(content: str | list[dict[str, Any]]) -> int:
    if isinstance(content, str):
        return _MARKUP + len(content)
    return sum(_MARKUP + len(part.get("text", "")) for part in content)
