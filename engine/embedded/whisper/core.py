"""The batch of a Whisper model: windows of speech are encoded, and their texts generated side by side."""

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import numpy as np
import torch

from engine.checkpoints.facts import read_model_facts
from engine.checkpoints.whisper import WhisperSizes, read_tokens
from engine.config import EmbeddedConfig, Tag
from engine.embedded.models.devices import device_of, dtype_of
from engine.embedded.whisper.alignment import spoken_times
from engine.embedded.whisper.decoder import Caches, SpeechDecoder
from engine.embedded.whisper.encoder import AudioEncoder, load_weights
from engine.embedded.whisper.rules import Rules
from engine.errors import EngineError, EngineFailure
from engine.media import Speech
from engine.stats import InflightBatchingStats, IterationStats, KvCacheStats
from engine.transfer.shared_bytes import readable
from engine.types import Delta, GenerateRequest, Logprob, PromptReport, TokenLogprobs

Outputs = list[tuple[str, Delta | EngineError]]
_GPU_WINDOWS = 8
"""Windows that a GPU encodes together. A CPU gains nothing by it."""
_KEPT_WINDOWS = 32
"""Encoded windows that are kept for further attempts."""
_MIB = 1 << 20

log = logging.getLogger(__name__)


@dataclass(eq=False)
class SpeechSequence:
    """One request in the engine."""

    request: GenerateRequest
    speech: Speech
    arrival: float
    output: list[int] = field(default_factory=list)
    random: Random = field(default_factory=Random)

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return len(self.request.prompt_token_ids) + len(self.output) - 1


class WhisperModel:
    """Encoder and decoder of a folder, tried out. Raises EngineFailure."""

    def __init__(self, config: EmbeddedConfig) -> None:
        folder = Path(config.model)
        self.sizes = WhisperSizes.of(read_model_facts(folder))
        self.tokens = read_tokens(folder)
        self.device = device_of(config)
        self.dtype = dtype_of(config, self.device)
        sizes = self.sizes
        encoder, decoder = (
            load_weights(folder, f"model.{side}.", self.dtype, self.device) for side in ("encoder", "decoder")
        )
        self.encoder = AudioEncoder(encoder, sizes.encoder_layers, sizes.encoder_heads)
        self.decoder = SpeechDecoder(decoder, sizes)
        self._try_out(config.model)

    def _try_out(self, folder: str) -> None:
        try:
            encoded = self.encoder(torch.zeros(1, self.sizes.bins, self.sizes.frames, device=self.device))
            caches = Caches.empty(self.sizes, 1, self.dtype, self.device)
            self.decoder.hear(encoded, caches, 0)
            finite = bool(self.decoder([[self.tokens.start]], [0], caches, 0).isfinite().all())
        except (RuntimeError, IndexError) as error:
            raise EngineFailure(f"the model in {folder} cannot transcribe: {error}") from error
        if not finite:
            raise EngineFailure(f"the model in {folder} computes logits that are not finite in {self.dtype}")


class WhisperCore:
    """Runs the model. Owned by one thread.

    Running sequences have the first places of the caches, in the order of `running`.
    """

    def __init__(self, config: EmbeddedConfig, model: WhisperModel) -> None:
        self._config = config
        self.sizes, self.tokens = model.sizes, model.tokens
        self.device, self.dtype = model.device, model.dtype
        self._model: WhisperModel | None = model
        self.places = self._count_places()
        self._caches: Caches | None = self._new_caches()
        self._rules = Rules(self.tokens, self.sizes.vocab_size, self.device)
        self._together = 1 if self.device.type == "cpu" else _GPU_WINDOWS
        self.waiting: deque[SpeechSequence] = deque()
        self.running: list[SpeechSequence] = []
        self._encoded: OrderedDict[str, torch.Tensor] = OrderedDict()
        self._iteration = 0
        self._latency_ms = 0.0
        self._completed = 0
        self._aborted = 0
        self._last = InflightBatchingStats()

    @property
    def kv_bytes(self) -> int:
        return self.places * self.sizes.place_bytes(self.dtype.itemsize)

    @property
    def ready(self) -> bool:
        """Whether there is something to do."""
        return bool(self.waiting or self.running)

    def add(self, request: GenerateRequest, speech: Speech) -> None:
        transcript = SpeechSequence(request, speech, time.monotonic())
        if request.sampling.seed is not None:
            transcript.random.seed(request.sampling.seed)
        self.waiting.append(transcript)

    def abort(self, request_id: str) -> None:
        """Forget a request; it may have ended."""
        for transcript in [*self.waiting, *self.running]:
            if transcript.request.request_id == request_id:
                self._aborted += 1
                if transcript in self.waiting:
                    self.waiting.remove(transcript)
                else:
                    self._leave(transcript)

    def step(self) -> Outputs:
        """Begin the next requests, if there are places, and generate one token of each that runs."""
        began = time.perf_counter()
        outputs: Outputs = []
        decoding = len(self.running)
        if decoding:
            outputs += self._decode()
        first = self._admit()
        outputs += first
        self._iteration += 1
        self._latency_ms = (time.perf_counter() - began) * 1e3
        self._last = InflightBatchingStats(
            num_scheduled_requests=decoding + len(first),
            num_context_requests=len(first),
            num_gen_requests=decoding,
            avg_num_decoded_tokens_per_iter=1.0,
        )
        return outputs

    def forget(self) -> None:
        """Forget encoded windows."""
        self._encoded.clear()

    def release_memory(self, tags: Collection[Tag]) -> None:
        """Free memory. Weights are read from the files again when it is resumed."""
        assert not self.ready, "memory is released while nothing runs"
        self.forget()
        if "weights" in tags:
            self._model = None
        if "kv_cache" in tags:
            self._caches = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def resume_memory(self, tags: Collection[Tag]) -> None:
        """Allocate memory again. Raises EngineFailure."""
        try:
            if "weights" in tags and self._model is None:
                self._model = WhisperModel(self._config)
            if "kv_cache" in tags and self._caches is None:
                self._caches = self._new_caches()
        except RuntimeError as error:
            raise EngineFailure(f"the model cannot be loaded again: {error}") from error

    def stats(self) -> IterationStats:
        used = len(self.running)
        return IterationStats(
            timestamp=time.time(),
            iteration=self._iteration,
            iter_latency_ms=self._latency_ms,
            num_active_requests=used,
            num_queued_requests=len(self.waiting),
            num_completed_requests=self._completed,
            max_num_active_requests=self.places,
            num_aborted_requests=self._aborted,
            inflight_batching_stats=self._last if used else InflightBatchingStats(),
            kv_cache_stats=KvCacheStats(
                max_num_blocks=self.places,
                free_num_blocks=self.places - used,
                used_num_blocks=used,
                tokens_per_block=self.sizes.context,
            ),
        )

    def _count_places(self) -> int:
        """Return how many sequences there is memory for."""
        if self.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self.device)
            room = int(free * self._config.free_gpu_memory_fraction)
        else:
            room = self._config.kv_cache_memory_mb * _MIB
        return max(1, min(self._config.max_batch_size, room // self.sizes.place_bytes(self.dtype.itemsize)))

    def _new_caches(self) -> Caches:
        return Caches.empty(self.sizes, self.places, self.dtype, self.device)

    def _loaded(self) -> tuple[WhisperModel, Caches]:
        assert self._model is not None and self._caches is not None, "a sleeping engine gets no requests"
        return self._model, self._caches

    def _admit(self) -> Outputs:
        """Encode the speech of waiting requests and compute their prompts; those of equal length together."""
        count = min(len(self.waiting), self.places - len(self.running), self._together)
        if not count:
            return []
        fresh = sorted(
            (self.waiting.popleft() for _ in range(count)), key=lambda one: len(one.request.prompt_token_ids)
        )
        outputs: Outputs = []
        while fresh:
            length = len(fresh[0].request.prompt_token_ids)
            group = [one for one in fresh if len(one.request.prompt_token_ids) == length]
            fresh = fresh[len(group) :]
            first = len(self.running)
            self.running += group
            try:
                outputs += self._begin(group, first)
            except RuntimeError as error:  # out of memory, most likely
                failure = EngineFailure("the speech could not be transcribed")
                failure.__cause__ = error
                for one in group:
                    self.running.remove(one)
                outputs += [(one.request.request_id, failure) for one in group]
        return outputs

    def _begin(self, group: Sequence[SpeechSequence], first: int) -> Outputs:
        model, caches = self._loaded()
        queued = [time.monotonic() - one.arrival for one in group]
        model.decoder.hear(self._encode(model, group), caches, first)
        prompts = [one.request.prompt_token_ids for one in group]
        starts = [prompt.index(self.tokens.start) if self.tokens.start in prompt else 0 for prompt in prompts]
        logits = model.decoder(prompts, [0] * len(group), caches, first, [*dict.fromkeys([*starts, -1])])
        outputs: Outputs = []
        for place, (one, start, seconds) in enumerate(zip(group, starts, queued, strict=True)):
            row = [*dict.fromkeys(starts)].index(start)
            silence = float(logits[place, row].softmax(-1)[self.tokens.no_speech])
            spoken: tuple[float, ...] = ()
            if one.speech.align:
                attention = model.decoder.attention(prompts[place], caches, first + place, self.tokens.alignment_heads)
                text = prompts[place].index(self.tokens.no_timestamps)
                spoken = spoken_times(attention, one.speech.frames, self.tokens.median_width, text)
            report = PromptReport(queue_seconds=seconds, no_speech=silence, spoken=spoken)
            outputs.append(self._next(one, logits[place, -1], report))
        self._remove_ended(outputs)
        return outputs

    def _encode(self, model: WhisperModel, group: Sequence[SpeechSequence]) -> torch.Tensor:
        """Return the encoded speech of requests: [n, positions, width]."""
        missing = {one.speech.key: one.speech for one in group if one.speech.key not in self._encoded}
        if missing:
            features = np.stack([np.frombuffer(readable(speech.data), np.float32) for speech in missing.values()])
            shape = (len(missing), self.sizes.bins, self.sizes.frames)
            encoded = model.encoder(torch.from_numpy(features.reshape(shape)).to(self.device))
            self._encoded.update(zip(missing, encoded.clone(), strict=True))
        found = torch.stack([self._encoded[one.speech.key] for one in group])
        for one in group:
            self._encoded.move_to_end(one.speech.key)
        while len(self._encoded) > _KEPT_WINDOWS:
            self._encoded.popitem(last=False)
        return found

    def _decode(self) -> Outputs:
        model, caches = self._loaded()
        tokens = [one.output[-1:] for one in self.running]
        logits = model.decoder(tokens, [one.length for one in self.running], caches, 0)[:, -1]
        outputs: Outputs = [self._next(one, row) for one, row in zip(self.running, logits, strict=True)]
        self._remove_ended(outputs)
        return outputs

    def _next(self, one: SpeechSequence, logits: torch.Tensor, report: PromptReport | None = None) -> tuple[str, Delta]:
        """Draw the next token of a sequence."""
        request, sampling = one.request, one.request.sampling
        if not sampling.max_tokens:
            return request.request_id, Delta((), finish_reason="length", prompt=report)
        scores = self._rules.apply(logits, request.prompt_token_ids, one.output)
        if sampling.temperature:
            chances = (scores / sampling.temperature).softmax(-1, dtype=torch.float64).cumsum(-1)
            drawn = torch.tensor(one.random.random(), dtype=torch.float64, device=self.device) * chances[-1]
            token = int(torch.searchsorted(chances, drawn, right=True).clamp(max=len(chances) - 1))
        else:
            token = int(scores.argmax())
        logprobs: tuple[TokenLogprobs, ...] = ()
        if sampling.logprobs is not None:
            logprobs = ((Logprob(token, float(scores[token] - scores.logsumexp(-1)), 1),),)
        one.output.append(token)
        ended = token == self.tokens.end
        full = len(one.output) >= sampling.max_tokens
        return request.request_id, Delta(
            (token,), logprobs, finish_reason="stop" if ended else "length" if full else None, prompt=report
        )

    def _remove_ended(self, outputs: Outputs) -> None:
        ended = {name for name, output in outputs if isinstance(output, Delta) and output.finish_reason is not None}
        for one in [one for one in self.running if one.request.request_id in ended]:
            self._completed += 1
            self._leave(one)

    def _leave(self, one: SpeechSequence) -> None:
        """Remove a running sequence; the last one takes its place."""
        _, caches = self._loaded()
        place, last = self.running.index(one), self.running.pop()
        if last is not one:
            caches.move(len(self.running), place, last.length + 1)
            self.running[place] = last
