"""The base class of the runners in `torch/` and `cuda/`: their device, types and KV cache, and the memory that a sleep
gives back. It does without transformers."""

import math
from abc import ABC, abstractmethod
from collections.abc import Collection

import torch

from engine.checkpoints.eagle import taken_layers
from engine.checkpoints.facts import ModelFacts
from engine.config import EmbeddedConfig, Tag
from engine.embedded.kv.cache import KvCache, zeros
from engine.embedded.kv.layout import Attends, LayerGroup, share
from engine.embedded.kv.memory import KvMemory, discard, shared_zeros
from engine.embedded.models.devices import cache_dtype_of, device_of, dtype_of
from engine.embedded.models.runner import PendingTokens
from engine.embedded.models.shared_weights import bytes_at
from engine.errors import EngineFailure
from engine.memory.device import ReservedDeviceMemory
from engine.memory.wire import MemoryServiceError

MIB = 1 << 20


class PagedRunner(PendingTokens, ABC):
    """The part of a `ModelRunner` over a `KvCache` that does not depend on the model's code."""

    spare_blocks = 0
    """Blocks of each cache that belong to the runner and not to the pool."""
    spare_slots = 0

    def __init__(self, config: EmbeddedConfig, facts: ModelFacts) -> None:
        self.device = device_of(config)
        super().__init__(config.max_batch_size + self.spare_slots, self.device)
        self._config = config
        self.dtype = dtype_of(config, self.device)
        self.instruction_set = instruction_set(self.device)
        self.cache_dtype = cache_dtype_of(config, self.dtype)
        self._taken = taken_layers(config.head_folder, facts)
        self.takes_images = facts.image_tokens
        self.context_length = min(config.max_seq_len or facts.context_length, facts.context_length)
        attends = self._load()
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

    def release_memory(self, tags: Collection[Tag], level: int) -> None:
        if "kv_cache" in tags:
            self._release_cache()
        if "weights" in tags:
            self._release_weights(level)

    @abstractmethod
    def _load(self) -> Attends:
        """Load the weights, and return how the layers attend."""

    @abstractmethod
    def _release_weights(self, level: int) -> None:
        """Give the memory of the weights back."""

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

    def _reserve(self, shape: tuple[int, ...]) -> torch.Tensor:
        size = math.prod(shape) * self.cache_dtype.itemsize
        try:
            self._reserved.append(ReservedDeviceMemory(size, self.device.index or 0))
        except MemoryServiceError as error:
            raise EngineFailure(f"no addresses can be reserved for KV blocks: {error}") from error
        return bytes_at(self._reserved[-1].address, size, self.device).view(self.cache_dtype).view(shape)

    def _resume_cache(self, tags: Collection[Tag]) -> None:
        """Take the memory of KV blocks again if that is wanted and it was released."""
        if "kv_cache" in tags and any(reserved.released for reserved in self._reserved):
            self.take_memory()

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


def instruction_set(device: torch.device) -> str:
    """Return the instruction set of torch's own code: as torch names the processor's, or a GPU's compute capability."""
    if device.type != "cuda":
        return torch.backends.cpu.get_cpu_capability().lower().replace("default", "portable")
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device))
