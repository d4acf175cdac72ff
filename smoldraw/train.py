"""Train smoldraw in minutes on one GPU: `python -m smoldraw --out FOLDER`, then the same with `--part clips`.

1. The autoencoder learns to rebuild pictures.
2. The judge learns to find shapes in pictures, half of them rebuilt by the autoencoder.
3. Text encoder and transformer learn the flow from noise to latents of pictures, with their prompts.
4. Held-out prompts are drawn by diffusers with the models as they ship: rounded to bfloat16, packed and unpacked.

`--part more` goes on with 3, and with `--part clips` a temporal layer follows every layer of the transformer. Both
continue from what the first run has left in FOLDER, where weights are saved every minute.
"""

import argparse
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

from smoldraw.architecture import (
    CHANNELS,
    LATENT,
    make_pipeline,
    make_text_encoder,
    make_tokenizer,
    make_transformer,
    make_vae,
    pack,
    parameters,
)
from smoldraw.evaluate import JUDGE, WEIGHTS, evaluate, held_out, load_judge, load_shipped
from smoldraw.judge import Judge, is_right
from smoldraw.pool import Pool, make_pool
from smoldraw.prompts import table
from smoldraw.render import FRAMES, Renderer, frames
from smolvision.images import COLOURS, SHAPES
from smolvision.training import RESULTS, arguments, cosine, device_name, prepare, write_results

PARTS = {
    "pictures": {"autoencoder": 0.2, "judge": 0.1, "image": 0.7},
    "more": {"image": 1.0},
    "clips": {"clip": 1.0},
}
"""Phases of the parts of training, and their shares of the time."""
NO_SIZES = {"resolution": None, "aspect_ratio": None}
"""Size conditions that PixArtAlphaPipeline passes for small pictures."""
NOISE = 0.1
"""Noise that the decoder learns to ignore; latents have variance 1."""
_SAVE_SECONDS = 60.0


def parse(flags: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments("smoldraw", __doc__, minutes=7.4, evaluation_seconds=25.0, rate=1e-3)
    parser.add_argument("--part", choices=PARTS, default="pictures", help="more and clips continue from --out")
    parser.add_argument("--pictures", type=int, default=600_000, help="pictures to train on")
    parser.add_argument("--clips", type=int, default=40_000, help="clips to train on")
    parser.add_argument("--batch", type=int, default=2048, help="pictures per step; of clips, a sixteenth")
    parser.add_argument("--held-out", type=int, default=1000, help="held-out prompts of pictures; a fifth for clips")
    parser.add_argument("--scales", type=float, nargs="*", default=(1.5, 2.0, 4.5, 7.5), help="of guidance, to compare")
    parser.add_argument("--workers", type=int, default=8, help="processes that generate prompts")
    parser.add_argument("--compile", action="store_true", help="compile the transformers' layers")
    return parser.parse_args(flags)


class Clock:
    """The time that is left. Data are generated within the share of the phase that needs them."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.started = time.monotonic()
        self._ends = self.started + args.minutes * 60 - args.evaluation_seconds
        self._left = dict(PARTS[args.part])

    def steps(self, phase: str) -> Iterator[float]:
        """Yield the share of a phase that is done, until its time is over; at least once."""
        begun = time.monotonic()
        share = self._left.pop(phase)
        seconds = (self._ends - begun) * share / (share + sum(self._left.values()))
        done = 0.0
        while done < 1:
            yield done
            done = (time.monotonic() - begun) / max(seconds, 1e-3)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started


class Trainer:
    """Optimiser, schedule and running average of the weights of some modules, and the steps of a phase."""

    def __init__(self, modules: Iterable[nn.Module], rate: float, half: bool) -> None:
        self.weights = [weight for module in modules for weight in module.parameters()]
        self.averages = [weight.detach().clone() for weight in self.weights]
        self._rate = rate
        self._half = half
        self._optimizer = torch.optim.AdamW(
            self.weights, rate, betas=(0.9, 0.98), weight_decay=0.01, fused=self.weights[0].is_cuda
        )

    def run(
        self, name: str, clock: Clock, loss_of: Callable[[], torch.Tensor], save: Callable[[], object] | None = None
    ) -> dict[str, Any]:
        """Train until the phase is over. The weights become their running averages, also during `save`, which is called
        now and then. Return facts for the results.
        """
        steps, begun, shown = 0, time.monotonic(), 0.0
        saved = begun
        device = self.weights[0].device.type
        for done in clock.steps(name):
            rate = self._rate * min(1.0, (steps + 1) / 200) * max(0.01, cosine(done))
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            with torch.autocast(device, torch.bfloat16, cache_enabled=False) if self._half else nullcontext():
                loss = loss_of()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.weights, 1.0)
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
            steps += 1
            with torch.no_grad():
                # Of about the last ninth of the steps: averages of all would keep what the first ones had not learned.
                torch._foreach_lerp_(self.averages, self.weights, max(0.001, 9 / (steps + 9)))
            if (now := time.monotonic()) - shown > 8:
                print(f"{clock.seconds:4.0f} s {name} {done:4.0%} step {steps} loss {loss.item():.4f}", flush=True)
                shown = now
            if save is not None and now - saved > _SAVE_SECONDS:
                with self._averaged():
                    save()
                saved = now
        seconds = time.monotonic() - begun
        print(f"{clock.seconds:4.0f} s {name} step {steps} loss {loss.item():.4f}", flush=True)
        self._set(self.averages)
        return {"steps": steps, "seconds": round(seconds), "loss": round(loss.item(), 4)}

    @contextmanager
    def _averaged(self) -> Iterator[None]:
        """Have the running averages as weights during the block."""
        weights = [weight.detach().clone() for weight in self.weights]
        self._set(self.averages)
        try:
            yield
        finally:
            self._set(weights)

    @torch.no_grad()
    def _set(self, values: Sequence[torch.Tensor]) -> None:
        torch._foreach_copy_(self.weights, values)


class Training:
    """All phases."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.device = torch.device(args.device)
        self.half = self.device.type == "cuda"
        torch.manual_seed(args.seed)
        self.clock = Clock(args)
        self.renderer = Renderer(self.device)
        self.tokenizer = make_tokenizer()
        if args.part == "pictures":
            self.found: dict[str, Any] = {"device": device_name(args.device)}
            self.vae = make_vae().to(self.device, memory_format=torch.channels_last)
            self.judge = Judge().to(self.device, memory_format=torch.channels_last)
            self.text = make_text_encoder(len(self.tokenizer)).to(self.device)
            self.transformers = {"image": make_transformer("image").to(self.device)}
        else:
            self.found = json.loads((args.out / RESULTS).read_text())
            trained = load_shipped("image", args.out, args.device, torch.float32)
            self.vae, self.text = trained.vae.requires_grad_(False), trained.text_encoder
            self.transformers = {"image": trained.transformer}
        self.kind = "clip" if args.part == "clips" else "image"
        self.pool = self._pool(self.kind, args.clips if self.kind == "clip" else args.pictures)

    def run(self) -> None:
        if self.args.part == "pictures":
            self._train_autoencoder()
            self._train_judge()
        if self.kind == "image":
            self._train_pictures()
        else:
            self._train_clips()
        self._write()
        self._evaluate()

    def _write(self) -> None:
        """Write the file of the model, and the results so far, which a run that continues reads."""
        with tempfile.TemporaryDirectory() as trained:
            self._pipeline().save_pretrained(trained)
            pack(Path(trained), self.args.out / WEIGHTS[self.kind])
        write_results(self.args.out, self.found)

    def _pipeline(self) -> DiffusionPipeline:
        return make_pipeline(self.kind, vae=self.vae, text_encoder=self.text, transformer=self.transformers[self.kind])

    def _evaluate(self) -> None:
        """Evaluate what the file holds, and write the results."""
        kind = self.kind
        found = self.found[kind]
        parts = {name: part for name, part in self._pipeline().components.items() if isinstance(part, nn.Module)}
        found["parameters"] = {name: parameters(part) for name, part in parts.items()}
        pipeline = load_shipped(kind, self.args.out, self.args.device)
        judge = load_judge(self.args.out / JUDGE, self.args.device)
        drawings = held_out(kind, max(1, self.args.held_out // (1 if kind == "image" else 5)))
        batch = 256 if kind == "image" else 32
        found |= evaluate(pipeline, judge, drawings, batch)
        some = drawings[: len(drawings) // 4 + 1]
        found["accuracy_by_guidance"] = {
            scale: evaluate(pipeline, judge, some, batch, scale)["accuracy"] for scale in self.args.scales
        }
        found["minutes"] = round(self.clock.seconds / 60, 2)
        write_results(self.args.out, self.found)
        print(
            f"{self.clock.seconds:4.0f} s {kind}: {found['accuracy']:.1%} of {found['drawn']} held-out prompts are "
            f"drawn right, {found['accuracy_by_guidance']}",
            flush=True,
        )

    def _pool(self, kind: str, size: int) -> Pool:
        made = make_pool(kind, size, self.tokenizer.backend_tokenizer.to_str(), self.args.workers)
        print(f"{self.clock.seconds:4.0f} s {size} prompts of {kind}s", flush=True)
        return Pool(*(part.to(self.device) for part in made))

    def _some(self, number: int) -> torch.Tensor:
        return torch.randint(len(self.pool.ids), (number,), device=self.device)

    def _pictures(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return pictures and their tables of shapes."""
        rows = self.pool.rows[self._some(number)]
        return self.renderer(rows).contiguous(memory_format=torch.channels_last), rows

    def _train_autoencoder(self) -> None:
        """Train on latents of mean 0 and variance 1 in each channel, which the last layer is then scaled to give."""
        trainer = Trainer([self.vae], 1.5e-3, self.half)

        def loss() -> torch.Tensor:
            images, _ = self._pictures(self.args.batch // 4)
            latents = self.vae.encode(images).latent_dist.mean.float()
            variance, mean = torch.var_mean(latents, (0, 2, 3), keepdim=True)
            latents = (latents - mean) * torch.rsqrt(variance + 1e-6)
            apart = self.vae.decode(latents + NOISE * torch.randn_like(latents)).sample.float() - images
            return apart.abs().mean() + apart.square().mean()

        facts = trainer.run("autoencoder", self.clock, loss)
        quant = self.vae.quant_conv
        with torch.no_grad():
            images, _ = self._pictures(self.args.batch)
            variance, mean = torch.var_mean(self.vae.encode(images).latent_dist.mean, (0, 2, 3))
            scale = torch.rsqrt(variance + 1e-6)
            quant.weight[:CHANNELS].mul_(scale[:, None, None, None])
            quant.bias[:CHANNELS].sub_(mean).mul_(scale)
            quant.weight[CHANNELS:].zero_()
            quant.bias[CHANNELS:].fill_(2 * math.log(NOISE))
            rebuilt = self.vae.decode(self.vae.encode(images).latent_dist.mean).sample
        self.vae.requires_grad_(False).register_to_config(scaling_factor=1.0)
        facts["psnr"] = round(-10 * math.log10((rebuilt - images).square().mean().item() / 4), 2)
        print(f"{self.clock.seconds:4.0f} s autoencoder: {facts['psnr']} dB", flush=True)
        self.found["autoencoder"] = facts

    def _train_judge(self) -> None:
        trainer = Trainer([self.judge], 2e-3, self.half)
        size = self.args.batch // 4

        @torch.no_grad()
        def pictures() -> tuple[torch.Tensor, torch.Tensor]:
            """Return pictures with all pairs of colour and shape, some rebuilt by the autoencoder, with some noise."""
            rows = self.pool.rows[self._some(size)]
            shapes = rows[:, 1:]
            again = torch.rand_like(shapes[:, :, 0]) < 0.33
            for column, number in enumerate((len(SHAPES), len(COLOURS))):
                values = torch.randint_like(shapes[:, :, column], number)
                shapes[:, :, column] = torch.where(again, values, shapes[:, :, column])
            shapes[:, :, 4].masked_fill_(shapes[:, :, 1] == rows[:, :1, 1], 0)  # what cannot be seen is not there
            images = self.renderer(rows).contiguous(memory_format=torch.channels_last)
            latents = self.vae.encode(images[: size // 4]).latent_dist.mean
            rebuilt = self.vae.decode(latents + 2 * NOISE * torch.randn_like(latents)).sample
            images[: size // 4] = rebuilt
            return images + 0.1 * torch.randn_like(images[:, :, :1, :1]) + 0.05 * torch.randn_like(images), rows

        facts = trainer.run("judge", self.clock, lambda: self.judge.loss(*pictures()))
        with torch.no_grad():
            for _ in range(20):  # statistics of normalisation that fit the averaged weights
                self.judge(pictures()[0])
        state = {name: value.half().contiguous() for name, value in self.judge.state_dict().items()}
        save_file(state, self.args.out / JUDGE)
        drawings = held_out("image", self.args.held_out)
        judge = load_judge(self.args.out / JUDGE, self.args.device)
        seen = judge.see(self.renderer(torch.from_numpy(table([it.scene for it in drawings])).to(self.device)))
        right = sum(map(is_right, drawings, seen))
        facts |= {"parameters": parameters(judge), "drawn": len(seen), "right": right}
        print(f"{self.clock.seconds:4.0f} s judge: {right} of {len(seen)} pictures as they should be", flush=True)
        self.found["judge"] = facts

    @torch.no_grad()
    def _latents(self, chunk: int, rows_of: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Return the latents of the pool's pictures, bfloat16."""
        made = []
        with torch.autocast(self.device.type, torch.bfloat16) if self.half else nullcontext():
            for rows in self.pool.rows.split(chunk):
                images = self.renderer(rows_of(rows)).contiguous(memory_format=torch.channels_last)
                made.append(self.vae.encode(images).latent_dist.mean.bfloat16().contiguous())
        print(f"{self.clock.seconds:4.0f} s {len(self.pool.rows)} in latents", flush=True)
        return torch.cat(made)

    def _noised(self, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return latents with noise, the timesteps and the flow that the transformer learns to predict."""
        noise = torch.randn_like(latents)
        share = torch.rand(len(latents), device=self.device)
        at = share.view(-1, *[1] * (latents.dim() - 1))
        return torch.lerp(latents, noise, at), share * 1000, noise - latents

    def _prompts(self, some: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return token ids and their mask. A tenth of the prompts is empty, for classifier-free guidance."""
        ids = self.pool.ids[some]
        empty = torch.zeros_like(ids[:1])
        empty[:, 0] = self.tokenizer.eos_token_id
        ids = torch.where(torch.rand(len(ids), 1, device=self.device) < 0.1, empty, ids)
        return ids, (ids > 0).float()

    def _train_pictures(self) -> None:
        latents = self._latents(2048, lambda rows: rows)
        transformer = self.transformers["image"]
        self._compile(transformer)
        trainer = Trainer([self.text, transformer], self.args.rate, self.half)

        def loss() -> torch.Tensor:
            some = self._some(self.args.batch)
            noised, times, flow = self._noised(latents[some].float())
            ids, mask = self._prompts(some)
            said = self.text(ids, attention_mask=mask).last_hidden_state
            made = transformer(noised, said, times, NO_SIZES, encoder_attention_mask=mask, return_dict=False)[0]
            return functional.mse_loss(made.float(), flow)

        before = self.found.get("image", {})
        facts = trainer.run("image", self.clock, loss, self._write)
        self.found["image"] = facts | {name: facts[name] + before.get(name, 0) for name in ("steps", "seconds")}

    def _train_clips(self) -> None:
        latents = self._latents(128, frames).view(-1, FRAMES, CHANNELS, LATENT, LATENT)
        transformer = self.transformers["clip"] = make_transformer("clip").to(self.device)
        self._inflate(transformer)
        self._compile(transformer)

        def loss() -> torch.Tensor:
            some = self._some(max(1, self.args.batch // 16))
            noised, times, flow = self._noised(latents[some].float().transpose(1, 2))
            ids, mask = self._prompts(some)
            said = self.text(ids, attention_mask=mask).last_hidden_state
            said, bias = self._as_latte(said, mask)
            made = transformer(noised, times, said, bias, return_dict=False)[0]
            return functional.mse_loss(made[:, :CHANNELS].float(), flow)

        trainer = Trainer([self.text, transformer], self.args.rate, self.half)
        self.found["clip"] = trainer.run("clip", self.clock, loss, self._write)

    def _as_latte(self, said: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return text states as LattePipeline has them, and a bias that hides those which it cuts off.

        It cuts one prompt at its end. Several prompts are padded with zeros; in both cases, the states of an empty
        prompt are neither cut nor zero.
        """
        lengths = mask.sum(1, keepdim=True)
        empty = lengths == 1
        kept = torch.where(empty[:, :, None], said, said * mask[:, :, None])
        ends = torch.where(empty, torch.randint_like(lengths, 5, mask.shape[1] + 1), lengths)
        ends = torch.where(torch.rand_like(ends) < 0.5, ends, mask.shape[1])
        hidden = torch.arange(mask.shape[1], device=mask.device) >= ends
        return kept, (hidden[:, None] * -10000.0).repeat_interleave(FRAMES, 0)

    def _inflate(self, transformer: nn.Module) -> None:
        """Start with the transformer of pictures; temporal layers change nothing at first."""
        source, target = self.transformers["image"].state_dict(), transformer.state_dict()
        for name, value in source.items():
            if name.startswith("proj_out."):  # of each place in a patch, the first half of the channels
                target[name].unflatten(0, (-1, 2 * CHANNELS))[:, :CHANNELS] = value.unflatten(0, (-1, CHANNELS))
            else:
                target[name].copy_(value)
        for block in transformer.temporal_transformer_blocks:
            for last in (block.attn1.to_out[0], block.ff.net[2]):
                nn.init.zeros_(last.weight)
                nn.init.zeros_(last.bias)

    def _compile(self, transformer: nn.Module) -> None:
        if self.args.compile:
            for name in ("transformer_blocks", "temporal_transformer_blocks"):
                for block in getattr(transformer, name, ()):
                    block.compile()


def main(flags: Sequence[str] | None = None) -> None:
    """Train and evaluate with the arguments in `flags`, or those of the command line."""
    args = parse(flags)
    prepare(args)
    if args.compile:
        torch._dynamo.config.suppress_errors = True  # code that cannot be compiled runs as it is
    Training(args).run()
