"""Measure images, videos or audio: the encoder's speed, what caches do for the first token, transfers of embeddings.

    python -m benchmarks.multimodal                                   # smolvision on this CPU
    python -m benchmarks.multimodal --device cuda --model llava-7b    # LLaVA's shape with random weights
    python -m benchmarks.multimodal --kind video --model smolvideo    # clips of four seconds, MPEG-4 in MP4
    python -m benchmarks.multimodal --kind audio --model smolaudio    # WAV files of 2, 10 and 60 seconds

First tokens are measured over HTTP, one request at a time: for new images (cold), for known images after a text (their
embeddings are cached), and for known images with another question after them, as in a continued chat (their keys and
values are cached too). Transferred embeddings are those of a 7B model: 576 rows of 4,096. Unknown options are settings
of the server.
"""

import argparse
import asyncio
import base64
import io
import random
import signal
import sys
import tempfile
import time
import wave
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import nan
from pathlib import Path
from statistics import median

import numpy as np
import uvloop
from PIL import Image

from benchmarks import transfer
from benchmarks.gpu.__main__ import settings_of
from benchmarks.gpu.report import describe_gpu
from benchmarks.gpu.vision_model import write_llava
from benchmarks.metrics import total
from benchmarks.report import save, table
from benchmarks.servers import Server, Spec, serving
from engine.checkpoints.store import resolve_model
from engine.config import EncoderConfig
from engine.embedded.vision.encoder import EmbeddedEncoder
from engine.media import FrameSampling, MediaInput
from engine.transfer.base import Read
from engine.transfer.shared_bytes import SharedBytes
from engine.transfer.transfers import Transfers
from server.bench.client import LoadRun, Target, exchange
from server.bench.machine import describe_machine
from server.bench.summary import Sample

EMBEDDING_BYTES = 576 * 4096 * 2
AT_ONCE = (1, 8, 32)
SIDES = (256, 1024, 3072)
"""Sides in pixels of a thumbnail, a picture on a page and a photograph."""
CLIP_SIDES = (256, 720)
AUDIO_SECONDS = (2, 10, 60)
LLAVA_7B = "llava-7b"
CLIP_SECONDS, CLIP_FPS, CLIP_FRAMES = 4, 24, 8
"""Length of the measured clips in seconds, their frames per second, and the number of frames taken of each."""
QUESTIONS = ("What is in this image?", "Which colours do you see?")
Rows = dict[str, float]


def main() -> int:
    args = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwind the stack, which stops the server
    facts: dict[str, object] = {
        **describe_machine(),
        **(describe_gpu() if args.device == "cuda" else {}),
        "model": args.model,
        "device": args.device,
        "repeats": args.repeats,
        "seed": args.seed,
    }
    rng = random.Random(args.seed)
    with model_folder(args) as folder:
        config = EncoderConfig(model=str(folder), device=args.device, load_format=args.flags.get("load-format", "auto"))
        measured = {"image": (photo, SIDES), "video": (clip, CLIP_SIDES), "audio": (recording, AUDIO_SECONDS)}
        made, sides = measured[args.kind]
        found = uvloop.run(encoding(config, made, sides, rng)) | first_tokens(args, folder, made, sides, rng)
        found |= moving(args) if args.kind == "image" else {}
    lines = "\n".join(f"- {key}: {value}" for key, value in facts.items())
    rows = [[name, f"{value:.4g}"] for name, value in found.items()]
    markdown = f"# Benchmark: {args.label}\n\n{lines}\n\n{table(['', 'median'], rows)}\n"
    print(markdown)
    print(f"written to {save(args.output, args.label, markdown, {'facts': facts, 'found': found})}")
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.multimodal",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--model", default="smolvision", help=f"a vision-language model's name or folder, or {LLAVA_7B}"
    )
    parser.add_argument("--kind", choices=["image", "video", "audio"], default="image")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--seed", default=str(int(time.time())))
    parser.add_argument("--label", default="", help="name of the result files")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    args, flags = parser.parse_known_args()
    args.label = args.label or f"{'multimodal' if args.kind == 'image' else args.kind}-{args.device}"
    args.flags = settings_of(flags, parser)
    return args


@contextmanager
def model_folder(args: argparse.Namespace) -> Iterator[Path]:
    """Return the folder of `--model`; it is created for a shape."""
    if args.model != LLAVA_7B:
        yield resolve_model(args.model, Path("~/.cache/trellis").expanduser())
        return
    args.flags["load-format"] = "dummy"
    with tempfile.TemporaryDirectory() as folder:
        write_llava(Path(folder))
        yield Path(folder)


def photo(side: int, rng: random.Random) -> MediaInput:
    """Return a new JPEG: enlarged noise, so that it is neither trivial nor very large."""
    small = Image.frombytes("RGB", (32, 32), rng.randbytes(32 * 32 * 3))
    file = io.BytesIO()
    small.resize((side, side), Image.Resampling.BILINEAR).save(file, "JPEG", quality=90)
    return MediaInput(file.getvalue())


def clip(side: int, rng: random.Random) -> MediaInput:
    """Return a new clip: noise in large squares, which moves."""
    import cv2  # noqa: PLC0415 - images are measured without it

    small = np.frombuffer(rng.randbytes(16 * 32 * 3), np.uint8).reshape(16, 32, 3)
    wide = small.repeat(side // 16, 0).repeat(side // 16, 1)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "clip.mp4")
        writer = cv2.VideoWriter(path, cv2.VideoWriter.fourcc(*"mp4v"), CLIP_FPS, (side, side))
        for frame in range(CLIP_SECONDS * CLIP_FPS):
            writer.write(np.ascontiguousarray(wide[:, frame * side // 200 :][:, :side]))
        writer.release()
        return MediaInput(Path(path).read_bytes(), kind="video", sampling=FrameSampling(num_frames=CLIP_FRAMES))


def recording(seconds: int, rng: random.Random) -> MediaInput:
    """Return a new WAV file of noise, 16 kHz mono."""
    file = io.BytesIO()
    with wave.open(file, "wb") as written:
        written.setparams((1, 2, 16_000, 0, "NONE", ""))
        written.writeframes(rng.randbytes(seconds * 32_000))
    return MediaInput(file.getvalue(), kind="audio")


def of(size: int, kind: str) -> str:
    """Return how files of a size are called in results."""
    return f"{size} s" if kind == "audio" else f"{size} x {size}"


async def encoding(
    config: EncoderConfig, made: Callable[[int, random.Random], MediaInput], sides: Sequence[int], rng: random.Random
) -> Rows:
    """Return images, frames or seconds of audio per second through the encoder's process, for several files at once."""
    encoder = EmbeddedEncoder(config)
    rows: Rows = {}
    try:
        await encoder.start()
        for side in sides:
            for count in AT_ONCE[: 2 if made is clip else None]:
                seconds = []
                for _ in range(3):
                    images = [made(side, rng) for _ in range(count)]
                    began = time.perf_counter()
                    await asyncio.gather(*(encoder.encode([image]) for image in images))
                    seconds.append(time.perf_counter() - began)
                kind = images[0].kind
                units = {"image": ("images", 1), "video": ("frames", CLIP_FRAMES), "audio": ("seconds", side)}
                unit, each = units[kind]
                rows[f"encoding {count} of {of(side, kind)} at once, {unit}/s"] = count * each / median(seconds)
    finally:
        await encoder.close()
    return rows


def first_tokens(
    args: argparse.Namespace,
    folder: Path,
    made: Callable[[int, random.Random], MediaInput],
    sides: Sequence[int],
    rng: random.Random,
) -> Rows:
    """Return milliseconds to the first token, cold and with caches."""
    options = [part for name, value in {"device": args.device, **args.flags}.items() for part in (f"--{name}", value)]
    argv = (sys.executable, "-m", "server", "--port", "{port}", "--model", str(folder), *options)
    rows: Rows = {}
    with serving(Spec("trellis", argv, "/health/ready")) as server:
        for side in sides:
            for count in (1, 4):
                times: dict[str, list[float]] = {"cold": [], "embeddings cached": [], "keys and values cached": []}
                for repeat in range(args.repeats + 1):
                    images = [shown(made(side, rng)) for _ in range(count)]
                    first, other = ({"type": "text", "text": question} for question in QUESTIONS)
                    for kind, parts in zip(times, ([*images, first], [other, *images], [*images, other]), strict=True):
                        sample = asked(server, parts)
                        if repeat and sample.ttft:  # an answer may have no text
                            times[kind].append(sample.ttft * 1e3)
                for kind, values in times.items():
                    rows[f"first token, {count} of {of(side, args.kind)}, {kind}, ms"] = median(values or [nan])
                cold, *cached = (median(values or [nan]) for values in times.values())
                for kind, value in zip([*times][1:], cached, strict=True):
                    rows[f"first token, {count} of {of(side, args.kind)}, cold / {kind}"] = cold / value
        rows["hits of the embedding cache"] = total(server.get("/metrics"), "trtllm_embedding_cache_hits_total")
    return rows


def shown(media: MediaInput) -> dict[str, object]:
    """Return the file as a content part."""
    form = {"image": "image/jpeg", "video": "video/mp4", "audio": "audio/wav"}[media.kind]
    field = f"{media.kind}_url"
    return {"type": field, field: {"url": f"data:{form};base64,{base64.b64encode(media.data).decode()}"}}


def asked(server: Server, parts: list[dict[str, object]]) -> Sample:
    target: Target = server.target
    request = target.request(parts, 2)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        (sample,) = runner.run(exchange(target, LoadRun(1, 1, 0, 2, timeout=60), [request]))
    if sample.error:
        raise RuntimeError(sample.error)
    return sample


def moving(args: argparse.Namespace) -> Rows:
    """Move embeddings of 1 and 20 images between processes, and between a GPU and the host."""
    rows: Rows = {}
    for method in ("shared_memory", "tcp"):
        sizes = argparse.Namespace(device="cpu", blocks=20, block_bytes=EMBEDDING_BYTES, method=[method])
        memory, region = transfer.allocate(sizes, 0, fill=0)
        transfers = Transfers([region], method)
        with transfer.owner(sizes, method) as offers:
            for count in (1, 20):
                reads = [
                    Read(0, block * EMBEDDING_BYTES, block * EMBEDDING_BYTES, EMBEDDING_BYTES) for block in range(count)
                ]
                transfer.timed(transfers, offers, reads)
                seconds = median(transfer.timed(transfers, offers, reads) for _ in range(args.repeats))
                rows[f"{count} embeddings by {method}, ms"] = seconds * 1e3
                rows[f"{count} embeddings by {method}, GB/s"] = count * EMBEDDING_BYTES / seconds / 1e9
        transfers.close()
        del memory
    if args.device == "cuda":
        rows |= _through_host(args.repeats)
    return rows


def _through_host(repeats: int) -> Rows:
    """Move embeddings as the encoder writes them and the engine reads them."""
    import torch  # noqa: PLC0415 - not needed without a GPU

    values = torch.randint(0, 255, (EMBEDDING_BYTES,), dtype=torch.uint8, device="cuda")
    staging = torch.empty(EMBEDDING_BYTES, dtype=torch.uint8, pin_memory=True)
    there, back = [], []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        staging.copy_(values)
        data = SharedBytes.of(staging.numpy().data).read()
        there.append(time.perf_counter() - began)
        torch.frombuffer(data, dtype=torch.uint8).to("cuda")
        torch.cuda.synchronize()
        back.append(time.perf_counter() - began - there[-1])
    rows: Rows = {}
    for name, times in {"the GPU to the host's memory": there, "the host's memory to the GPU": back}.items():
        seconds = median(times[1:])
        rows[f"an embedding from {name}, ms"] = seconds * 1e3
        rows[f"an embedding from {name}, GB/s"] = EMBEDDING_BYTES / seconds / 1e9
    return rows


if __name__ == "__main__":
    sys.exit(main())
