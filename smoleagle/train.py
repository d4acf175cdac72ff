"""Train a head in minutes on one GPU: `python -m smoleagle --base GGUF_OR_FOLDER --out FOLDER`.

1. The target writes texts: answers to made prompts, and chats of its own, at temperatures from 0 to 1.
2. The head learns the target's next-token distribution in those texts, for several tokens in a row ("training-time
   test"): from the second on its input is its own output.
3. Held-out prompts are answered by the target, greedily and at temperature 1, and the accepted length is counted.

The target is SmolLM2-135M-Instruct, or another Llama or Qwen2 with chats in ChatML: `--head` then names a folder with
the config.json of an EAGLE-3 head, whose width and attention heads are free.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from smoleagle.generate import Texts, Writer, load_tokenizer
from smoleagle.model import CONFIG_FILE, Config, Head, read_config
from smoleagle.prompts import SYSTEM
from smolvision.training import add_base, arguments, base_folder, cosine, device_name, prepare, write_results

WEIGHTS = "model.safetensors"
_SHARPER = 0.6
"""Temperature of the distribution that is learnt: drafts are the likeliest tokens, whatever comes after them."""
_PASS_WEIGHT = 0.8
"""Weight of a pass's loss, relative to that of the pass before."""


def parse(flags: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments("smoleagle", __doc__, minutes=7.0, evaluation_seconds=20.0, rate=1.5e-3)
    add_base(parser)
    parser.add_argument(
        "--head",
        type=Path,
        default=Path(__file__).parent / "smollm2-135m-instruct",
        help=f"folder with the head's {CONFIG_FILE}",
    )
    parser.add_argument("--system", default=SYSTEM, help="text that the base's chat template puts before chats")
    parser.add_argument("--write-share", type=float, default=0.35, help="share of the time in which texts are written")
    parser.add_argument("--rows", type=int, default=2048, help="texts that are written at a time")
    parser.add_argument("--length", type=int, default=320, help="tokens of a text")
    parser.add_argument("--batch", type=int, default=96, help="texts per training step")
    parser.add_argument("--passes", type=int, default=5, help="tokens in a row that are learnt")
    parser.add_argument("--steps", type=int, default=0, help="most training steps; 0 is without limit")
    return parser.parse_args(flags)


class Target:
    """The model that is drafted for, its hidden states and its output rows of the draft vocabulary."""

    def __init__(self, model: Any, draft_vocab_size: int) -> None:
        self._model = model.model
        self.embedding = model.model.embed_tokens.weight.detach()
        layers = model.config.num_hidden_layers
        self._taken = 2, layers // 2, layers - 3
        self._outputs = model.get_output_embeddings().weight.detach()
        self.drafted = torch.arange(draft_vocab_size, device=model.device)
        """Ids of the draft vocabulary, rising."""
        self.output = self._outputs[:draft_vocab_size]

    def choose(self, texts: list[Texts]) -> float:
        """Draft the most frequent tokens of what was written; return their share."""
        size = len(self.embedding)
        counts = sum(torch.bincount(part.tokens[part.written], minlength=size) for part in texts)
        assert isinstance(counts, torch.Tensor)
        self.drafted = counts.topk(len(self.drafted)).indices.sort().values
        self.output = self._outputs[self.drafted]
        return float(counts[self.drafted].sum() / counts.sum())

    @torch.no_grad()
    def read(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the features [texts, length, 3 * hidden] of tokens [texts, length], and the last hidden states."""
        found = self._model(input_ids=tokens, output_hidden_states=True, use_cache=False)
        return torch.cat([found.hidden_states[layer] for layer in self._taken], -1), found.last_hidden_state


def loss_of(
    head: Head,
    target: Target,
    tokens: torch.Tensor,
    written: torch.Tensor,
    read: tuple[torch.Tensor, torch.Tensor],
    passes: int,
) -> torch.Tensor:
    """Return the cross entropy with the target's distribution over the draft vocabulary, of tokens the target wrote.
    `read`: the result of `Target.read` for the tokens."""
    features, last = read
    known = torch.isin(tokens, target.drafted) & written
    total = torch.zeros((), device=tokens.device)
    for index, output in enumerate(head(features, tokens, target.embedding, passes)):
        # At position i pass `index` drafts token i + 2 + index, of which the target thinks at the one before.
        ahead = 2 + index
        wanted = known[:, ahead:]
        expected = functional.linear(last[:, ahead - 1 : -1][wanted], target.output).float().div(_SHARPER).softmax(-1)
        guessed = functional.linear(output[:, :-ahead][wanted], target.output).float().log_softmax(-1)
        total = total - _PASS_WEIGHT**index * (expected * guessed).sum(-1).mean()
    return total


@torch.no_grad()
def accepted(head: Head, target: Target, texts: Texts, depth: int, batch: int) -> list[float]:
    """Return how often the first 1, 2, ... tokens of a draft are all what the target wrote."""
    right, seen = torch.zeros(depth, device=texts.tokens.device), 0
    for first in range(0, len(texts.tokens), batch):
        tokens, written = texts.tokens[first : first + batch], texts.written[first : first + batch]
        whole = written[:, 1 + depth :]  # the last token of the draft was written by the target, and so all before
        follows = torch.ones_like(whole)
        for index, output in enumerate(head(target.read(tokens)[0], tokens, target.embedding, depth)):
            ahead, count = 2 + index, whole.shape[1]
            guessed = target.drafted[functional.linear(output[:, :count], target.output).argmax(-1)]
            starts = written[:, 1 : 1 + count]
            follows = follows & starts & (guessed == tokens[:, ahead : ahead + count])
            right[index] += (follows & whole).sum()
        seen += int((whole & written[:, 1 : 1 + whole.shape[1]]).sum())
    return [round(value / max(seen, 1), 4) for value in right.tolist()]


def save(head: Head, target: Target, path: Path) -> None:
    """Write the head in its published form, without the rows that are the target's."""
    tensors = {name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in head.named_parameters()}
    drafted = target.drafted.cpu()
    tensors["d2t"] = drafted - torch.arange(len(drafted))
    tensors["t2d"] = torch.zeros(len(target.embedding), dtype=torch.bool).index_fill_(0, drafted, True)
    save_file(tensors, path.with_suffix(".part"), {"format": "pt"})
    path.with_suffix(".part").replace(path)


def config_for(model: Any, folder: Path) -> Config:
    """Return a head's configuration. Ends the program if it is not for that model, or reads other layers."""
    config = read_config(folder)
    for name in ("hidden_size", "vocab_size"):
        if config[name] != getattr(model.config, name):
            raise SystemExit(f"{name} is {config[name]} in {folder} and {getattr(model.config, name)} in the base")
    if refused := {"eagle_aux_hidden_state_layer_ids", "eagle_config"} & config.keys():
        raise SystemExit(f"{folder} has {', '.join(sorted(refused))}: heads are trained for layers 2, n / 2 and n - 3")
    return config


def train(args: argparse.Namespace, base: Path, started: float) -> dict[str, Any]:
    """Write texts, train, evaluate; return the results."""
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - slow to import

    device = torch.device(args.device)
    half = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(args.seed)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=half).to(device).eval().requires_grad_(False)
    config = config_for(model, args.head)
    target = Target(model, config["draft_vocab_size"])
    writer = Writer(model, load_tokenizer(base), args.rows, args.length, args.system)
    end = started + 60 * args.minutes - args.evaluation_seconds
    begin = time.monotonic()
    print(f"ready after {begin - started:.0f} s on {device}", flush=True)

    texts: list[Texts] = []
    longest = 0.0
    while not texts or time.monotonic() + longest < begin + (end - begin) * args.write_share:
        before = time.monotonic()
        texts.append(writer.write(args.seed + len(texts)))
        count = int(texts[-1].written.sum())  # waits for the device
        longest = time.monotonic() - before
        print(f"wrote {count} tokens in {longest:.1f} s", flush=True)
    questions = [("greedy", (0.0,)), ("temperature 1", (1.0,))]
    held_out = {name: writer.write(args.seed, held_out=True, temperatures=kind) for name, kind in questions}
    del writer
    covered = target.choose(texts)
    count = sum(int(part.written.sum()) for part in texts)
    tokens, written = (torch.cat([getattr(part, name) for part in texts]) for name in ("tokens", "written"))
    torch.cuda.empty_cache() if device.type == "cuda" else None
    print(f"{count} tokens in {len(tokens)} texts, {covered:.2%} of them in the draft vocabulary", flush=True)

    stored = None
    if device.type == "cuda" and torch.cuda.mem_get_info()[0] > 3 * tokens.numel() * 2 * 4 * config["hidden_size"]:
        parts = [target.read(part) for part in tokens.split(args.batch)]
        stored = tuple(torch.cat(kind) for kind in zip(*parts, strict=True))
        del parts
    head = Head(config).to(device)
    if args.start is not None:
        known = load_file(args.start)
        head.load_state_dict({name: known[name].float() for name in head.state_dict()})
    optimizer = torch.optim.AdamW(head.parameters(), betas=(0.9, 0.95), weight_decay=0.01)
    begin, shown, steps = time.monotonic(), 0.0, 0
    order = torch.randperm(len(tokens), device=device)
    while (done := (time.monotonic() - begin) / (end - begin)) < 1 and (not args.steps or steps < args.steps):
        if args.steps:
            done = steps / args.steps
        rate = args.rate * min(1.0, (steps + 1) / 100) * (0.02 + 0.98 * cosine(done))
        for group in optimizer.param_groups:
            group["lr"] = rate
        first = steps * args.batch % len(tokens)
        if steps and first < args.batch:
            order = torch.randperm(len(tokens), device=device)
        chosen = order[first : first + args.batch]
        with torch.autocast(device.type, torch.bfloat16, enabled=half == torch.bfloat16):
            read = target.read(tokens[chosen]) if stored is None else (stored[0][chosen], stored[1][chosen])
            loss = loss_of(head, target, tokens[chosen], written[chosen], read, args.passes)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        steps += 1
        now = time.monotonic()
        if now - shown > 15:
            shown = now
            print(f"step {steps} {done:4.0%} {(now - begin) / steps:.3f} s each, loss {loss.item():.4f}", flush=True)
            save(head, target, args.out / WEIGHTS)
    head.to(torch.bfloat16).to(half)  # as it ships
    save(head, target, args.out / WEIGHTS)
    results: dict[str, Any] = {
        "device": device_name(args.device),
        "tokens": count,
        "texts": len(tokens),
        "draft_vocabulary_share": round(covered, 4),
        "steps": steps,
        "batch": args.batch,
        "training_seconds": round(time.monotonic() - begin),
    }
    for name, found in held_out.items():
        with torch.autocast(device.type, torch.bfloat16, enabled=half == torch.bfloat16):
            shares = accepted(head, target, found, args.passes, args.batch)
        results[f"accepted, {name}"] = shares
        results[f"mean accepted length, {name}"] = round(sum(shares), 3)
    results["minutes"] = round((time.monotonic() - started) / 60, 2)
    return results


def main(flags: Sequence[str] | None = None) -> None:
    """Train and evaluate with the arguments in `flags`, or those of the command line."""
    started = time.monotonic()
    args = parse(flags)
    prepare(args)
    with tempfile.TemporaryDirectory() as scratch:
        found = train(args, base_folder(args.base, Path(scratch) / "base"), started)
    (args.out / CONFIG_FILE).write_text((args.head / CONFIG_FILE).read_text())
    write_results(args.out, found)
    print(json.dumps(found, indent=1), flush=True)
