"""The torch runner: a transformers model, on flat tokens over our KV blocks."""

import ctypes
import math
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from transformers.configuration_utils import PreTrainedConfig

from engine.checkpoints.eagle import EagleHead, taken_layers
from engine.checkpoints.facts import ModelFacts
from engine.config import EmbeddedConfig, Tag
from engine.embedded.kv.layout import Attends, LayerGroup, ask, share
from engine.embedded.kv.memory import KvMemory, discard, shared_zeros
from engine.embedded.models.devices import device_of, dtype_of
from engine.embedded.models.runner import PendingTokens, StepInput
from engine.embedded.models.shared_weights import bytes_at
from engine.embedded.models.torch import decoder, linear
from engine.embedded.models.torch.attention import ATTENTION_NAME, KvCache, StepAttention, sort_decodes, zeros
from engine.embedded.models.torch.head import TorchHead
from engine.embedded.models.torch.linear import can_pack
from engine.embedded.models.torch.norm import replace_norms
from engine.embedded.models.transformers_models import auto_class, drop_tower, load_config, load_weights
from engine.errors import EngineFailure
from engine.memory.device import ReservedDeviceMemory
from engine.memory.wire import MemoryServiceError

MIB = 1 << 20


class TorchRunner(PendingTokens):
    """A `ModelRunner` for any model of transformers with attention that we have, on any device."""

    spare_blocks = 0
    """Blocks of each cache that belong to the runner and not to the pool."""
    spare_slots = 0
    compute_path = "transformers"

    def __init__(self, config: EmbeddedConfig) -> None:
        self.device = device_of(config)
        super().__init__(config.max_batch_size + self.spare_slots, self.device)
        self.dtype = dtype_of(config, self.device)
        self.instruction_set = instruction_set(self.device)
        self.cache_dtype = torch.float8_e4m3fn if config.kv_cache_dtype == "fp8" else self.dtype
        self.hf_config, facts = load_config(config.model)
        self._taken = taken_layers(config.head_folder, facts)
        self.takes_images = facts.image_tokens
        self.context_length = min(config.max_seq_len or facts.context_length, facts.context_length)
        self.module: Any = None
        self._entered: dict[int, torch.Tensor] = {}
        self._output: torch.Tensor | None = None
        """Output rows until a head has taken its own of them; layers of the module may be laid out otherwise."""
        self._reload = partial(self._load, config, facts)
        attends = self._reload()
        self.vocab_size = facts.vocab_size
        self.eos_token_ids = facts.eos_token_ids
        self.groups = self._share(config, attends)
        shapes = [
            (
                group.num_blocks + self.spare_blocks,
                len(group.layers),
                2,
                config.kv_block_size,
                attends.kv_heads,
                attends.head_dim,
            )
            for group in self.groups
        ]
        self._reserved: list[ReservedDeviceMemory] = []
        """Memory of the KV cache, on a GPU that takes it later or gives it back."""
        self.caches = [KvCache(self._zeros(config, shape)) for shape in shapes]
        if not config.kv_memory_later:
            self.take_memory()
        self.memory = KvMemory("blocks of tokens", attends, [cache.data for cache in self.caches])

    @property
    def cache(self) -> KvCache:
        """The cache of the first group: the only one where attention is full in every layer."""
        return self.caches[0]

    def take_memory(self) -> None:
        try:
            for reserved in self._reserved:
                if self.device.type == "cuda" and not reserved.released:
                    torch.cuda.synchronize(self.device)
                reserved.take()
        except MemoryServiceError as error:
            raise EngineFailure(f"there is no memory for KV blocks: {error}") from error
        if self._reserved:
            for cache in self.caches:
                cache.data.zero_()

    def _reserve(self, shape: tuple[int, ...]) -> torch.Tensor:
        size = math.prod(shape) * self.cache_dtype.itemsize
        try:
            self._reserved.append(ReservedDeviceMemory(size, self.device.index or 0))
        except MemoryServiceError as error:
            raise EngineFailure(f"no addresses can be reserved for KV blocks: {error}") from error
        return bytes_at(self._reserved[-1].address, size, self.device).view(self.cache_dtype).view(shape)

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

    def release_memory(self, tags: Collection[Tag], level: int) -> None:
        if "kv_cache" in tags:
            self._release_cache()
        if "weights" in tags:
            self._release_weights(level)

    def resume_memory(self, tags: Collection[Tag]) -> None:
        if "weights" in tags:  # first: while they are read they may take memory twice
            self._resume_weights()
        if "kv_cache" in tags and any(reserved.released for reserved in self._reserved):
            self.take_memory()

    def _zeros(self, config: EmbeddedConfig, shape: tuple[int, ...]) -> torch.Tensor:
        """Allocate a KV cache, or reserve its addresses. On a GPU a sleep can release it unless it moves KV blocks, as
        other processes have mapped it then."""
        if config.kv_memory_later or (
            self.device.type == "cuda" and config.sleep is not None and not config.kv_transfer
        ):
            return self._reserve(shape)
        if self.device.type == "cpu" and config.kv_transfer:
            return shared_zeros(shape, self.cache_dtype)
        return zeros(shape, self.cache_dtype, self.device)

    def _release_cache(self) -> None:
        if self.device.type == "cpu" and not self._reserved:
            for cache in self.caches:
                discard(cache.data)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        try:
            for reserved in self._reserved:
                reserved.release()
        except MemoryServiceError as error:
            raise EngineFailure(f"the memory of KV blocks cannot be given back: {error}") from error

    def _release_weights(self, level: int) -> None:
        if level > 1:
            self.module = None
        elif self.device.type != "cpu":
            self.module.to("cpu")
        if self.device.type == "cpu":
            _give_back_memory()
        else:
            torch.cuda.empty_cache()

    def _resume_weights(self) -> None:
        if self.module is None:
            self._reload()
        elif self.device.type != "cpu":
            self.module.to(self.device)

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

    def _load(self, config: EmbeddedConfig, facts: ModelFacts) -> Attends:
        """Load the weights, and return how the layers attend."""
        self.module = _load_module(config, self.hf_config, facts, self.dtype, self.device)
        attends = ask(self.module, self.hf_config, self.context_length)
        self._adapt(config, attends)
        self._watch()
        return attends

    def _watch(self) -> None:
        """Have the layers that a head reads note what enters them."""
        for index in self._taken:
            self.module.get_decoder().layers[index].register_forward_pre_hook(partial(self._note, index))

    def _note(self, index: int, _: Any, arguments: tuple[torch.Tensor, ...]) -> None:
        self._entered[index] = arguments[0][0]

    def _adapt(self, config: EmbeddedConfig, attends: Attends) -> None:
        """Adapt the loaded module to the device, before memory for KV blocks is taken."""
        if self._taken:
            self._output = self.module.get_output_embeddings().weight.detach()
        if self.device.type == "cpu":
            _replace_for_cpu(self.module)
            _give_back_memory()
        elif self.takes_images:
            torch.cuda.empty_cache()  # of the vision tower

    def _set_aside(self, config: EmbeddedConfig) -> int:
        """Return the bytes of GPU memory that are taken after the KV cache."""
        return 0

    def _share(self, config: EmbeddedConfig, attends: Attends) -> list[LayerGroup]:
        memory = config.kv_cache_memory_mb * MIB
        if self.device.type == "cuda":
            free = torch.cuda.mem_get_info(self.device)[0] - self._set_aside(config)
            memory = int(free * config.free_gpu_memory_fraction)
        layer_block_bytes = 2 * config.kv_block_size * attends.kv_heads * attends.head_dim * self.cache_dtype.itemsize
        memory -= self.spare_blocks * len(attends.windows) * layer_block_bytes
        return share(attends, layer_block_bytes, memory, config.kv_block_size, config.num_blocks)


def instruction_set(device: torch.device) -> str:
    """Return the instruction set of torch's own code: as torch names the processor's, or a GPU's compute capability."""
    if device.type != "cuda":
        return torch.backends.cpu.get_cpu_capability().lower().replace("default", "portable")
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device))


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
