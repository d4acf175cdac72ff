"""The torch runner: a transformers model, on flat tokens over our KV blocks."""

import ctypes
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from transformers.configuration_utils import PreTrainedConfig

from engine.checkpoints.eagle import EagleHead
from engine.checkpoints.facts import ModelFacts
from engine.config import EmbeddedConfig, Tag
from engine.embedded.kv.layout import Attends, ask
from engine.embedded.models.paged import PagedRunner
from engine.embedded.models.runner import StepInput
from engine.embedded.models.torch import decoder, linear
from engine.embedded.models.torch.attention import StepAttention, sort_decodes
from engine.embedded.models.torch.head import TorchHead
from engine.embedded.models.torch.interface import ATTENTION_NAME
from engine.embedded.models.torch.linear import can_pack
from engine.embedded.models.torch.norm import replace_norms
from engine.embedded.models.transformers_models import auto_class, drop_tower, load_config, load_weights


class TorchRunner(PagedRunner):
    """A `ModelRunner` for any model of transformers with attention that we have, on any device."""

    compute_path = "transformers"

    def __init__(self, config: EmbeddedConfig) -> None:
        self._hf_config, self._facts = load_config(config.model)
        self.module: Any = None
        self._entered: dict[int, torch.Tensor] = {}
        self._output: torch.Tensor | None = None
        """Output rows until a head has taken its own of them; layers of the module may be laid out otherwise."""
        super().__init__(config, self._facts)

    @torch.inference_mode()
    def forward(self, step: StepInput) -> torch.Tensor:
        step = sort_decodes(step)
        output = self.module(
            **self._inputs_of(step),
            position_ids=self._positions_of(step).to(self.device),
            use_cache=False,
            logits_to_keep=torch.tensor(step.rows, dtype=torch.long, device=self.device),
            paged=StepAttention(self.caches, self.groups, step),
        )
        logits: torch.Tensor = output.logits[0]
        if self._taken:
            self.hidden = torch.cat([self._entered[index] for index in self._taken], -1)
        return logits

    def load_head(self, head: EagleHead, spare_blocks: int) -> TorchHead:
        """See `ModelRunner`."""
        blocks, size = self.groups[0].num_blocks + spare_blocks, self.cache.block_size
        assert self._output is not None, "loaded once, for a configuration with a head"
        output, self._output = self._output, None
        return TorchHead(head, self._embeddings_of, output, blocks, size)

    def _embeddings_of(self, tokens: torch.Tensor) -> torch.Tensor:
        embeddings: torch.Tensor = self.module.get_input_embeddings()(tokens)
        return embeddings

    def _release_weights(self, level: int) -> None:
        if level > 1:
            self.module = None
        elif self.device.type != "cpu":
            self.module.to("cpu")
        if self.device.type == "cpu":
            _give_back_memory()
        else:
            torch.cuda.empty_cache()

    def resume_memory(self, tags: Collection[Tag]) -> None:
        if "weights" in tags and self.module is None:  # first: while they are read they may take memory twice
            self._load()
        elif "weights" in tags and self.device.type != "cpu":
            self.module.to(self.device)
        self._resume_cache(tags)

    def _inputs_of(self, step: StepInput) -> dict[str, torch.Tensor]:
        """Return token ids [1, tokens], or embeddings [1, tokens, hidden size] if some are of images."""
        tokens = torch.tensor([self.token_ids(step)], device=self.device)
        if step.embeddings is None:
            return {"input_ids": tokens}
        embeddings: torch.Tensor = self.module.get_input_embeddings()(tokens)
        embeddings[0, step.embeddings.rows] = step.embeddings.embeddings
        return {"inputs_embeds": embeddings}

    def _positions_of(self, step: StepInput) -> torch.Tensor:
        """Return positions [1, tokens], or [3, 1, tokens] for mRoPE."""
        return torch.tensor([step.positions]) if step.rope_positions is None else step.rope_positions.unsqueeze(1)

    def _load(self) -> Attends:
        self.module = _load_module(self._config, self._hf_config, self._facts, self.dtype, self.device)
        attends = ask(self.module, self._hf_config, self.context_length)
        self._adapt()
        for index in self._taken:  # the layers that a head reads note what enters them
            self.module.get_decoder().layers[index].register_forward_pre_hook(partial(self._note, index))
        return attends

    def _note(self, index: int, _: Any, arguments: tuple[torch.Tensor, ...]) -> None:
        self._entered[index] = arguments[0][0]

    def _adapt(self) -> None:
        """Adapt the loaded module to the device, before memory for KV blocks is taken."""
        if self._taken:
            self._output = self.module.get_output_embeddings().weight.detach()
        if self.device.type == "cpu":
            _replace_for_cpu(self.module)
            _give_back_memory()
        elif self.takes_images:
            torch.cuda.empty_cache()  # of the vision tower


def _load_module(
    config: EmbeddedConfig, hf_config: PreTrainedConfig, facts: ModelFacts, dtype: torch.dtype, device: torch.device
) -> Any:
    """Load transformers' model onto the device: weights go straight there from the files, or are random (`dummy`)."""
    if config.load_format == "dummy":
        with torch.device(device):
            return _random(hf_config, dtype)
    module = load_weights(
        auto_class(hf_config),
        config.model,
        facts,
        dtype=dtype,
        attn_implementation=ATTENTION_NAME,
        device_map={"": device} if device.type != "cpu" else None,
    )
    return drop_tower(module)


def _random(hf_config: PreTrainedConfig, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    return drop_tower(
        auto_class(hf_config).from_config(hf_config, dtype=dtype, attn_implementation=ATTENTION_NAME).eval()
    )


def _replace_for_cpu(model: Any) -> None:
    """Replace modules that have a faster equivalent: norms, then whole layers, then the linears that are left."""
    replace_norms(model)
    if can_pack():
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:  # laying weights out is work for one thread each
            list(pool.map(_do, list(decoder.replacements(model))))
            list(pool.map(_do, list(linear.replacements(model, model.get_output_embeddings()))))


def _do(replacement: Callable[[], None]) -> None:
    with torch.inference_mode():
        replacement()


def _give_back_memory() -> None:
    """Return to the system what the weights' first layout has left in the C library's heap: 100 MB of SmolLM2-135M's
    540."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
