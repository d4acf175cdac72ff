"""Train smolvideo in minutes on one GPU: `python -m smolvideo --base GGUF_OR_FOLDER --out FOLDER`.

The connector and the adapters are trained to answer; smolvision's shipped weights stay as they are. Then held-out
questions are put to the model as it ships: merged, rounded to bfloat16 and loaded by transformers.
"""

import argparse
import json
import math
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from engine.checkpoints.merge import merge
from smolvideo.architecture import save
from smolvideo.chats import Chats, loader
from smolvideo.evaluate import Answers, evaluate
from smolvideo.model import Student
from smolvision.train import base_folder

WEIGHTS = "smolvideo.safetensors"
RESULTS = "results.json"
SMOLVISION = Path(__file__).parents[1] / "smolvision" / "smolvision.safetensors"


def parse(flags: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m smolvideo", description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--base", type=Path, required=True, help="SmolLM2-135M-Instruct: GGUF file or model folder")
    parser.add_argument("--out", type=Path, required=True, help=f"folder for {WEIGHTS} and {RESULTS}")
    parser.add_argument("--start", type=Path, help="weights to continue from instead of random ones")
    parser.add_argument("--minutes", type=float, default=7.8, help="total duration, evaluation included")
    parser.add_argument("--steps", type=int, default=0, help="maximum number of steps; 0 is as many as fit the time")
    parser.add_argument(
        "--evaluation-seconds", type=float, default=40.0, help="seconds of --minutes reserved for evaluation"
    )
    parser.add_argument("--per-kind", type=int, default=60, help="held-out questions of each kind")
    parser.add_argument("--batch", type=int, default=64, help="chats per step")
    parser.add_argument("--turns", type=int, default=6, help="maximum questions per chat")
    parser.add_argument("--workers", type=int, default=14, help="processes that generate chats")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, default=1e-3, help="highest learning rate")
    parser.add_argument("--compile", action="store_true", help="compile the language model's layers")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(flags)


def train(args: argparse.Namespace, base: Path, started: float) -> dict[str, Any]:
    """Train, save the weights, and return facts about the run for the results."""
    device = torch.device(args.device)
    half = device.type == "cuda"  # bfloat16 is slow on CPUs
    batches = loader(Chats(base, args.seed, args.batch, args.turns), args.workers, half)
    torch.manual_seed(args.seed)
    student = Student(base, args.start, torch.bfloat16 if half else torch.float32).to(device)
    if args.compile:
        torch._dynamo.config.suppress_errors = True  # what cannot be compiled runs as it is
        for layer in student.language.layers:
            layer.compile()
    parameters = [*student.trained.values()]
    optimizer = torch.optim.AdamW(parameters, lr=args.rate, betas=(0.9, 0.98), weight_decay=0.01, fused=half)
    next(batches)  # wait until the workers have started
    begin = shown = saved = time.monotonic()
    end = started + args.minutes * 60 - args.evaluation_seconds
    if end < begin + 1:
        raise SystemExit(f"starting took {begin - started:.0f} s, which leaves no time to train: increase --minutes")
    print(f"ready after {begin - started:.0f} s on {args.device}, {end - begin:.0f} s left to train", flush=True)
    steps = 0
    done = waited = 0.0
    while done < 1:
        now = time.monotonic()
        done = min(1.0, max((now - begin) / (end - begin), (steps + 1) / args.steps if args.steps else 0))
        for group in optimizer.param_groups:
            group["lr"] = args.rate * min(1.0, (steps + 1) / 100) * (1 + math.cos(math.pi * done)) / 2
        batch = next(batches).to(device)
        waited += time.monotonic() - now
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            loss, right = student.loss(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        steps += 1
        if now - shown > 10 or done == 1:
            rate = steps * args.batch / (now - begin + 1e-9)
            said = f"loss {loss:.4f} tokens {right:.2%}, {rate:.0f} chats/s, waited {waited:.0f} s for them"
            print(f"{done:4.0%} step {steps} {said}", flush=True)
            shown = now
        if now - saved > 60:
            save(args.out / WEIGHTS, dict(student.trained), {"steps": str(steps)})
            saved = now
    save(args.out / WEIGHTS, dict(student.trained), {"steps": str(steps)})
    return {
        "device": torch.cuda.get_device_name() if half else args.device,
        "steps": steps,
        "chats": steps * args.batch,
        "training_seconds": round(time.monotonic() - begin),
    }


def main(flags: Sequence[str] | None = None) -> None:
    """Train and evaluate with the arguments in `flags`, or those of the command line."""
    started = time.monotonic()
    args = parse(flags)
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("high")
    with tempfile.TemporaryDirectory() as scratch:
        language = base_folder(args.base, Path(scratch) / "language")
        smolvision, shipped = Path(scratch) / "smolvision", Path(scratch) / "shipped"
        for made, below, weights in ((smolvision, language, SMOLVISION), (shipped, smolvision, args.out / WEIGHTS)):
            made.mkdir()
            if made == shipped:
                facts = train(args, smolvision, started)
            merge(below, weights, made, lambda *_: None)
        found = evaluate(Answers(shipped, args.device), args.per_kind, batch=args.batch)
    found = {**facts, "minutes": round((time.monotonic() - started) / 60, 2), **found}
    (args.out / RESULTS).write_text(json.dumps(found, indent=1) + "\n")
    print(
        f"{found['accuracy']:.2%} of {found['asked']} held-out answers correct, {found['minutes']} minutes in total",
        flush=True,
    )
