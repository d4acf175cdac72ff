"""Loading a transformers model and running it on flat tokens over our KV blocks."""

import ctypes
from collections.abc import Callable
from collections.abc import Sequence as Sequence_
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.configuration_utils import PreTrainedConfig
from transformers.utils import logging as transformers_logging

from engine.config import EmbeddedConfig
from engine.embedded import decoder, linear
from engine.embedded.attention import ATTENTION_NAME, KvCache, SdpaAttention
from engine.embedded.linear import can_pack
from engine.embedded.norm import replace_norms
from engine.embedded.scheduler import Chunk
from engine.errors import EngineFailure

MIB = 1 << 20


class Model:
    """The weights, the KV cache and one `forward` over the chunks of a step."""

    def __init__(self, config: EmbeddedConfig) -> None:
        self.device = torch.device(_device(config.device))
        self.dtype = _dtype(config.dtype, self.device)
        self.hf_config = AutoConfig.from_pretrained(config.model, local_files_only=True)
        _check_attention(self.hf_config)
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        module: Any = AutoModelForCausalLM.from_pretrained(
            config.model, dtype=self.dtype, attn_implementation=ATTENTION_NAME, local_files_only=True
        )
        self._module = module.to(self.device).eval()
        if self.device.type == "cpu":
            _replace_for_cpu(self._module)
            _give_back_memory()
        self.vocab_size: int = self.hf_config.vocab_size
        self.context_length: int = min(config.max_seq_len or 1 << 30, self.hf_config.max_position_embeddings)
        self.eos_token_ids = _eos_token_ids(Path(config.model), self.hf_config)
        self.cache = self._allocate(config)

    @torch.inference_mode()
    def forward(self, chunks: Sequence_[Chunk], rows: Sequence_[int]) -> torch.Tensor:
        """Compute the chunks, which `sort_chunks` has sorted, and return the logits [len(rows), vocab] of these flat rows."""
        tokens = [token for chunk in chunks for token in chunk.sequence.tokens[chunk.start : chunk.start + chunk.length]]
        positions = [position for chunk in chunks for position in range(chunk.start, chunk.start + chunk.length)]
        output = self._module(
            input_ids=torch.tensor([tokens], device=self.device),
            position_ids=torch.tensor([positions], device=self.device),
            use_cache=False,
            logits_to_keep=torch.tensor(rows, dtype=torch.long, device=self.device),
            paged=SdpaAttention(self.cache, chunks),
        )
        logits: torch.Tensor = output.logits[0]
        return logits

    def _allocate(self, config: EmbeddedConfig) -> KvCache:
        text = self.hf_config.get_text_config()
        heads = text.num_key_value_heads
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        block_bytes = text.num_hidden_layers * 2 * config.kv_block_size * heads * head_dim * self.dtype.itemsize
        memory = config.kv_cache_memory_mb * MIB
        if self.device.type == "cuda":
            memory = int(torch.cuda.mem_get_info(self.device)[0] * config.free_gpu_memory_fraction)
        num_blocks = config.num_blocks or memory // block_bytes
        if num_blocks < 1:
            raise EngineFailure(f"no room for a KV block: one takes {block_bytes / MIB:.1f} MiB and {memory / MIB:.0f} MiB are set aside")
        return KvCache(num_blocks, text.num_hidden_layers, config.kv_block_size, heads, head_dim, self.dtype, self.device)


def _device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name


def _dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16, but float32 on CPUs that have no bfloat16 instructions and would be slower with it."""
    if name == "auto":
        fast = device.type != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return torch.bfloat16 if fast else torch.float32
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _replace_for_cpu(model: Any) -> None:
    """Replace what has a faster equivalent here: norms, then whole layers, then the linears that are left."""
    replace_norms(model)
    if can_pack():
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:  # laying weights out is work for one thread each
            list(pool.map(_do, list(decoder.replacements(model))))
            list(pool.map(_do, list(linear.replacements(model, model.get_output_embeddings()))))


def _do(replacement: Callable[[], None]) -> None:
    with torch.inference_mode():
        replacement()


def _give_back_memory() -> None:
    """Return to the system what the weights' first layout has left in the C library's heap: 100 MB of SmolLM2-135M's 540."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


def _check_attention(config: PreTrainedConfig) -> None:
    kinds = set(getattr(config.get_text_config(), "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise EngineFailure(f"the embedded engine runs models with full attention only; {config.model_type} has {', '.join(sorted(kinds))}")


def _eos_token_ids(folder: Path, config: PreTrainedConfig) -> tuple[int, ...]:
    eos = config.eos_token_id
    if (folder / "generation_config.json").exists():
        eos = GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id or eos
    return tuple(eos) if isinstance(eos, list) else (eos,) if eos is not None else ()
