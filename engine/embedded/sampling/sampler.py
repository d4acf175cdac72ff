"""Sampling for a batch of sequences: temperature, truncation, randomness and log-probabilities.

Order, for each row: log-probabilities of the raw logits; bias, penalties, masks and processors (`penalties.py`); then
greedy, or temperature, top-k, top-p, min-p and one draw. A draw is a pure function of (seed, position in the output,
attempt).

On a CPU most tokens are drawn without their grammar's mask, and the grammar is asked whether it allows the one drawn.
That takes about a microsecond, a mask 5 to 400. If the token is refused, the mask is computed and a token drawn in a
second attempt. Greedy tokens are the same either way, and those of a race up to rounding. So is the distribution of
others, as the second draw is independent of the first: p(x) + (1 - p(allowed)) p(x) / p(allowed) = p(x) / p(allowed).

Requests that name a seed are drawn by a race, which shrugs off the rounding errors by which logits differ from batch to
batch; the others by the cheaper quantile.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from engine.embedded.sampling.penalties import edit, guide
from engine.embedded.sampling.state import SamplerState
from engine.embedded.sampling.truncation import Truncation, largest, put, quantile, race, take, weigh
from engine.types import Logprob, TokenLogprobs

_LOWEST_LOGPROB = -9999.0  # what OpenAI reports for a probability of zero; JSON has no infinity
SPARE = 8
"""Alternatives listed beyond those asked for, so that ties at the end are cut by id and not by accident."""
_ROWS_AT_ONCE = 64  # prompt positions turned into float32 at a time: 12 MiB for a vocabulary of 49152


class Sampled(NamedTuple):
    """The tokens that one step sampled for a sequence: one or several."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One entry for each token if asked for, else empty."""


class Sampler:
    """Draws one token for each row of a batch."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device

    def enter(self, slots: Sequence[int], admissions: Sequence[int], states: Sequence[SamplerState]) -> None:
        """Note, before the step that draws for them, which sequences are in these slots; `admissions` as in
        `StepInput`."""

    def waits(self, states: Sequence[SamplerState]) -> bool:
        """Return whether `draw` has to come after the last token of each state was accepted."""
        return any(state.needs_history for state in states)

    def takes_drafts(self, state: SamplerState) -> bool:
        """Return whether several tokens of a sequence can be drawn after one step."""
        return True

    def draws_alone(self, state: SamplerState) -> bool:
        """Return whether the device draws tokens of a sequence, and tells nothing but these, without the host."""
        return False

    def sample(self, logits: torch.Tensor, states: Sequence[SamplerState]) -> list[Sampled]:
        """Sample for each state, one token. `logits` is [len(states), vocab] of any float type and may be changed.
        Does not call `accept`."""
        return self.draw(logits, states).results()

    def draw(
        self,
        logits: torch.Tensor,
        states: Sequence[SamplerState],
        slots: Sequence[int] = (),
        rows: Sequence[int] | None = None,
    ) -> Drawn:
        """Sample as `sample` does, without waiting: on a GPU this returns as soon as all is queued. `slots` are those
        of the states; a runner's own sampler keeps the tokens for these. `rows`: the row of `logits` for each state, if
        a state has several; those behind its first are drawn when the tokens before have come."""
        if rows is not None:
            logits = pick(logits, rows)
        assert logits.shape == (len(states), self._vocab_size)
        if all(state.plain for state in states):
            return Drawn(self._largest(logits))
        edited = [row for row, state in enumerate(states) if state.edited]
        reported = [row for row, state in enumerate(states) if state.sampling.logprobs is not None]
        raw = (logits[reported] if edited else take(logits, reported)).float() if reported else None
        logits = logits.float().contiguous()
        asks = bool(edited) and logits.device.type == "cpu"  # elsewhere it would wait for the tokens
        if edited:
            part = take(logits, edited)
            edit(part, [states[row] for row in edited], guide_all=not asks)
            put(logits, edited, part)
        tokens = self._choose(logits, states)
        if asks:
            self._replace_refused(tokens, logits, states)
        if raw is None:
            return Drawn(tokens)
        counts = [states[row].sampling.logprobs or 0 for row in reported]
        return Drawn(tokens, [(reported, self._report(raw, tokens, reported, counts))])

    def _largest(self, logits: torch.Tensor) -> torch.Tensor | list[int]:
        """Return the id of the largest logit of each row, int64 [rows] or a list: the first one, if several are."""
        return largest(logits)

    def _replace_refused(
        self, tokens: torch.Tensor | list[int], logits: torch.Tensor, states: Sequence[SamplerState]
    ) -> None:
        """Draw again, in place, tokens that were drawn without their grammar's mask and that it does not allow."""
        refused = [
            row
            for row, state in enumerate(states)
            if state.matcher and state.draws_before_mask and not state.matcher.allows(int(tokens[row]))
        ]
        if not refused:
            return
        part, again = take(logits, refused), [states[row] for row in refused]
        guide(part, again)
        for row, token in zip(refused, self._choose(part, again, attempt=1), strict=True):
            tokens[row] = int(token)

    def _choose(
        self, logits: torch.Tensor, states: Sequence[SamplerState], attempt: int = 0
    ) -> torch.Tensor | list[int]:
        """Return a token, int64 [len(states)] or a list, for each row of `logits`, float32 [len(states), vocab], that
        is ready to draw from. `attempt` is 1 if the first tokens drawn for these rows were refused, else 0."""
        random = [row for row, state in enumerate(states) if not state.greedy]
        if len(random) == len(states):
            return self._draw(logits, states, attempt)
        tokens = largest(logits)
        if random:
            tokens[random] = self._draw(take(logits, random), [states[row] for row in random], attempt)
        return tokens

    def _draw(self, logits: torch.Tensor, states: Sequence[SamplerState], attempt: int) -> torch.Tensor:
        """Return a random token for each row."""
        weights = weigh(logits, [Truncation.of(state.sampling) for state in states])
        seeded = [row for row, state in enumerate(states) if state.sampling.seed is not None]
        free = [row for row, state in enumerate(states) if state.sampling.seed is None]
        tokens = logits.new_empty(len(states), dtype=torch.int64)
        if seeded:
            tokens[seeded] = race(weights, seeded, [(states[row].seed, states[row].position) for row in seeded])
        if free:
            tokens[free] = quantile(
                take(weights, free), [uniform(states[row].seed, states[row].position, attempt) for row in free]
            )
        return tokens

    def _report(
        self, logits: torch.Tensor, tokens: torch.Tensor | list[int], rows: Sequence[int], counts: Sequence[int]
    ) -> Report:
        """Report on the tokens of some rows; `logits` and `counts` are of these rows alone. See `Report.of`."""
        return Report.of(logits, torch.as_tensor(tokens)[rows], counts)


class Drawn:
    """A token for each row, and log-probabilities for some. `results` waits for them."""

    ahead: list[int] | None = None
    """Tokens of all rows of a step with drafts, each drawn as if the draft before it were right; None if only the first
    of each sequence has been drawn. Known after `results`."""

    def __init__(self, tokens: torch.Tensor | list[int], reports: Sequence[tuple[Sequence[int], Report]] = ()) -> None:
        """`tokens`: int64 [rows] on the device, or a list if they are known already; `reports`: for some rows each."""
        self._tokens, self._reports = tokens, reports
        self._on_host = to_host(tokens) if isinstance(tokens, torch.Tensor) else tokens
        self._done = recorded(tokens.device) if isinstance(tokens, torch.Tensor) else None

    @property
    def tokens(self) -> torch.Tensor:
        """The tokens, int64 [rows], where they were drawn."""
        return self._tokens if isinstance(self._tokens, torch.Tensor) else torch.tensor(self._tokens, dtype=torch.int64)

    def results(self) -> list[Sampled]:
        """Return the sampled tokens of each sequence, in the order of rows."""
        tokens = self.arrived()
        if not self._reports:
            return [Sampled((token,)) for token in tokens]
        entries: dict[int, tuple[TokenLogprobs]] = {}
        for rows, report in self._reports:
            found = report.entries([tokens[row] for row in rows])
            entries |= {row: (entry,) for row, entry in zip(rows, found, strict=True)}
        return [Sampled((token,), entries.get(row, ())) for row, token in enumerate(tokens)]

    def arrived(self) -> list[Any]:
        """Wait for the tokens and return them: a list for each dimension."""
        if self._done is not None:
            self._done.synchronize()
        found = self._on_host
        return found.tolist() if isinstance(found, torch.Tensor) else found


class DrawnAhead(Drawn):
    """A token for every row of a step with drafts, of which `rows` are the first of each sequence."""

    def __init__(self, tokens: torch.Tensor, rows: Sequence[int]) -> None:
        super().__init__(tokens)
        self._rows = rows

    def results(self) -> list[Sampled]:
        self.ahead = self.arrived()
        return [Sampled((self.ahead[row],)) for row in self._rows]


def pick(logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Return rows of logits. On a CPU without torch's threads, which go on to take turns with those that compute."""
    if len(rows) == 1:
        return logits[rows[0] : rows[0] + 1]
    if logits.device.type == "cpu" and logits.dtype == torch.float32:
        return torch.from_numpy(logits.numpy()[rows])
    return logits[rows]


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in the host's memory, complete once the stream has come this far."""
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def recorded(device: torch.device) -> torch.cuda.Event | None:
    """Return an event that comes when the device has done what it was given until now; None for a CPU."""
    if device.type == "cpu":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


def prompt_logprobs(logits: torch.Tensor, targets: Sequence[int], count: int) -> list[TokenLogprobs]:
    """Return log-probabilities of prompt tokens: `logits` is [N, vocab], `targets[i]` the prompt token that follows
    position i."""
    report: list[TokenLogprobs] = []
    for start in range(0, len(targets), _ROWS_AT_ONCE):
        part = targets[start : start + _ROWS_AT_ONCE]
        chosen = torch.tensor(part, device=logits.device)
        found = Report.of(logits[start : start + len(part)].float(), chosen, [count] * len(part))
        if (done := recorded(logits.device)) is not None:
            done.synchronize()
        report += found.entries(part)
    return report


def uniform(seed: int, position: int, attempt: int = 0) -> float:
    """Return the random number in [0, 1) that draws output token `position`: 53 bits of a hash, the same on every
    machine. Each `attempt` has its own."""
    key = seed.to_bytes(16, "little", signed=True) + position.to_bytes(8, "little")
    digest = hashlib.blake2b(key, digest_size=8, salt=attempt.to_bytes(1)).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


class Report:
    """Log-probabilities of a chosen token, and of the `counts[i]` best, for each row.

    `values`, float32 [rows, 3 + 2 n], is on its way to the host: the log of the sum of exponentials, the chosen token's
    logit and rank, then the n largest logits or fewer, and their ids, which float32 holds up to 2^24.
    """

    def __init__(
        self, values: torch.Tensor, counts: Sequence[int], spare: int = 0, rows: Sequence[int] | None = None
    ) -> None:
        """`spare`: the logits listed beyond `counts`, among which ties with the last one may be. `rows`: those of
        `values` that are reported, if not all: so few values are copied sooner than picked."""
        self._counts = counts
        self._spare = spare
        self._rows = rows
        self._values = to_host(values)

    @classmethod
    def of(cls, logits: torch.Tensor, chosen: torch.Tensor, counts: Sequence[int]) -> Report:
        """Report on `chosen`, int64 [rows], by `logits`, float32 [rows, vocab]. The computation is queued at once."""
        values = logits.gather(1, chosen.unsqueeze(1))
        ranks = (logits > values).sum(dim=1, keepdim=True) + 1
        best = logits.topk(min(max(counts) + SPARE, logits.shape[1]), dim=1)
        norms = logits.logsumexp(dim=1, keepdim=True)
        return cls(torch.cat((norms, values, ranks.float(), best.values, best.indices.float()), dim=1), counts, SPARE)

    def entries(self, tokens: Sequence[int]) -> list[TokenLogprobs]:
        """Return for each row the chosen token, then its alternatives; ties are listed by id. To be called when the
        stream has come this far."""
        report: list[TokenLogprobs] = []
        values = self._values.numpy()
        if self._rows is not None:
            values = values[self._rows]
        listed = (values.shape[1] - 3) // 2
        half = min(listed, max(self._counts) + self._spare)
        lists = values[:, 3 : 3 + half].tolist(), values[:, 3 + listed : 3 + listed + half].tolist()
        for token, (norm, value, own_rank), best, ids, count in zip(
            tokens, values[:, :3].tolist(), *lists, self._counts, strict=True
        ):
            entries = [_logprob(token, value - norm, int(own_rank))]
            if count:
                pairs = list(zip(best, ids, strict=True))[: count + self._spare]
                alternatives = sorted(pairs, key=_by_logit) if len(pairs) > 1 else pairs
                rank = 1
                for index, (other, token_id) in enumerate(alternatives[:count]):
                    if other < alternatives[index - 1][0]:
                        rank = index + 1
                    entries.append(_logprob(int(token_id), other - norm, rank))
            report.append(tuple(entries))
        return report


def _by_logit(pair: tuple[float, float]) -> tuple[float, float]:
    logit, token_id = pair
    return -logit, token_id


def _logprob(token_id: int, logprob: float, rank: int) -> Logprob:
    return Logprob(token_id, max(logprob, _LOWEST_LOGPROB), rank)
