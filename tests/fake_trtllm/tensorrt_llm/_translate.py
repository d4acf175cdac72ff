"""TensorRT-LLM's sampling parameters as those of our engines."""

import inspect
import json
import pickle
from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

from engine.types import EngineInfo, Guide, SamplingParams
from tensorrt_llm._contract import NEWEST
from tensorrt_llm._errors import RequestError

_UNSUPPORTED = (
    "use_beam_search",
    "no_repeat_ngram_size",
    "top_p_min",
    "top_p_reset_ids",
    "top_p_decay",
    "lookahead_config",
)


@dataclass(frozen=True)
class Sampler:
    """Which sampler an executor has, and where it samples."""

    name: Literal["TorchSampler", "TRTLLMSampler", "one_model"]
    """`one_model`: speculation in the target model, which samples by itself."""
    advanced: bool
    """Whether one-model speculation knows temperature, top-k and top-p. It is greedy otherwise."""
    speculates: bool
    overlaps: bool

    @classmethod
    def of(cls, args: Any) -> "Sampler":
        speculative = args.speculative_config
        kind = type(speculative).__name__
        one_model = (
            kind == "MTPDecodingConfig" and (speculative.mtp_eagle_one_model or speculative.use_mtp_vanilla)
        ) or (kind == "EagleDecodingConfig" and speculative.eagle3_one_model)
        asked = "TRTLLMSampler" if "TRTLLMSampler" in str(args.sampler_type) else "TorchSampler"
        return cls(
            name="one_model" if one_model else "TorchSampler" if speculative is not None else asked,
            advanced=one_model and (NEWEST or speculative.allow_advanced_sampling),
            speculates=speculative is not None,
            overlaps=not args.disable_overlap_scheduler,
        )

    @property
    def ignored(self) -> dict[str, Any]:
        """Fields of our SamplingParams that this sampler ignores, with neutral values."""
        if self.name == "TRTLLMSampler" or (self.name == "TorchSampler" and NEWEST):
            return {}
        ignored = {
            "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "min_p": 0.0,
            "bad_words": (), "seed": None,
        }  # fmt: skip
        if self.name == "one_model":
            ignored |= {"logit_bias": {}, "min_tokens": 0, "logprobs": None}
            ignored |= {} if self.advanced else {"temperature": 0.0, "top_p": 1.0, "top_k": 0}
        return ignored


def stop_ids(params: Any) -> tuple[int, ...]:
    """The ids that end a sequence besides the end id."""
    return tuple(params.stop_token_ids or ())


def engine_sampling(params: Any, info: EngineInfo, guided: bool, sampler: Sampler, prompt: int) -> dict[str, Any]:
    """Return fields of our SamplingParams, except `max_tokens` and `processors`, as the sampler honours them.

    Raises RequestError for what our engines cannot do.
    """
    for name in _UNSUPPORTED:
        if getattr(params, name):
            raise RequestError(f"{name} is not supported")
    temperature = 1.0 if params.temperature is None else params.temperature
    ends = {params.end_id, *stop_ids(params)}
    # Our engines end at the model's ids, or at none of them; the contract names the ids that count.
    native = not params.ignore_eos and params.end_id in info.eos_token_ids and ends >= set(info.eos_token_ids)
    stops = (
        stop_ids(params)
        if native or params.ignore_eos or params.end_id in {None, -1}
        else (*stop_ids(params), params.end_id)
    )
    if native:
        stops = tuple(token for token in stops if token not in info.eos_token_ids or token == params.end_id)
    bad = [(token,) for token in params.bad_token_ids or ()] + [tuple(word) for word in params._bad_word_ids or ()]
    asked = {
        "min_tokens": min_tokens(params, sampler, prompt) if len(ends) == 1 and not params.ignore_eos else 0,
        "temperature": 0.0 if params._greedy_decoding else temperature,
        "top_p": 1.0 if params.top_p is None else params.top_p,
        "top_k": params.top_k or 0,
        "min_p": params.min_p or 0.0,
        "repetition_penalty": 1.0 if params.repetition_penalty is None else params.repetition_penalty,
        "presence_penalty": params.presence_penalty or 0.0,
        "frequency_penalty": params.frequency_penalty or 0.0,
        "logit_bias": _bias(params.embedding_bias, info.vocab_size),
        "bad_words": tuple(bad),
        "seed": params.seed,
        "ignore_eos": not native,
        "stop_token_ids": tuple(dict.fromkeys(stops)),
        "logprobs": params.logprobs if NEWEST else params.logprobs or None,
        "prompt_logprobs": params.prompt_logprobs if NEWEST else params.prompt_logprobs or None,
        "guide": _guide(params.guided_decoding, guided),
    }
    return asked | sampler.ignored


def min_tokens(params: Any, sampler: Sampler, prompt: int) -> int:
    """Output tokens before which the end id is masked: 1.2.1's TorchSampler counts the prompt, too (#12166)."""
    counted = prompt if sampler.name == "TorchSampler" and not NEWEST else 0
    return max(0, (params.min_tokens or 0) - counted)


class PromptCounts:
    """Applies the presence and frequency penalties to the prompt, of which our engines count the output alone."""

    def __init__(self, presence: float, frequency: float, prompt: list[int], ignored: int) -> None:
        self._presence = presence
        self._frequency = frequency
        self._prompt = len(prompt)
        self._counts = Counter(prompt[ignored:])

    @classmethod
    def of(cls, params: Any, sampler: Sampler, prompt: list[int]) -> "PromptCounts | None":
        presence, frequency = params.presence_penalty or 0.0, params.frequency_penalty or 0.0
        if "presence_penalty" in sampler.ignored or not (presence or frequency):
            return None
        return cls(presence, frequency, prompt, params.prompt_ignore_length or 0)

    def __call__(self, token_ids: Any, logits: Any) -> None:
        output = set(token_ids[self._prompt :])
        for token, count in self._counts.items():
            logits[token] -= self._frequency * count + self._presence * (token not in output)


class MinLength:
    """Masks the end id alone, where our engines would mask all ids that end a sequence.

    With `ignore_eos` the end id is -1, and 1.2.1 masks the last id of the vocabulary (#12358).
    """

    def __init__(self, end_id: int, tokens: int, prompt: int) -> None:
        self._end_id = end_id
        self._length = prompt + tokens

    @classmethod
    def of(cls, params: Any, sampler: Sampler, prompt: int) -> "MinLength | None":
        """The processor, unless our engines do it right by themselves or 1.2.1 does nothing."""
        tokens = min_tokens(params, sampler, prompt)
        several = len({params.end_id, *stop_ids(params)}) > 1
        if not tokens or sampler.name == "one_model" or not (several or params.ignore_eos):
            return None
        return None if params.ignore_eos and NEWEST else cls(-1 if params.ignore_eos else params.end_id, tokens, prompt)

    def __call__(self, token_ids: Any, logits: Any) -> None:
        if len(token_ids) < self._length:
            logits[self._end_id] = float("-inf")


def checked_processors(params: Any) -> list[Any]:
    """Return copies of the request's logits processors, as worker processes would get them.

    Raises whatever pickling raises.
    """
    given = params.logits_processor
    processors = [] if given is None else given if isinstance(given, list) else [given]
    copies = [pickle.loads(pickle.dumps(processor)) for processor in processors]  # noqa: S301 - our own bytes, as the real one does
    for processor in copies:
        count = len(inspect.signature(processor).parameters)
        assert count in {4, 5}, f"a logits processor takes 4 or 5 parameters, not {count}"
    return copies


class Processor:
    """A documented logits processor behind our engines' interface, called as 1.2.1 calls it.

    Under the overlap scheduler it runs at the end of a step's forward pass, before the step before has told the host
    its token: the sequence lacks one. In chunked prefill it runs for each chunk, on logits that nobody uses but for the
    last. A generation worker begins behind the `first` token, which the context worker drew.
    """

    def __init__(
        self, processor: Any, request_id: int, prompt: int, *, overlaps: bool, chunks: int = 1, first: int | None = None
    ) -> None:
        self._processor = processor
        self._request_id = request_id
        self._prompt = prompt
        self._overlaps = overlaps
        self._chunks = chunks
        self._first = first
        self._tail = (None,) * (len(inspect.signature(processor).parameters) - 3)

    def __call__(self, token_ids: Any, logits: Any) -> None:
        made = len(token_ids) - self._prompt
        if not made and self._first is not None:
            logits.fill_(float("-inf"))
            logits[self._first] = 0.0
            return
        if not made:
            for _ in range(self._chunks - 1):
                self._call(token_ids, logits.clone().zero_())
        self._call(token_ids[:-1] if self._overlaps and made else token_ids, logits)

    def _call(self, token_ids: Any, logits: Any) -> None:
        self._processor(self._request_id, logits.view(1, 1, -1), [list(token_ids)], *self._tail)


def sampling_of(fields: dict[str, Any], **changes: Any) -> SamplingParams:
    return SamplingParams(**{**fields, **changes})


def _bias(bias: Any, vocab_size: int) -> dict[int, float]:
    if bias is None:
        return {}
    if tuple(bias.shape) != (vocab_size,):
        raise RequestError(f"embedding_bias has the shape {tuple(bias.shape)}, not ({vocab_size},)")
    return {token: value for token, value in enumerate(bias.tolist()) if value}


def _guide(guided: Any, enabled: bool) -> Guide | None:
    if guided is None:
        return None
    if not enabled:
        raise RequestError("guided decoding needs guided_decoding_backend")
    if guided.json_object:
        return Guide("json_object")
    if guided.json is not None:
        schema = guided.json if isinstance(guided.json, str | dict) else guided.json.model_json_schema()
        return Guide("json_schema", schema if isinstance(schema, str) else json.dumps(schema))
    if guided.regex is not None:
        return Guide("regex", guided.regex)
    if guided.structural_tag is not None:
        raise RequestError(f"the stand-in has no structural tags: {guided.structural_tag}")
    return None if guided.grammar is None else Guide("grammar", guided.grammar)
