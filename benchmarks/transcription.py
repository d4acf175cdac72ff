"""Transcribe synthetic speech next to transformers, with the same weights: `python -m benchmarks.transcription`.

espeak-ng (PyPI's `espeakng-loader`) speaks Harvard sentences with several voices: short recordings, and long ones of
several windows. Both sides decode greedily. It prints how many transcripts are equal, the word error rates, and how
many seconds of audio each side transcribes in a second: one recording after the other, and several at once.
"""

import argparse
import asyncio
import io
import time
import wave
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from prometheus_client import CollectorRegistry
from transformers import WhisperForConditionalGeneration, WhisperProcessor
from transformers.models.whisper.english_normalizer import EnglishTextNormalizer

from engine.admission import AdmissionEngine
from engine.checkpoints.store import resolve_model
from engine.checkpoints.whisper import read_sizes, read_tokens
from engine.config import EmbeddedConfig
from engine.create import create_engine
from engine.embedded.whisper.reader import AudioFile, ReaderConfig, SpeechReader
from engine.kit.log_mel import SAMPLE_RATE, Recording
from multimodal.answers.transcripts import text_of
from multimodal.metrics import GenerationMetrics
from multimodal.request import Limits
from multimodal.speech.transcriber import SpeechAsk, Transcriber
from multimodal.text.tokenizer import Tokenizer
from server.bench.machine import describe_machine
from server.settings import read_settings
from smolaudio.speech import Voice, speak

SENTENCES = """\
The birch canoe slid on the smooth planks. Glue the sheet to the dark blue background. It is easy to tell the \
depth of a well. These days a chicken leg is a rare dish. Rice is often served in round bowls. The juice of \
lemons makes fine punch. The box was thrown beside the parked truck. Four hours of steady work faced us. A large \
size in stockings is hard to sell. The boy was there when the sun rose. A rod is used to catch pink salmon. The \
source of the huge river is the clear spring. Kick the ball straight and follow through. Help the woman get back \
to her feet. A pot of tea helps to pass the evening. Smoky fires lack flame and heat. The soft cushion broke the \
man's fall. The salt breeze came across from the sea. The girl at the booth sold fifty bonds. The small pup \
gnawed a hole in the sock. The fish twisted and turned on the bent hook. Press the pants and sew a button on the \
vest. The swan dive was far short of perfect. The beauty of the view stunned the young boy. Two blue fish swam \
in the tank. Her purse was full of useless trash. The colt reared and threw the tall rider. It snowed, rained, \
and hailed the same morning. Read verse out loud for pleasure. Hoist the load to your left shoulder. Take the \
winding path to reach the lake. Note closely the size of the gas tank.\
"""
"""Harvard sentences (IEEE, 1969)."""
VOICES = ("en-us", "en-us+f3", "en-gb-x-rp+m3", "en-gb-scotland+f2")
_GAP = 0.4
"""Seconds between two sentences."""


class Spoken(NamedTuple):
    """A recording, and what is said in it."""

    text: str
    samples: np.ndarray

    @property
    def seconds(self) -> float:
        return len(self.samples) / SAMPLE_RATE


class LocalReader(SpeechReader):
    """The reader in this process."""

    async def read(self, data: Any) -> Recording:
        return await super().read(AudioFile(data))


def recordings(count: int, long: int) -> list[Spoken]:
    """Return short recordings of two sentences, and long ones of all."""
    sentences = SENTENCES.replace(". ", ".\n").split("\n")
    rng = Random(1)
    gap = np.zeros(int(_GAP * SAMPLE_RATE), np.float32)

    def spoken(said: Sequence[str], voice: str) -> Spoken:
        parts = [part for text in said for part in (speak(text, Voice(voice, 140, 50, 50)), gap)]
        return Spoken(" ".join(said), np.concatenate(parts))

    short = [spoken(rng.sample(sentences, 2), VOICES[number % len(VOICES)]) for number in range(count)]
    return short + [spoken(sentences, VOICES[number % len(VOICES)]) for number in range(long)]


def wav(samples: np.ndarray) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(SAMPLE_RATE)
        writer.writeframes((samples.clip(-1, 1) * 32767).astype("<i2").tobytes())
    return file.getvalue()


class Theirs:
    """transformers: its features and `generate`, of several recordings at once if they are short."""

    def __init__(self, folder: Path, threads: int) -> None:
        torch.set_num_threads(threads)
        self._model: Any = WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
        self._processor: Any = WhisperProcessor.from_pretrained(folder)

    def transcribe(self, batch: Sequence[Spoken]) -> list[str]:
        rounded = [np.frombuffer(wav(one.samples)[44:], "<i2").astype(np.float32) / 32768 for one in batch]
        options: dict[str, Any] = {}
        if max(map(len, rounded)) > 30 * SAMPLE_RATE:
            options = {"truncation": False, "padding": "longest", "return_attention_mask": True}
        inputs = self._processor(rounded, sampling_rate=SAMPLE_RATE, return_tensors="pt", **options)
        tokens = self._model.generate(**inputs, **({"return_timestamps": True} if options else {}))
        return [text.strip() for text in self._processor.batch_decode(tokens, skip_special_tokens=True)]


async def ours(folder: Path, threads: int) -> tuple[Transcriber, Callable[[], Awaitable[None]]]:
    """Return a function that transcribes greedily, and one that closes it."""
    engine = AdmissionEngine(create_engine(EmbeddedConfig(model=str(folder), threads=threads)), 1024, 3600.0)
    await engine.start()
    sizes, tokens = read_sizes(folder), read_tokens(folder)
    longest = 24 * 3600.0
    reader = LocalReader(
        ReaderConfig(bins=sizes.bins, frames=sizes.frames, max_seconds=longest, timeout_seconds=longest)
    )
    limits, metrics = Limits(request_timeout_seconds=longest), GenerationMetrics(CollectorRegistry(), "whisper")
    tokenizer = Tokenizer.load(folder)
    made = Transcriber(engine, reader, tokenizer, sizes, tokens, limits, metrics, "whisper", temperatures=(0.0,))
    return made, engine.close


async def transcribe(transcriber: Transcriber, one: Spoken) -> str:
    transcript = await transcriber.prepare(SpeechAsk(file=wav(one.samples)))
    return text_of([segment async for found in transcript.segments() for segment in found])


def errors(said: str, heard: str) -> tuple[int, int]:
    """Return the word errors of a transcript, and the words that were said."""
    normal = EnglishTextNormalizer({})
    wanted, found = normal(said).split(), normal(heard).split()
    row = list(range(len(found) + 1))
    for place, word in enumerate(wanted, 1):
        before, row[0] = row[0], place
        for column, other in enumerate(found, 1):
            before, row[column] = row[column], min(row[column] + 1, row[column - 1] + 1, before + (word != other))
    return row[-1], len(wanted)


def rate(said: Sequence[Spoken], heard: Sequence[str]) -> float:
    """Return the word error rate."""
    counts = [errors(one.text, text) for one, text in zip(said, heard, strict=True)]
    return sum(wrong for wrong, _ in counts) / sum(words for _, words in counts)


async def compare(args: argparse.Namespace) -> None:
    settings = read_settings(["--model", args.model])
    folder = resolve_model(settings.model, settings.cache_dir)
    said = recordings(args.recordings, args.long)
    short, seconds = said[: args.recordings], [sum(one.seconds for one in part) for part in (said, said[: -args.long])]
    print(f"{len(said)} recordings, {seconds[0]:.0f} s of speech, {args.long} of them long; {args.threads} threads")
    theirs = Theirs(folder, args.threads)
    transcriber, close = await ours(folder, args.threads)
    heard: dict[str, list[str]] = {}
    speeds: dict[str, list[float]] = {}

    async def one_by_one() -> list[str]:
        return [await transcribe(transcriber, one) for one in said]

    async def at_once() -> list[str]:
        return await asyncio.gather(*(transcribe(transcriber, one) for one in short))

    async def theirs_one_by_one() -> list[str]:
        return [text for one in said for text in theirs.transcribe([one])]

    async def theirs_at_once() -> list[str]:
        batches = [short[start : start + args.batch] for start in range(0, len(short), args.batch)]
        return [text for batch in batches for text in theirs.transcribe(batch)]

    runs = {
        "ours, one after the other": one_by_one,
        "transformers, one after the other": theirs_one_by_one,
        "ours, short ones at once": at_once,
        f"transformers, short ones in batches of {args.batch}": theirs_at_once,
    }
    for _ in range(args.repeats):
        for name, run in runs.items():
            began = time.perf_counter()
            heard[name] = await run()
            length = seconds[0] if len(heard[name]) == len(said) else seconds[1]
            speeds.setdefault(name, []).append(length / (time.perf_counter() - began))
    await close()
    for name, texts in heard.items():
        part = said[: len(texts)]
        print(f"{name}: {median(speeds[name]):.1f} s of audio a second, {100 * rate(part, texts):.2f} % of words wrong")
    first, second, *_ = heard.values()
    same = sum(one == other for one, other in zip(first, second, strict=True))
    print(f"equal transcripts: {same} of {len(said)}")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.transcription", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--model", default="whisper-tiny.en", help="Whisper folder or name")
    parser.add_argument("--recordings", type=int, default=24, help="short recordings")
    parser.add_argument("--long", type=int, default=2, help="long recordings")
    parser.add_argument("--batch", type=int, default=8, help="short recordings that transformers takes together")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=1)
    args = parser.parse_args()
    for key, value in describe_machine().items():
        print(f"{key}: {value}")
    asyncio.run(compare(args))


if __name__ == "__main__":
    main()
