"""Sampling parameters that TensorRT-LLM honours, by version, sampler and kind of speculation.

`TABLE` feeds the checks of requests, `/server_info` and docs/tensorrt-llm.md; tests/contract/trtllm_behaviours.json has
the sources. What the engine would ignore is done by logits processors of ours (TRTLLM_SAMPLING=processors), or refused.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from msgspec.structs import replace

from engine.errors import InvalidRequest
from engine.trtllm.sampling import MASKED
from engine.types import SamplingParams

Sampler = Literal["TorchSampler", "TRTLLMSampler", "two models", "one model"]
"""The part of TensorRT-LLM that draws tokens. Speculation has its own: with `two models` the TorchSampler checks
drafts; `one model` has the drafts in the target's forward pass, which samples, too."""
Way = Literal["yes", "no", "advanced", "one end", "one token", "sampled"]

NOTES: Mapping[Way, str] = {
    "advanced": "`speculative_config.allow_advanced_sampling`, which this server sets unless you do",
    "one end": "if one id ends the sequence, and the engine gets the prompt as token ids",
    "one token": "words of one token, by a bias",
    "sampled": "the sampled token's, without alternatives",
}
"""Conditions under which a parameter is honoured."""


class Column(NamedTuple):
    newer: bool
    """Whether the version is main of August 2026 or later, and not 1.2.1."""
    sampler: Sampler

    @property
    def title(self) -> str:
        version = "main" if self.newer else "1.2.1"
        return f"{version} {self.sampler}" if "Sampler" in self.sampler else f"{version}, speculation in {self.sampler}"


COLUMNS = (
    Column(False, "TorchSampler"), Column(False, "TRTLLMSampler"), Column(False, "two models"),
    Column(False, "one model"), Column(True, "TorchSampler"), Column(True, "two models"), Column(True, "one model"),
)  # fmt: skip
TABLE: Mapping[str, tuple[Way, ...]] = {
    "temperature": ("yes", "yes", "yes", "advanced", "yes", "yes", "yes"),
    "top_p": ("yes", "yes", "yes", "advanced", "yes", "yes", "yes"),
    "top_k": ("yes", "yes", "yes", "advanced", "yes", "yes", "yes"),
    "min_p": ("no", "yes", "no", "no", "yes", "yes", "no"),
    "repetition_penalty": ("no", "yes", "no", "no", "yes", "yes", "yes"),
    "presence_penalty": ("no", "yes", "no", "no", "yes", "yes", "yes"),
    "frequency_penalty": ("no", "yes", "no", "no", "yes", "yes", "yes"),
    "seed": ("no", "yes", "no", "no", "yes", "no", "no"),
    "logit_bias": ("yes", "yes", "yes", "no", "yes", "yes", "no"),
    "allowed_token_ids": ("yes", "yes", "yes", "no", "yes", "yes", "no"),
    "bad_words": ("one token", "one token", "one token", "no", "one token", "one token", "no"),
    "min_tokens": ("one end", "one end", "one end", "no", "one end", "one end", "no"),
    "logprobs": ("yes", "sampled", "yes", "no", "yes", "yes", "no"),
    "processors": ("yes", "yes", "no", "no", "yes", "no", "no"),
    "reasoning_budget": ("no", "no", "no", "no", "no", "no", "no"),
}
"""Support for each parameter, by column. `processors` are logits processors, those of this server too."""

_NEUTRAL: dict[str, Any] = {
    "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "seed": None,
    "logit_bias": {}, "allowed_token_ids": (), "bad_words": (), "min_tokens": 0, "reasoning_budget": None,
}  # fmt: skip
"""Parameters that our logits processor takes over, and the values that leave nothing to the engine."""
_ASKED: Mapping[str, Callable[[SamplingParams], bool]] = {
    "temperature": lambda sampling: sampling.temperature > 0 and sampling.top_k != 1,
    **dict.fromkeys(("top_p", "top_k"), lambda sampling: False),  # without effect if the temperature is 0
    "logprobs": lambda sampling: sampling.logprobs is not None,
    "processors": lambda sampling: bool(sampling.processors),
    "seed": lambda sampling: sampling.seed is not None and draws(sampling),
    "min_p": lambda sampling: sampling.min_p > 0 and draws(sampling),
}


def draws(sampling: SamplingParams) -> bool:
    """Return whether a token is drawn, and not the likeliest one taken."""
    return sampling.temperature > 0 and sampling.top_k != 1


class Edits(NamedTuple):
    """The work of our logits processor for one request (`engine/trtllm/processors.py`)."""

    sampling: SamplingParams
    eos_token_ids: tuple[int, ...]
    num_prompt: int | None
    """Tokens of the prompt; None if the engine makes them, of text and images."""


class Support:
    """Decides for each request what the engine does, what our logits processor does, and what is refused."""

    def __init__(self, arguments: Mapping[str, Any], *, processors: bool = False, newer: bool = False) -> None:
        self._column = column_of(arguments, newer=newer)
        self._ways = {name: ways[COLUMNS.index(self._column)] for name, ways in TABLE.items()}
        self._advanced = bool((arguments.get("speculative_config") or {}).get("allow_advanced_sampling"))
        self._true_tokens = bool(arguments.get("disable_overlap_scheduler"))
        self._processors = processors and self._ways["processors"] == "yes" and self._true_tokens

    @property
    def refused(self) -> dict[str, str]:
        """Parameters that are refused, or honoured under conditions only, each with the reason."""
        return {
            name: self._reason(name) if way in ("no", "advanced") else f"only {NOTES[way]}; {self._reason(name)}"
            for name, way in self._ways.items()
            if way != "yes" and not (self._taken_over(name) or (way == "advanced" and self._advanced))
        }

    def split(
        self, sampling: SamplingParams, eos_token_ids: tuple[int, ...], num_prompt: int | None
    ) -> tuple[SamplingParams, Edits | None]:
        """Return what the engine is asked for, and what our logits processor does. Raises InvalidRequest.

        If the processor does anything it does everything from bias to masks, since their order matters.
        """
        lacking = [
            name
            for name in TABLE
            if _asked(name, sampling) and not self._honours(name, sampling, num_prompt, eos_token_ids)
        ]
        for name in lacking:
            if not self._taken_over(name):
                raise InvalidRequest(self._reason(name), name)
        if not lacking and not sampling.processors:
            return self._as_the_engine_takes_it(sampling, eos_token_ids, num_prompt), None
        if sampling.processors and not self._true_tokens:
            raise InvalidRequest("logits processors need the argument disable_overlap_scheduler: true", "processors")
        self._check_processed(sampling, lacking)
        return _without(sampling), Edits(sampling, eos_token_ids, num_prompt)

    def _check_processed(self, sampling: SamplingParams, lacking: list[str]) -> None:
        """Refuse what a logits processor cannot do well: the engine looks at logits and masks after it."""
        cause = lacking[0] if lacking else "processors"
        if sampling.logprobs is not None:
            raise InvalidRequest(
                f"with {cause!r}, TensorRT-LLM's log-probabilities would be those of changed logits", "logprobs"
            )
        if sampling.guide is not None and draws(sampling) and (sampling.seed is not None or sampling.min_p > 0):
            name = "seed" if sampling.seed is not None else "min_p"
            raise InvalidRequest(f"{name!r} needs the guide's mask, which TensorRT-LLM applies later", name)

    def _honours(
        self, name: str, sampling: SamplingParams, num_prompt: int | None, eos_token_ids: tuple[int, ...]
    ) -> bool:
        match self._ways[name]:
            case "advanced":
                return self._advanced
            case "one token":
                return all(len(words) == 1 for words in sampling.bad_words)
            case "one end":
                ends = _ends(sampling, eos_token_ids)
                return not ends or (num_prompt is not None and ends == set(eos_token_ids[:1]))
            case "sampled":
                return sampling.logprobs == 0
            case way:
                counts = name in ("presence_penalty", "frequency_penalty")
                return way == "yes" and not (counts and num_prompt is None)

    def _as_the_engine_takes_it(
        self, sampling: SamplingParams, eos_token_ids: tuple[int, ...], num_prompt: int | None
    ) -> SamplingParams:
        """Return parameters with the same effect: 1.2.1's TorchSampler counts the prompt's tokens in `min_tokens`, and
        with `ignore_eos` masks another id than an end (#12166, #12358)."""
        changes: dict[str, Any] = {}
        if sampling.bad_words:
            changes["bad_words"] = ()
            changes["logit_bias"] = {**sampling.logit_bias, **{words[0]: MASKED for words in sampling.bad_words}}
        if sampling.min_tokens:
            counts_prompt = self._column.sampler in ("TorchSampler", "two models") and not self._column.newer
            ends = _ends(sampling, eos_token_ids)
            changes["min_tokens"] = sampling.min_tokens + (num_prompt or 0) * counts_prompt if ends else 0
        return replace(sampling, **changes) if changes else sampling

    def _taken_over(self, name: str) -> bool:
        """Return whether our logits processor does it, where the engine does not."""
        return self._processors and name in _NEUTRAL

    def _reason(self, name: str) -> str:
        """Return why a parameter is refused: the engine, and the setting that decides."""
        newer, sampler = self._column
        engine = f"TensorRT-LLM {'1.3' if newer else '1.2.1'}"
        if self._ways[name] == "advanced":
            return f"{engine} decodes greedily with speculation: speculative_config.allow_advanced_sampling is false"
        if sampler in ("one model", "two models"):
            return f"{engine} does not honour {name!r} with this speculative_config"
        cures = []
        if name in _NEUTRAL:
            cures.append("TRTLLM_SAMPLING=processors")
        if not newer and sampler == "TorchSampler" and TABLE[name][1] == "yes":
            cures.append("the argument sampler_type: TRTLLMSampler")
        cure = f"; set {' or '.join(cures)}" if cures else ""
        return f"{engine}'s {sampler} does not honour {name!r}{cure}"


def column_of(arguments: Mapping[str, Any], *, newer: bool) -> Column:
    """Return the column of an engine with these arguments."""
    speculation = one_model(arguments)
    if speculation is not None:
        return Column(newer, "one model" if speculation else "two models")
    asked: Sampler = "TRTLLMSampler" if arguments.get("sampler_type") == "TRTLLMSampler" else "TorchSampler"
    return Column(newer, "TorchSampler" if newer else asked)


def one_model(arguments: Mapping[str, Any]) -> bool | None:
    """Return whether speculation happens in the target model's forward pass; None if there is none.

    As `spec_dec_mode` of `MTPDecodingConfig` and `EagleDecodingConfig` decides.
    """
    config = arguments.get("speculative_config")
    if not config:
        return None
    if config.get("decoding_type") == "MTP":
        return bool(config.get("mtp_eagle_one_model", True) or config.get("use_mtp_vanilla"))
    return config.get("decoding_type") in ("Eagle", "Eagle3") and config.get("eagle3_one_model", True) is not False


def markdown() -> str:
    """Return the table of docs/tensorrt-llm.md."""
    notes = {way: number for number, way in enumerate(NOTES, 1)}
    rows = [["parameter", *(column.title for column in COLUMNS)], ["---"] * (len(COLUMNS) + 1)]
    for name, ways in TABLE.items():
        shown = [f"yes, {notes[way]}" if way in NOTES else "-" if way == "no" else way for way in ways]
        rows.append([f"`{name}`" if name != "processors" else "logits processors", *shown])
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([*lines, "", *(f"{number}. {NOTES[way]}" for way, number in notes.items())])


def _asked(name: str, sampling: SamplingParams) -> bool:
    if (asked := _ASKED.get(name)) is not None:
        return asked(sampling)
    return bool(getattr(sampling, name) != _NEUTRAL[name])


def _ends(sampling: SamplingParams, eos_token_ids: tuple[int, ...]) -> set[int]:
    return {*(() if sampling.ignore_eos else eos_token_ids), *sampling.stop_token_ids}


def _without(sampling: SamplingParams) -> SamplingParams:
    """Return what is left to the engine when our logits processor edits the logits: nothing if that draws the token,
    and the temperature alone if that truncates the distribution."""
    left = replace(sampling, **_NEUTRAL, processors=())
    if draws(sampling) and sampling.seed is not None:
        return replace(left, temperature=0.0)
    return replace(left, top_p=1.0, top_k=0) if draws(sampling) and sampling.min_p > 0 else left
