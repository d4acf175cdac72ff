"""Facts of a Whisper model: its sizes, and the tokens that steer it. Needs neither torch nor transformers."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.checkpoints.facts import ModelFacts, read_model_facts
from engine.errors import EngineFailure

FRAMES_PER_SECOND = 100
"""Frames of features (`engine/kit/log_mel.py`)."""
FRAMES_PER_POSITION = 2
"""Frames of features that make one position of the encoder's output, 20 ms: also the step of timestamps."""
_WHISPER = "whisper"


@dataclass(frozen=True, kw_only=True)
class WhisperSizes:
    """Sizes of config.json."""

    bins: int
    """Mel bins of a frame."""
    width: int
    encoder_layers: int
    encoder_heads: int
    decoder_layers: int
    decoder_heads: int
    positions: int
    """Positions of the encoder's output for a window of 30 seconds."""
    context: int
    """Maximum number of tokens of the decoder, prompt and text together."""
    vocab_size: int

    @property
    def frames(self) -> int:
        """Frames of a window."""
        return self.positions * FRAMES_PER_POSITION

    def place_bytes(self, value_bytes: int) -> int:
        """Return the bytes of a sequence's keys and values, those of its speech included."""
        return 2 * self.decoder_layers * self.width * (self.context + self.positions) * value_bytes

    @classmethod
    def of(cls, facts: ModelFacts) -> "WhisperSizes":
        """Return the sizes in a config.json. Raises EngineFailure for another kind of model, or wrong values."""
        if facts.model_type != _WHISPER:
            raise EngineFailure(f"{facts.folder} has no Whisper model: its model_type is {facts.model_type!r}")
        sizes = cls(
            bins=facts.integer("num_mel_bins"),
            width=facts.integer("d_model"),
            encoder_layers=facts.integer("encoder_layers"),
            encoder_heads=facts.integer("encoder_attention_heads"),
            decoder_layers=facts.integer("decoder_layers"),
            decoder_heads=facts.integer("decoder_attention_heads"),
            positions=facts.integer("max_source_positions"),
            context=facts.integer("max_target_positions"),
            vocab_size=facts.vocab_size,
        )
        for side, heads in (("encoder", sizes.encoder_heads), ("decoder", sizes.decoder_heads)):
            if sizes.width % heads:
                raise EngineFailure(
                    f"d_model in the config.json of {facts.folder} must be a multiple of {side}_attention_heads"
                )
        return sizes


@dataclass(frozen=True, kw_only=True)
class WhisperTokens:
    """Token ids of generation_config.json and tokenizer.json."""

    start: int
    """<|startoftranscript|>"""
    end: int
    """<|endoftext|>"""
    no_timestamps: int
    """<|notimestamps|>; the ids above it are timestamps, from 0.00 seconds on."""
    no_speech: int
    previous: int
    """<|startofprev|>, before a prompt."""
    languages: dict[str, int]
    """Token ids by ISO code of the language; empty for an English-only model."""
    transcribe: int
    translate: int
    suppressed: tuple[int, ...]
    """Never generated."""
    suppressed_first: tuple[int, ...]
    """Never generated first."""
    most_first_timestamp: int | None
    """Maximum number of positions of 20 ms for the first timestamp of a window; None is no limit."""
    alignment_heads: tuple[tuple[int, int], ...]
    """Decoder layers and heads whose attention follows the speech; words have no times without them."""
    median_width: int
    """Positions over which their attention is smoothed."""

    @property
    def multilingual(self) -> bool:
        return bool(self.languages)

    @property
    def first_timestamp(self) -> int:
        return self.no_timestamps + 1


def read_sizes(folder: Path) -> WhisperSizes:
    """Read the sizes from config.json. Raises EngineFailure."""
    return WhisperSizes.of(read_model_facts(folder))


def read_tokens(folder: Path) -> WhisperTokens:
    """Read the special tokens. Raises EngineFailure for files that are missing or lack a token."""
    generation = _json(folder / "generation_config.json")
    tokenizer = _json(folder / "tokenizer.json")
    try:
        added = {str(token["content"]): int(token["id"]) for token in tokenizer["added_tokens"]}
        end = generation["eos_token_id"]
        no_timestamps = int(generation.get("no_timestamps_token_id") or added["<|notimestamps|>"])
        languages = generation.get("lang_to_id") if generation.get("is_multilingual") else {}
        tasks = generation.get("task_to_id") or {}
        return WhisperTokens(
            start=int(generation["decoder_start_token_id"]),
            end=int(end[0] if isinstance(end, list) else end),
            no_timestamps=no_timestamps,
            no_speech=no_timestamps - 1,
            previous=int(generation.get("prev_sot_token_id") or added["<|startofprev|>"]),
            languages={text.strip("<|>"): int(token) for text, token in (languages or {}).items()},
            transcribe=int(tasks.get("transcribe", added.get("<|transcribe|>", -1))),
            translate=int(tasks.get("translate", added.get("<|translate|>", -1))),
            suppressed=tuple(map(int, generation.get("suppress_tokens") or ())),
            suppressed_first=tuple(map(int, generation.get("begin_suppress_tokens") or ())),
            most_first_timestamp=generation.get("max_initial_timestamp_index"),
            alignment_heads=tuple((int(layer), int(head)) for layer, head in generation.get("alignment_heads") or ()),
            median_width=int(_json(folder / "config.json").get("median_filter_width", 7)),
        )
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise EngineFailure(
            f"the generation_config.json and tokenizer.json of {folder} lack a token of Whisper: {error!r}"
        ) from error


def _json(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise EngineFailure(f"{path} cannot be read: {error}") from error
    return content
