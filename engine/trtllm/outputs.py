"""Converts what TensorRT-LLM yields, one mutable object with cumulative outputs, to deltas."""

from collections.abc import Mapping, Sequence
from typing import Any

from engine.errors import EngineFailure
from engine.media import Unexpanded
from engine.trtllm.performance import performance, queue_seconds
from engine.types import Delta, FinishReason, GenerateRequest, Logprob, PromptReport, TokenLogprobs

FLOOR = -9999.0
"""Log-probability of tokens for which the engine reports none."""


class Outputs:
    """The part of one request's output that has been passed on.

    After a handoff, the first token and the prompt's report have been passed on. `repeats` says whether the engine
    repeats that token; it does not when the token was part of its prompt.
    """

    def __init__(self, request: GenerateRequest, eos_token_ids: Sequence[int], *, repeats: bool = True) -> None:
        self._request = request
        self._eos = frozenset(eos_token_ids)
        self._end_id = eos_token_ids[0] if eos_token_ids else None
        self._tokens = len(request.handoff.first.token_ids) if request.handoff is not None and repeats else 0
        self._reported = request.handoff is not None

    def feed(self, result: Any) -> Delta | None:
        """Return the delta of a response, or None if there is nothing to pass on yet.

        Raises EngineFailure if the engine ended the request, or if the response is malformed.
        """
        try:
            return self._delta(result)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise EngineFailure(f"malformed response of the engine: {type(error).__name__}: {error}") from error

    def _delta(self, result: Any) -> Delta | None:
        output = result.outputs[0]
        if output.finish_reason in ("cancelled", "timeout"):
            raise EngineFailure(f"the engine ended the request: {output.finish_reason}")
        sampling = self._request.sampling
        scored = sampling.prompt_logprobs is None or self._reported or bool(output.prompt_logprobs)
        finish: FinishReason | None = (
            None if output.finish_reason is None else "stop" if output.finish_reason == "stop" else "length"
        )
        if not scored and finish is None:
            return None  # the first delta waits for the prompt's log-probabilities
        if sampling.max_tokens == 0:
            if finish is None:
                return None
            measured = performance(output.request_perf_metrics, 0)
            return Delta((), finish_reason="length", prompt=self._report(result, output), performance=measured)
        tokens = tuple(output.token_ids[self._tokens :])
        if not tokens and finish is None:
            return None
        logprobs = self._new_logprobs(output, tokens)
        self._tokens += len(tokens)
        stop_reason = (
            output.stop_reason
            if isinstance(output.stop_reason, int) and output.stop_reason in sampling.stop_token_ids
            else None
        )
        if finish == "stop":
            tokens, logprobs = self._with_end(output, tokens, logprobs, stop_reason)
        measured = None if finish is None else performance(output.request_perf_metrics, self._tokens)
        report = None if self._reported else self._report(result, output)
        return Delta(tokens, logprobs, finish, stop_reason, report, performance=measured)

    def _with_end(
        self, output: Any, tokens: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...], stop_reason: int | None
    ) -> tuple[tuple[int, ...], tuple[TokenLogprobs, ...]]:
        """Append the token that ended the sequence, which the engine may have cut off."""
        end = output.stop_reason if isinstance(output.stop_reason, int) else self._end_id
        end = end if stop_reason is None else stop_reason
        last = output.token_ids[-1] if output.token_ids else None
        if end is None or last == end or (stop_reason is None and last in self._eos):
            return tokens, logprobs
        if self._request.sampling.logprobs is not None:
            logprobs = (*logprobs, (Logprob(end, FLOOR, 1),))
        return (*tokens, end), logprobs

    def _report(self, result: Any, output: Any) -> PromptReport:
        self._reported = True
        asked, expanded = self._request.sampling.prompt_logprobs, isinstance(self._request.media, Unexpanded)
        prompt = tuple(result.prompt_token_ids) if expanded else self._request.prompt_token_ids
        logprobs = None if asked is None else _of_prompt(output.prompt_logprobs or [], prompt, asked)
        cached = min(result.cached_tokens or 0, len(prompt))
        return PromptReport(
            prompt_tokens=len(prompt) if expanded else 0,
            cached_tokens=cached,
            queue_seconds=queue_seconds(output.request_perf_metrics),
            logprobs=logprobs,
        )

    def _new_logprobs(self, output: Any, tokens: Sequence[int]) -> tuple[TokenLogprobs, ...]:
        asked = self._request.sampling.logprobs
        if asked is None:
            return ()
        entries = list(output.logprobs or [])[self._tokens :][: len(tokens)]
        entries += [{}] * (len(tokens) - len(entries))
        return tuple(_position(entry, token, asked) for entry, token in zip(entries, tokens, strict=True))


def _of_prompt(entries: Sequence[Any], prompt: Sequence[int], asked: int) -> tuple[TokenLogprobs | None, ...]:
    """Return an entry for each prompt token; the first is None. Entry i of the engine is for token i + 1.

    Raises ValueError if one is missing: it could be any other position's.
    """
    if len(entries) < len(prompt) - 1:
        raise ValueError(f"{len(entries)} log-probabilities for {len(prompt)} prompt tokens")
    found = list(zip(entries, prompt[1:], strict=False))
    if missing := [token for entry, token in found if isinstance(entry, Mapping) and token not in entry]:
        raise ValueError(f"no log-probability of prompt token {missing[0]}")
    return (None, *(_position(entry, token, asked) for entry, token in found))


def _position(entry: Any, token: int, asked: int) -> TokenLogprobs:
    """Return the token's log-probability, then `asked` alternatives by rank.

    `entry` is a mapping from token ids or, on some code paths, a number.
    """
    if not isinstance(entry, Mapping):
        return (Logprob(token, float(entry), 1),)
    ranked = sorted(entry.items(), key=lambda item: -item[1].logprob)
    found = {
        token_id: Logprob(token_id, value.logprob, value.rank or rank)
        for rank, (token_id, value) in enumerate(ranked, 1)
    }
    own = found.get(token, Logprob(token, FLOOR, len(found) + 1))
    return (own, *list(found.values())[:asked])
