"""Request fields to the engine's sampling parameters, with every limit on the way. Errors name the field."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from msgspec.structs import replace

from engine.types import EngineInfo, SamplingParams
from multimodal.errors import ContextLengthExceeded, RequestError
from multimodal.guides import guide_of
from multimodal.text.tokenizer import Tokenizer
from protocol.chat import ChatCompletionRequest
from protocol.common import GenerationFields
from protocol.completions import CompletionRequest

Number = TypeVar("Number", int, float)

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for completions."""
_MAX_STRING = 1024
"""Characters of a stop string or bad word."""
_TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")
"""One spelling for each id, so that no key of `logit_bias` overrides another."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one request may ask for; the settings of the same names say what each bounds."""

    max_n: int = 128
    max_messages: int = 4096
    max_stop: int = 16
    max_logit_bias: int = 1024
    max_top_logprobs: int = 20
    max_schema_kb: int = 64
    max_schema_depth: int = 32
    chat_template_kwargs: tuple[str, ...] = ()
    strict_fields: bool = False
    request_timeout_seconds: float = 600.0


@dataclass(frozen=True)
class Sampling:
    """Makes `SamplingParams` for the requests of one model."""

    info: EngineInfo
    tokenizer: Tokenizer
    limits: Limits
    processors: tuple[str, ...] = ()
    """Logits processors of every request."""

    def params(self, body: GenerationFields, prompt_tokens: Sequence[int], n: int) -> list[SamplingParams]:
        """Parameters of every choice of a request: `n` for each of its prompts, which have so many tokens."""
        max_tokens = [self._max_tokens(body, length) for length in prompt_tokens]
        common = self._common(body, min(max_tokens))
        return [
            replace(common, max_tokens=most, seed=None if body.seed is None else (body.seed + choice) % (1 << 63))
            for most in max_tokens
            for choice in range(n)
        ]

    def _common(self, body: GenerationFields, max_tokens: int) -> SamplingParams:
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=_within("min_tokens", body.min_tokens, 0, 0, max_tokens),
            temperature=_within("temperature", body.temperature, 1.0, 0.0, 2.0),
            top_p=_top_p(body.top_p),
            top_k=max(0, _within("top_k", body.top_k, 0, -1, 1 << 30)),
            min_p=_within("min_p", body.min_p, 0.0, 0.0, 1.0),
            repetition_penalty=_within("repetition_penalty", body.repetition_penalty, 1.0, 0.01, 100.0),
            presence_penalty=_within("presence_penalty", body.presence_penalty, 0.0, -2.0, 2.0),
            frequency_penalty=_within("frequency_penalty", body.frequency_penalty, 0.0, -2.0, 2.0),
            logit_bias=self._logit_bias(body.logit_bias or {}),
            allowed_token_ids=self._ids("allowed_token_ids", body.allowed_token_ids, self.info.vocab_size),
            bad_words=self._bad_words(body.bad_words or []),
            ignore_eos=bool(body.ignore_eos),
            stop_token_ids=self._ids("stop_token_ids", body.stop_token_ids, self.limits.max_logit_bias),
            logprobs=self._logprobs(body),
            prompt_logprobs=self._prompt_logprobs(body),
            guide=guide_of(body, self.info.guides, self.limits.max_schema_kb * 1024, self.limits.max_schema_depth),
            processors=self.processors,
        )

    def stop_strings(self, body: GenerationFields) -> tuple[str, ...]:
        """The request's stop strings, checked."""
        stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
        _at_most("stop", stops, self.limits.max_stop)
        if not all(stops):
            raise RequestError("'stop' must not contain an empty string.", "stop")
        _short("stop", stops)
        return tuple(stops)

    def _max_tokens(self, body: GenerationFields, prompt: int) -> int:
        chat = isinstance(body, ChatCompletionRequest)
        name, asked = tokens_asked_for(body)
        room = self.info.context_length - prompt
        reports_prompt = isinstance(body, CompletionRequest) and bool(body.echo)
        if asked is not None:
            _within(name, asked, 0, 0 if reports_prompt else 1, 1 << 31)
        if room < (asked if asked is not None else 1):
            raise ContextLengthExceeded(prompt, asked or 1, self.info.context_length, "messages" if chat else "prompt")
        if asked is not None:
            return asked
        return room if chat else min(room, COMPLETION_MAX_TOKENS)

    def _logprobs(self, body: GenerationFields) -> int | None:
        most = min(self.limits.max_top_logprobs, self.info.max_logprobs)
        if isinstance(body, ChatCompletionRequest):
            top = None if body.top_logprobs is None else _within("top_logprobs", body.top_logprobs, 0, 0, most)
            if top and not body.logprobs:
                raise RequestError("'top_logprobs' needs 'logprobs': true.", "top_logprobs")
            return (top or 0) if body.logprobs else None
        assert isinstance(body, CompletionRequest)
        return None if body.logprobs is None else _within("logprobs", body.logprobs, 0, 0, most)

    def _prompt_logprobs(self, body: GenerationFields) -> int | None:
        most = min(self.limits.max_top_logprobs, self.info.max_logprobs)
        if body.prompt_logprobs is not None:
            return _within("prompt_logprobs", body.prompt_logprobs, 0, 0, most)
        if isinstance(body, CompletionRequest) and body.echo and body.logprobs is not None:
            return body.logprobs
        return None

    def _logit_bias(self, bias: dict[str, float]) -> dict[int, float]:
        _at_most("logit_bias", bias, self.limits.max_logit_bias)
        if not all(_TOKEN_ID.fullmatch(key) and int(key) < self.info.vocab_size for key in bias):
            raise RequestError(
                f"The keys of 'logit_bias' must be token ids from 0 to {self.info.vocab_size - 1}.", "logit_bias"
            )
        return {int(key): _within("logit_bias", value, 0.0, -100.0, 100.0) for key, value in bias.items()}

    def _bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Each word at the start of a line and after a space."""
        _at_most("bad_words", words, self.limits.max_logit_bias)
        _short("bad_words", words)
        spelled = {tuple(self.tokenizer.encode(form)) for word in words for form in (word, " " + word.lstrip())}
        return tuple(sorted(ids for ids in spelled if ids))

    def _ids(self, name: str, ids: Iterable[int] | None, most: int) -> tuple[int, ...]:
        found = tuple(ids or ())
        _at_most(name, found, most)
        if any(token >= self.info.vocab_size for token in found):
            raise RequestError(f"{name!r} must be token ids from 0 to {self.info.vocab_size - 1}.", name)
        return found


def tokens_asked_for(body: GenerationFields) -> tuple[str, int | None]:
    """How many tokens the request asks for, and the field that says so."""
    if isinstance(body, ChatCompletionRequest) and body.max_completion_tokens is not None:
        return "max_completion_tokens", body.max_completion_tokens
    return "max_tokens", body.max_tokens


def _within(name: str, value: Number | None, default: Number, low: Number, high: Number) -> Number:
    if value is None:
        return default
    if not low <= value <= high:
        raise RequestError(f"{name!r} must be from {low:g} to {high:g}.", name)
    return value


def _top_p(value: float | None) -> float:
    if value is not None and value <= 0:
        raise RequestError("'top_p' must be above 0 and at most 1.", "top_p")
    return _within("top_p", value, 1.0, 0.0, 1.0)


def _at_most(name: str, items: Sequence[object] | dict[str, float], most: int) -> None:
    if len(items) > most:
        raise RequestError(f"{name!r} may have {most} entries at most.", name)


def _short(name: str, strings: Sequence[str]) -> None:
    if any(len(string) > _MAX_STRING for string in strings):
        raise RequestError(f"A string of {name!r} may have {_MAX_STRING} characters at most.", name)
