"""The attention windows of a model's layers, as a trial run of the model shows them, and the division of KV memory
among groups of layers with equal windows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from engine.embedded.kv.groups import longest_chunk
from engine.errors import EngineFailure

if TYPE_CHECKING:
    from transformers.configuration_utils import PreTrainedConfig

KINDS = {"full_attention", "sliding_attention"}
TYPICAL_TOKENS = 4096
"""The memory is shared so that as many sequences of this length as possible fit; in shorter ones windows need more
of it."""


class Attends(NamedTuple):
    """Size of the keys and values of a token, and how far back each layer attends."""

    windows: tuple[int | None, ...]
    """Attention window of each layer: the number of tokens, itself included, that a token attends to; None for all."""
    kv_heads: int
    head_dim: int

    @property
    def groups(self) -> dict[int | None, tuple[int, ...]]:
        """The layers of each window, full attention first."""
        order = sorted(set(self.windows), key=lambda window: (window is not None, window or 0))
        return {window: tuple(layer for layer, own in enumerate(self.windows) if own == window) for window in order}


class LayerGroup(NamedTuple):
    """Layers that look equally far back, and the blocks of their pool."""

    window: int | None
    layers: tuple[int, ...]
    num_blocks: int


class _Probe:
    """A stand-in for attention that notes what every layer passes to it."""

    def __init__(self) -> None:
        self.windows: dict[int, int | None] = {}
        self.shapes: set[tuple[int, ...]] = set()

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, **options: Any
    ) -> torch.Tensor:
        if "s_aux" in options:
            raise EngineFailure("the embedded engine has no attention sinks, which this model's layers use")
        self.windows[layer] = options.get("sliding_window")
        self.shapes |= {tuple(key.shape[1:]), tuple(value.shape[1:])}
        return query


def ask(module: Any, config: PreTrainedConfig, context_length: int) -> Attends:
    """Find out how a model's layers attend by computing one token. A window as long as the context counts as full
    attention. Raises EngineFailure for layers of other kinds."""
    kinds = getattr(config.get_text_config(), "layer_types", None)
    if others := set(kinds or ()) - KINDS:
        raise EngineFailure(
            "the embedded engine runs full and sliding-window attention; "
            f"{config.model_type} has {', '.join(sorted(others))}"
        )
    probe = _Probe()
    with torch.inference_mode():
        token = torch.zeros((1, 1), dtype=torch.long, device=module.get_input_embeddings().weight.device)
        module(input_ids=token, position_ids=token, use_cache=False, paged=probe)
    windows = tuple(window for _, window in sorted(probe.windows.items()))
    if len(windows) != config.get_text_config().num_hidden_layers or len(probe.shapes) != 1:
        raise EngineFailure(
            f"the embedded engine needs attention in every layer, of one shape; {config.model_type} has other layers"
        )
    if kinds and [kind == "sliding_attention" for kind in kinds] != [window is not None for window in windows]:
        raise EngineFailure(f"{config.model_type}'s layers do not attend according to its configuration")
    [(kv_heads, head_dim)] = probe.shapes
    return Attends(
        tuple(None if window is None or window >= context_length else window for window in windows), kv_heads, head_dim
    )


def share(attends: Attends, layer_block_bytes: int, memory: int, block_size: int, num_blocks: int) -> list[LayerGroup]:
    """Return the groups, with `num_blocks` blocks each or, if that is 0, with as many as fit into `memory` bytes.

    `layer_block_bytes` is what one layer keeps of a block. Raises EngineFailure if there is too little.
    """
    weights = {
        window: len(layers) * min(window or TYPICAL_TOKENS, TYPICAL_TOKENS) for window, layers in attends.groups.items()
    }
    groups = []
    for window, layers in attends.groups.items():
        part = memory * weights[window] // sum(weights.values())
        blocks = num_blocks or part // (len(layers) * layer_block_bytes)
        if blocks < 1:
            size, given = len(layers) * layer_block_bytes / (1 << 20), part / (1 << 20)
            raise EngineFailure(
                f"no room for a KV block: one takes {size:.1f} MiB and {given:.0f} MiB are set aside; "
                "raise KV_CACHE_MEMORY_MB on a CPU, FREE_GPU_MEMORY_FRACTION on a GPU"
            )
        if window is not None and longest_chunk(blocks, block_size, window) < 1:
            raise EngineFailure(
                f"{blocks} KV blocks of {block_size} tokens are too few for a sliding window of {window} tokens"
            )
        groups.append(LayerGroup(window, layers, blocks))
    return groups
