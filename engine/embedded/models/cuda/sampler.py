"""Sampling on a GPU: tables of what each slot asks for, and kernels that draw within the step's graph.

The host writes a slot's rows when a sequence enters it. After that a token costs the host nothing, except in two cases,
in which the token is drawn a second time when the host has seen the last one: a grammar needs its mask, and logits
processors and bad words of several tokens are computed by the reference, `engine/embedded/sampling/sampler.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from engine.embedded.grammar.compiler import fill_bitmask, new_bitmask
from engine.embedded.models.cuda import sampling_kernels
from engine.embedded.models.cuda.sampling_kernels import AN_END, COUNTED, FIELDS, IN_PROMPT, REPORT, TOP, Kernels
from engine.embedded.models.devices import to_device
from engine.embedded.sampling.sampler import Drawn, DrawnAhead, Report, Sampler, recorded, to_host
from engine.embedded.sampling.state import SamplerState

_NEVER = float("-inf")
_SEED_MASK = (1 << 64) - 1


class RowDraws(NamedTuple):
    """Results of the sampling kernels for each row of logits."""

    tokens: torch.Tensor
    """int64 [rows]"""
    reports: torch.Tensor
    """float32 [rows, REPORT], for rows whose log-probabilities are asked for."""


class CudaSampler(Sampler):
    """A `Sampler` for up to `rows` rows. `sampled` is the last token of each slot, int64 [slots]: a row's own is kept
    there."""

    def __init__(self, vocab_size: int, rows: int, sampled: torch.Tensor, eos_token_ids: Sequence[int]) -> None:
        device, slots = sampled.device, len(sampled)
        super().__init__(vocab_size, device)
        self._sampled = sampled
        self._kernels = Kernels(rows, vocab_size, device)
        self._table = torch.zeros((slots, FIELDS), dtype=torch.int32, device=device)
        self._biases = torch.zeros((slots, vocab_size), device=device)
        self._marks = torch.zeros((slots, vocab_size), dtype=torch.int32, device=device)
        self._ends = torch.tensor(sorted(eos_token_ids) or [0], dtype=torch.int32, device=device)
        self._masks = new_bitmask(rows, vocab_size)
        """Masks of guided rows, filled here and copied from here: memory that is new or not pinned takes longer."""
        if device.type == "cuda":
            self._masks = self._masks.pin_memory()
        self._masks_copied: torch.cuda.Event | None = None
        """When the device has them; None if it had none yet."""
        self._admitted = [-1] * slots
        """The admission that each slot's rows in the tables are of."""
        self.results = self.new_results(0)
        """Results of the last step, for the rows from which tokens are sampled."""
        self._copied: tuple[RowDraws | None, RowDraws] = None, self.results
        """The results of a step with drafts, and these on their way to the host."""

    @staticmethod
    def count_bytes(vocab_size: int, rows: int, slots: int) -> int:
        """Return about how many bytes the tables of slots and the logits of rows take."""
        return 4 * vocab_size * (2 * slots + rows)

    def new_results(self, rows: int) -> RowDraws:
        return RowDraws(
            torch.empty(rows, dtype=torch.int64, device=self._device),
            torch.empty((rows, REPORT), device=self._device),
        )

    def run(self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor) -> RowDraws:
        """Draw a token for each row of `logits` [rows, vocab]; the others are the slots, positions and token ids of the
        step's inputs in these rows. Fits a CUDA graph. Steps with drafts may have more rows than the kernels have room
        for, which then draw several times."""
        results = self.new_results(len(logits))
        for start in range(0, len(logits), self._kernels.rows):
            part = slice(start, start + self._kernels.rows)
            self._kernels(
                logits[part],
                (self._table, self._biases, self._marks),
                self._ends,
                (results.tokens[part], self._sampled, results.reports[part]),
                rows=(slots[part], positions[part], tokens[part]),
            )
        return results

    def warm_up(self, dtype: torch.dtype, slot: int) -> None:
        """Have the kernels for guided rows compiled and loaded."""
        self.results = self.new_results(1)
        logits = torch.zeros((1, self._vocab_size), dtype=dtype, device=self._device)
        self._draw_guided(logits, [(0, slot, 0, 0)], self._masks[:1], self.results)

    def enter(self, slots: Sequence[int], admissions: Sequence[int], states: Sequence[SamplerState]) -> None:
        entered = [
            (slot, state)
            for slot, admission, state in zip(slots, admissions, states, strict=True)
            if self._admitted[slot] != admission
        ]
        if not entered:
            return
        for slot, state in entered:
            if state.biased:
                self._write_biases(slot, state)
            if state.penalised or state.sampling.min_tokens:
                self._write_marks(slot, state)
        rows = np.stack([_parameters(state, self._vocab_size) for _, state in entered])
        places = to_device([slot for slot, _ in entered], torch.int64, self._device)
        self._table[places] = to_device(rows, torch.int32, self._device)
        for slot, admission in zip(slots, admissions, strict=True):  # last: what has failed is written again
            self._admitted[slot] = admission

    def waits(self, states: Sequence[SamplerState]) -> bool:
        return any(state.by_host for state in states)

    def takes_drafts(self, state: SamplerState) -> bool:
        """See `Sampler`. Penalties do not: the kernels would count input tokens that turn out to be wrong."""
        return not state.penalised

    def draws_alone(self, state: SamplerState) -> bool:
        """See `Sampler`."""
        return not (state.needs_history or state.sampling.logprobs is not None)

    def draw(
        self,
        logits: torch.Tensor,
        states: Sequence[SamplerState],
        slots: Sequence[int] = (),
        rows: Sequence[int] | None = None,
    ) -> Drawn:
        results = self.results
        if rows is not None:
            if not any(state.by_host or state.sampling.logprobs is not None for state in states):
                return DrawnAhead(results.tokens, rows)
            known = self._known(states)
            if known is not None and not any(state.by_host or (state.sampling.logprobs or 0) > TOP for state in states):
                tokens, reports = known.tokens[rows], known.reports[rows]
                return Drawn(tokens, self._reports(logits, tokens, reports, states))
            places = to_device(rows, torch.int64, self._device)
            results = RowDraws(results.tokens[places], results.reports[places])
            logits = logits[places]
        tokens, reports = results
        assert len(tokens) == len(states), "the runner drew for the rows of its last step"
        by_host = [row for row, state in enumerate(states) if state.by_host]
        hosted = [row for row in by_host if states[row].by_reference]
        if len(hosted) < len(by_host):
            guided = [row for row in by_host if not states[row].by_reference]
            self._guide(logits, guided, [states[row] for row in guided], slots, results)
        if hosted:
            places = to_device(hosted, torch.int64, self._device)
            drawn = super().draw(logits[places], [states[row] for row in hosted]).tokens
            tokens[places] = drawn
            self._sampled[to_device([slots[row] for row in hosted], torch.int64, self._device)] = drawn
        return Drawn(tokens, self._reports(logits, tokens, reports, states))

    def _known(self, states: Sequence[SamplerState]) -> RowDraws | None:
        """Return the results of a step with drafts in the host's memory; None when the first tokens of its sequences
        are drawn, with which these come. So further tokens wait for the device only if a sequence is guided, or lists
        more log-probabilities than the kernels do."""
        if self._copied[0] is self.results:
            return self._copied[1]
        reports = self.results.reports
        if any(state.sampling.logprobs is not None for state in states):
            reports = to_host(reports)
        else:
            reports = torch.empty(reports.shape)  # nobody looks at them
        self._copied = self.results, RowDraws(to_host(self.results.tokens), reports)
        return None

    def _guide(
        self,
        logits: torch.Tensor,
        rows: Sequence[int],
        states: Sequence[SamplerState],
        slots: Sequence[int],
        results: RowDraws,
    ) -> None:
        """Draw rows with a grammar again, now that its masks are known."""
        if self._masks_copied is not None:
            self._masks_copied.synchronize()
        masks = self._masks[: len(rows)]
        masks.numpy().fill(-1)
        fill_bitmask(masks, {index: state.matcher for index, state in enumerate(states) if state.matcher is not None})
        header = [
            (row, slots[row], state.num_prompt + state.position - 1, 0) for row, state in zip(rows, states, strict=True)
        ]
        self._draw_guided(logits, header, masks, results)

    def _draw_guided(
        self,
        logits: torch.Tensor,
        header: Sequence[tuple[int, int, int, int]],
        masks: torch.Tensor,
        results: RowDraws,
    ) -> None:
        tokens, reports = results
        on_device = to_device(header, torch.int32, self._device), masks.to(self._device, non_blocking=True)
        self._masks_copied = recorded(self._device)
        self._kernels(
            logits,
            (self._table, self._biases, self._marks),
            self._ends,
            (tokens, self._sampled, reports),
            guided=on_device,
        )

    def _reports(
        self, logits: torch.Tensor, tokens: torch.Tensor, reports: torch.Tensor, states: Sequence[SamplerState]
    ) -> list[tuple[Sequence[int], Report]]:
        """Return log-probabilities by rows: the kernels' where these draw and list as many, else the reference's."""
        asked = [row for row, state in enumerate(states) if state.sampling.logprobs is not None]
        if not asked:
            return []
        fast = [row for row in asked if not states[row].by_reference and (states[row].sampling.logprobs or 0) <= TOP]
        found: list[tuple[Sequence[int], Report]] = []
        if fast:
            found.append((fast, Report(reports, [states[row].sampling.logprobs or 0 for row in fast], rows=fast)))
        if len(fast) < len(asked):
            slow = sorted(set(asked).difference(fast))
            rows = to_device(slow, torch.int64, self._device)
            counts = [states[row].sampling.logprobs or 0 for row in slow]
            found.append((slow, Report.of(logits[rows].float(), tokens[rows], counts)))
        return found

    def _write_biases(self, slot: int, state: SamplerState) -> None:
        sampling, row = state.sampling, self._biases[slot]
        row.fill_(_NEVER if sampling.allowed_token_ids else 0.0)
        values = {token: sampling.logit_bias.get(token, 0.0) for token in sampling.allowed_token_ids}
        if not sampling.allowed_token_ids:
            values = dict(sampling.logit_bias)
        values |= {words[0]: _NEVER for words in sampling.bad_words if len(words) == 1}
        self._put(row, values)

    def _write_marks(self, slot: int, state: SamplerState) -> None:
        row, marks = self._marks[slot], dict[int, int]()
        row.zero_()
        if state.penalised:
            marks = {token: COUNTED * count for token, count in Counter(state.tokens[state.num_prompt :]).items()}
            for token in set(state.tokens[: state.num_prompt]):
                marks[token] = marks.get(token, 0) | IN_PROMPT
        for token in state.ends:
            marks[token] = marks.get(token, 0) | AN_END
        self._put(row, marks)

    def _put(self, row: torch.Tensor, values: dict[int, int] | dict[int, float]) -> None:
        if values:
            row[to_device(list(values), torch.int64, self._device)] = to_device(
                list(values.values()), row.dtype, self._device
            )


def _parameters(state: SamplerState, vocab_size: int) -> NDArray[np.int32]:
    """Return a slot's row of the table of parameters, int32 [FIELDS]."""
    sampling = state.sampling
    top_k = sampling.top_k if 0 < sampling.top_k < vocab_size else 0
    truncated = not state.greedy and (top_k > 0 or sampling.top_p < 1)
    reported = sampling.logprobs is not None and sampling.logprobs <= TOP
    flags = (
        (not state.greedy) * sampling_kernels.RANDOM.value
        + truncated * sampling_kernels.TRUNCATED.value
        + state.biased * sampling_kernels.BIASED.value
        + state.penalised * sampling_kernels.PENALISED.value
        + reported * sampling_kernels.REPORTED.value
    )
    seed = state.seed & _SEED_MASK
    values = np.zeros(FIELDS, dtype=np.int32)
    values[[0, 2, 10, 11, 12, 13]] = (
        flags,
        top_k,
        state.num_prompt,
        len(state.tokens),
        sampling.min_tokens if state.ends else 0,
        (sampling.logprobs or 0) if reported else 0,
    )
    values.view(np.float32)[[1, 3, 4, 5, 6, 7]] = (
        sampling.temperature,
        sampling.top_p,
        sampling.min_p,
        sampling.repetition_penalty,
        sampling.frequency_penalty,
        sampling.presence_penalty,
    )
    values.view(np.uint32)[[8, 9]] = seed & 0xFFFFFFFF, seed >> 32
    return values
