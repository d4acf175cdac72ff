"""Conversion of Dynamo's requests into the engine's, and of deltas into Dynamo's outputs. Needs none of Dynamo's
packages."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from engine.types import Delta, EngineInfo, GenerateRequest, Handoff, Logprob, PromptReport, TokenLogprobs
from multimodal.errors import RequestError
from multimodal.request import OPENAI_DEFAULTS, RANGES, Ask, AskedGuide, Limits, MediaRef, Sampling, SamplingDefaults
from multimodal.text.prompts import Prompt
from protocol.dynamo import DynamoGuides, DynamoRequest

_FIELDS = {"max_tokens": "stop_conditions.max_tokens", "prompt": "token_ids"}
_IMAGES = "image_url"
"""The type of a content part that is an image, and the key of images in `multi_modal_data`."""


def read_request(body: object) -> DynamoRequest:
    """Read a request of the frontend. Raises RequestError for one that no worker of this version can take."""
    try:
        request = msgspec.convert(body, DynamoRequest)
    except msgspec.ValidationError as error:
        raise RequestError(f"The request is not one of Dynamo's for token ids: {error}") from None
    if request.prompt_embeds:
        text = "This worker does not take prompts as embeddings."
        raise RequestError(text, "prompt_embeds", "unsupported_parameter")
    if request.sampling_options.use_beam_search:
        raise RequestError("Beam search is not supported.", "use_beam_search", "unsupported_parameter")
    if request.stop_conditions.max_thinking_tokens is not None:
        text = "A budget of reasoning tokens is not supported on Dynamo's request plane."
        raise RequestError(text, "max_thinking_tokens", "unsupported_parameter")
    return request


def image_refs(asked: DynamoRequest) -> list[MediaRef]:
    """Return the images of a request, in order. Raises RequestError for other media, and images in other forms."""
    media = asked.multi_modal_data or {}
    if kinds := [kind for kind, items in media.items() if items and kind != _IMAGES]:
        text = f"This worker takes images only, not {kinds[0]!r}."
        raise RequestError(text, "messages", "unsupported_content")
    urls = [item.get("Url") or item.get("RawUrl") for item in media.get(_IMAGES, ())]
    details = _details(asked)
    if len(details) != len(urls):
        details = [None] * len(urls)
    refs = []
    for url, detail in zip(urls, details, strict=True):
        if not isinstance(url, str):
            text = "This worker takes images by their URL, not as pixels that the frontend has decoded."
            raise RequestError(text, "messages", "unsupported_content")
        refs.append(MediaRef(url, "low" if detail == "low" else "auto", "messages"))
    return refs


def _details(asked: DynamoRequest) -> list[Any]:
    """Return the field `detail` of each image in the chat as the client sent it."""
    messages = asked.extra_args.messages if asked.extra_args is not None else None
    contents = [message.get("content") for message in messages or () if isinstance(message, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content if isinstance(part, dict)]
    images = [part.get(_IMAGES) for part in parts if part.get("type") == _IMAGES]
    return [image.get("detail") if isinstance(image, dict) else None for image in images]


def engine_requests(
    asked: DynamoRequest,
    info: EngineInfo,
    limits: Limits,
    request_id: str,
    *,
    prompt: Prompt | None = None,
    processors: tuple[str, ...] = (),
    defaults: SamplingDefaults = OPENAI_DEFAULTS,
    prefill_only: bool = False,
    handoffs: Sequence[Handoff] = (),
    trace: Mapping[str, str] | None = None,
) -> list[GenerateRequest]:
    """Return the sequences of a request, one for each choice. `prompt` has its media in place, if it has any;
    `handoffs` are those of its first choices. Raises RequestError and ContextOverflow.
    """
    prompt = prompt or Prompt(asked.token_ids)
    if not prompt.ids:
        raise RequestError("The prompt is empty.", "token_ids")
    ask = _ask(asked, prefill_only)
    if not 1 <= ask.n <= limits.max_n:
        raise RequestError(f"'n' must be from 1 to {limits.max_n}.", "n")
    routing = asked.routing
    bad_words = _bad_words(asked.sampling_options.bad_words_token_ids or [], info, limits)
    found = []
    sampler = Sampling(info, None, limits, processors, defaults)
    for index, params in enumerate(sampler.params(ask, [len(prompt.ids)])):
        sampling = msgspec.structs.replace(params, bad_words=bad_words) if bad_words else params
        found.append(
            GenerateRequest(
                request_id=f"{request_id}-{index}",
                prompt_token_ids=tuple(prompt.ids),
                media=prompt.media,
                sampling=sampling,
                group=request_id if ask.n > 1 else "",
                group_size=ask.n,
                priority=max(-(routing.priority or 0) if routing else 0, limits.min_priority),
                cache_salt=(routing.cache_salt or "") if routing else "",
                dp_rank=_rank(asked, info, prefill_only=prefill_only),
                prefill_only=prefill_only,
                handoff=handoffs[index] if index < len(handoffs) else None,
                trace={**trace} if trace else {},
            )
        )
    return found


def _ask(asked: DynamoRequest, prefill_only: bool) -> Ask:
    sampling, stops = asked.sampling_options, asked.stop_conditions
    given = {name: value for name in RANGES if (value := getattr(sampling, name)) is not None}
    stop_ids = [*(stops.stop_token_ids or ()), *(stops.stop_token_ids_visible or ())]
    if not stops.ignore_eos:  # the hidden ones are the model's own ends
        stop_ids += stops.stop_token_ids_hidden or ()
    return Ask(
        prompt=[asked.token_ids],
        fields=_FIELDS,
        n=1 if sampling.n is None else sampling.n,
        # The frontend asks a prefill worker for one token; whether the sequence goes on is the decode worker's matter.
        max_tokens=None if prefill_only else stops.max_tokens,
        min_tokens=min(stops.min_tokens or 0, 1) if prefill_only else stops.min_tokens or 0,
        seed=None if sampling.seed is None else sampling.seed % (1 << 63),
        allowed_token_ids=sampling.allowed_token_ids or (),
        guides=[*_guides(sampling.guided_decoding)] if sampling.guided_decoding is not None else (),
        ignore_eos=bool(stops.ignore_eos),
        stop_token_ids=[*dict.fromkeys(stop_ids)],
        logprobs=asked.output_options.logprobs,
        prompt_logprobs=asked.output_options.prompt_logprobs,
        **given,
    )


def _bad_words(words: list[list[int]], info: EngineInfo, limits: Limits) -> tuple[tuple[int, ...], ...]:
    """Return words that the frontend has tokenized, checked as other ids are. Raises RequestError."""
    if len(words) > limits.max_logit_bias:
        text = f"'bad_words_token_ids' may have {limits.max_logit_bias} entries at most."
        raise RequestError(text, "bad_words_token_ids")
    if any(token >= info.vocab_size for word in words for token in word):
        text = f"'bad_words_token_ids' must be token ids from 0 to {info.vocab_size - 1}."
        raise RequestError(text, "bad_words_token_ids")
    return tuple(tuple(word) for word in words if word)


def _guides(asked: DynamoGuides) -> Iterator[AskedGuide]:
    if asked.json == {"type": "json_object"} or asked.json == {"type": "object"}:
        yield AskedGuide("json", "json_object", None)
    elif asked.json is not None:
        yield AskedGuide("json", "json_schema", asked.json)
    if asked.regex is not None:
        yield AskedGuide("regex", "regex", asked.regex)
    if asked.choice is not None:
        yield AskedGuide("choice", "choice", asked.choice)
    if asked.grammar is not None:
        yield AskedGuide("grammar", "grammar", asked.grammar)
    if asked.structural_tag is not None:
        yield AskedGuide("structural_tag", "structural_tag", asked.structural_tag)


def _rank(asked: DynamoRequest, info: EngineInfo, *, prefill_only: bool) -> int | None:
    """Return the data-parallel rank that the router has chosen, if this engine has several."""
    if asked.routing is None or info.data_parallel_size <= 1:
        return None
    chosen = asked.routing.prefill_dp_rank if prefill_only else None
    chosen = asked.routing.dp_rank if chosen is None else chosen
    return chosen if chosen is not None and 0 <= chosen < info.data_parallel_size else None


class GraphOutputs:
    """The outputs of one request; its last one, of several choices, has the usage."""

    def __init__(self, asked: DynamoRequest, prompt_tokens: int, choices: int) -> None:
        self._prompt_tokens = prompt_tokens
        self._logprobs = asked.output_options.logprobs
        self._running = choices
        self._completion_tokens = 0
        self._cached_tokens = 0
        self._prompt_logprobs: list[dict[str, Any] | None] | None = None

    @property
    def ended(self) -> bool:
        """Whether all choices have finished."""
        return not self._running

    def of(self, delta: Delta, index: int = 0) -> dict[str, Any]:
        """Return the output for `delta` of choice `index`."""
        if delta.prompt is not None:
            self._note(delta.prompt)
        self._completion_tokens += len(delta.token_ids)
        output: dict[str, Any] = {"token_ids": list(delta.token_ids), "index": index}
        if delta.logprobs:
            output["log_probs"] = [position[0].logprob for position in delta.logprobs]
            if self._logprobs:
                output["top_logprobs"] = [[*map(_entry, position[1:])] for position in delta.logprobs]
        if delta.stop_reason is not None:
            output["stop_reason"] = delta.stop_reason
        if delta.finish_reason is not None or delta.held is not None:
            output["finish_reason"] = delta.finish_reason or "length"
            self._running -= 1
            if not self._running:
                output["completion_usage"] = self._usage()
                if self._prompt_logprobs is not None:
                    output["engine_data"] = {"prompt_logprobs": self._prompt_logprobs}
        return output

    def _note(self, report: PromptReport) -> None:
        self._prompt_tokens = report.prompt_tokens or self._prompt_tokens
        self._cached_tokens = max(self._cached_tokens, report.cached_tokens)
        if report.logprobs is not None:
            self._prompt_logprobs = [None if position is None else _by_id(position) for position in report.logprobs]

    def _usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": self._prompt_tokens + self._completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self._cached_tokens},
        }


CANCELLED: Mapping[str, Any] = {"token_ids": [], "index": 0, "finish_reason": "cancelled"}
"""Return the last output of a request that the frontend has stopped."""


def _entry(found: Logprob) -> dict[str, Any]:
    """The frontend knows the token's text."""
    return {"rank": found.rank, "token_id": found.token_id, "token": None, "logprob": found.logprob}


def _by_id(position: TokenLogprobs) -> dict[str, Any]:
    return {str(found.token_id): {"logprob": found.logprob, "rank": found.rank} for found in position}
