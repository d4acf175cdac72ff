"""Numbers of tokens for which there are CUDA graphs of a step."""

from engine.config import EmbeddedConfig
from engine.embedded.models.checkpoint import LlamaConfig
from engine.embedded.models.cuda.prefixes import LEAST_SEQUENCES

SHORT_PROMPT = 256
"""Number of tokens in steps that have a graph of any model, however few sequences run: a chat that goes on often adds
no more to its prompt."""
BESIDE_TOKENS = 128
"""Number of tokens from which on there is a graph for chunks that computes decodes apart from them."""
_SPACING = ((64, 16), (256, 32), (1 << 30, 64))
"""Distances of graph sizes from 16 on, as pairs: below this number of rows, graph sizes have this distance."""
CHUNKS = (16, 32, 64, 128, 192, 256)
"""Numbers of tokens for which there is a graph for chunks, up to the batch size or `SHORT_PROMPT`."""
PROMPTS = (320, 384, 512, 768, 1024, 1536, 2048)
"""Numbers of tokens for which there is one where computing a layer takes no longer than launching its kernels."""
LAUNCH_SECONDS = 500e-6
"""Time in which the host launches the kernels of a layer one by one: on hosts of H200s 0.3 to 0.9 ms
(benchmarks/results/2026-11-29-h200-prompt-graphs.md)."""
_RATE = {2: 3e14, 1: 6e14}
"""Weights times tokens in a second on an H200, by the bytes of a weight: it sustains about 600 TFLOP/s of bfloat16."""
_CASCADES = (32, 64, 128, 192, 256)
"""Numbers of decodes for which there is a graph that reads shared prefixes once, and the batch size."""
_DRAFTED_ROWS = 1024
"""Number of rows of logits in a large graph if sequences have drafts, each token of which needs one."""


class GraphSizes:
    """Numbers of tokens of the steps that have a graph, rising, by kinds of graphs."""

    def __init__(self, config: EmbeddedConfig, shape: LlamaConfig) -> None:
        batch = config.max_batch_size
        self.largest = max(batch, min(SHORT_PROMPT, config.max_num_tokens))
        """The number of tokens up to which any step has a graph."""
        self._rows = max(batch, _DRAFTED_ROWS) if config.speculative != "none" else batch
        self.decodes = _decodes(self.largest)
        self.chunks = [*_up_to(_doubled(CHUNKS, self.largest), self.largest), *_prompts(self.largest, config, shape)]
        self.beside = [size for size in self.chunks if size >= BESIDE_TOKENS]
        """Chunks, and decodes that are computed apart from them."""
        self.cascades = _up_to(_CASCADES, batch) if batch >= LEAST_SEQUENCES else []
        """Decodes that share prefixes."""

    def rows(self, size: int) -> int:
        """Return how many of its rows' logits a graph of this size computes: of a large one not all."""
        return size if size <= self.largest else min(size, self._rows)

    def chosen(self, size: int) -> int:
        """Return how many rows a step chooses whose logits a graph of this size computes; 0 if it computes all."""
        rows = self.rows(size)
        return rows if rows < size else 0

    def takes_apart(self, tokens: int) -> bool:
        """Return whether decodes in a step of so many tokens may be computed apart from its chunks."""
        return tokens >= BESIDE_TOKENS

    @property
    def most_rows(self) -> int:
        """Most rows of logits that any graph computes."""
        return max(map(self.rows, (*self.decodes, *self.chunks, *self.beside, *self.cascades)))


def _decodes(largest: int) -> list[int]:
    """Return powers of two, then sizes ever wider apart."""
    sizes = [1, 2, 4, 8, 16]
    while sizes[-1] < largest:
        sizes.append(sizes[-1] + next(apart for limit, apart in _SPACING if sizes[-1] < limit))
    return _up_to(sizes, largest)


def _doubled(sizes: tuple[int, ...], largest: int) -> tuple[int, ...]:
    """Return few sizes, as starts wait for their graphs."""
    while sizes[-1] < largest:
        sizes = (*sizes, 2 * sizes[-1])
    return sizes


def _prompts(largest: int, config: EmbeddedConfig, shape: LlamaConfig) -> list[int]:
    """Return sizes above the largest of all models whose steps are sooner computed than launched."""
    sizes = (shape.shapes[name] for name in shape.shapes if name.startswith("model.layers.0."))
    weights = sum(size[0] * size[1] for size in sizes if len(size) == 2)
    computed = int(LAUNCH_SECONDS * _RATE[1 if config.quantization == "fp8" else 2] / weights)
    most = min(computed // 64 * 64, config.max_num_tokens, PROMPTS[-1])
    return [size for size in _up_to(PROMPTS, most) if size > largest]


def _up_to(sizes: "tuple[int, ...] | list[int]", largest: int) -> list[int]:
    return [*(size for size in sizes if size < largest), largest]
