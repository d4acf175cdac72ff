"""Decoder layers of the Llama kind on a GPU: joined products, Triton kernels between them, the residual stream
changed in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch.nn import functional

from engine.embedded.kv.cache import KvCache
from engine.embedded.models.checkpoint import LlamaConfig
from engine.embedded.models.cuda import compressed, kernels
from engine.embedded.models.cuda.attention import AttentionStep, CudaAttention
from engine.embedded.models.cuda.compressed import CompressedWeight, bytes_compressed, compress
from engine.embedded.models.cuda.fp8 import Fp8Products
from engine.embedded.models.cuda.weights import Copied, Norm, PlainProducts, Products, Weight
from engine.embedded.models.devices import UnsupportedModelError
from engine.embedded.models.rotary import Rotary

_OUTPUT_TILE = (2, 4096, 4)
"""Share of each program of the product of one row with the output rows."""
_COMPRESSED_OUTPUT_TILE = (4, 2, 512)
"""The same of `compressed.product`."""
_TRIAL = [1, 8, 130]
"""Numbers of tokens in the steps of a trial: one, few, and so many that a library computes their products."""
_TRIED = 8
"""Maximum number of tokens of such a step whose logits are looked at."""
_SPREAD = 0.02
"""Standard deviation of random weights."""
_JOINED = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""The linears of a layer that are computed as one product, by its name."""


class _JoinedLayer:
    """The weights of one layer, joined."""

    qkv: Weight
    out: Weight
    gate_up: Weight
    down: Weight
    bias: torch.Tensor | None = None
    """Biases of the projections of queries, keys and values, one behind the other."""
    head_norms: Norm | None = None
    """Norm of each head: weights [2, head_dim], for queries and for keys."""

    def __init__(self, index: int, shapes: Shapes, epsilon: float, products: Products, empty: Empty) -> None:
        norm, mlp_norm = _norms(index)
        self.norm: Norm = empty(*shapes[norm]), epsilon
        self.mlp_norm: Norm = empty(*shapes[mlp_norm]), epsilon
        for name, parts in _linears(index).items():
            values = empty(sum(shapes[part][0] for part in parts), shapes[parts[0]][1])
            setattr(self, name, products.weight(name, values))
        biases, head_norms = _biases(index), _head_norms(index)
        if biases[0] in shapes:
            self.bias = empty(sum(shapes[name][0] for name in biases))
        if head_norms[0] in shapes:
            self.head_norms = empty(len(head_norms), *shapes[head_norms[0]]), epsilon

    def parts(self, index: int, shapes: Shapes) -> dict[str, torch.Tensor]:
        """Return views of the weights by their names in a checkpoint."""
        found = dict(zip(_norms(index), (self.norm[0], self.mlp_norm[0]), strict=True))
        for name, parts in _linears(index).items():
            weight: Weight = getattr(self, name)
            split = torch.split(weight.values, [shapes[part][0] for part in parts])
            found |= zip(parts, split, strict=True)
        if self.bias is not None:
            biases = _biases(index)
            found |= zip(biases, torch.split(self.bias, [shapes[name][0] for name in biases]), strict=True)
        if self.head_norms is not None:
            found |= zip(_head_norms(index), self.head_norms[0], strict=True)
        return found

    def convert(self, products: Products) -> None:
        """Convert the weights for other products, in place."""
        for name in _JOINED:
            weight: Weight = getattr(self, name)
            setattr(self, name, products.weight(name, weight.values))

    def copy(self, make: Copy) -> None:
        """Have other compressed copies of the weights."""
        for name in _JOINED:
            weight: Weight = getattr(self, name)
            setattr(self, name, weight._replace(compressed=make(weight.values, weight.compressed)))

    def move(self, place: Place) -> None:
        self.norm = place(self.norm[0]), self.norm[1]
        self.mlp_norm = place(self.mlp_norm[0]), self.mlp_norm[1]
        if self.bias is not None:
            self.bias = place(self.bias)
        if self.head_norms is not None:
            self.head_norms = place(self.head_norms[0]), self.head_norms[1]
        for name in _JOINED:
            weight: Weight = getattr(self, name)
            scales = None if weight.scales is None else place(weight.scales)
            setattr(self, name, weight._replace(values=place(weight.values), scales=scales))


Empty = Callable[..., torch.Tensor]
"""Returns a tensor of these sizes for a weight."""
Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of weights by their names in a checkpoint."""
Place = Callable[[torch.Tensor], torch.Tensor]
"""Returns a tensor of the same shape and type, elsewhere."""
Copy = Callable[[torch.Tensor, CompressedWeight | None], CompressedWeight | None]
"""Returns the compressed copy of a weight, given an earlier one; None for none."""


class LlamaDecoder:
    """All layers of a model of the Llama kind, over flat tokens. Its weights are allocated here, and filled through
    `parts`."""

    def __init__(
        self,
        config: LlamaConfig,
        dtype: torch.dtype,
        device: torch.device,
        most_shown: int = 0,
        weights_on: torch.device | None = None,
    ) -> None:
        """`most_shown`: maximum number of embeddings that can replace those of tokens at a time. They lie behind those
        of the vocabulary, as if they were of more tokens, so that a CUDA graph takes them too. `weights_on`: another
        device for the weights; `meta` for their shapes alone.
        """

        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=weights_on or device)

        self._shapes = config.shapes
        self._tied = config.tied
        self.scale = config.scale
        self.heads = config.heads, config.kv_heads, config.head_dim
        self.vocabulary = config.vocab_size
        self._embedding = empty(self.vocabulary + most_shown, config.hidden)
        self._embedding[self.vocabulary :].zero_()
        self._norm: Norm = empty(config.hidden), config.epsilon
        self._head = self._embedding[: self.vocabulary] if self._tied else empty(self.vocabulary, config.hidden)
        self._compressed_head: CompressedWeight | None = None
        self._rotations = rotations(config.rotary, config.context_length, device)
        width = config.heads * config.head_dim
        self._fetch = not width & (width - 1)
        self._products: Products = PlainProducts(self._fetch, device)
        self.taken: tuple[int, ...] = ()
        """Layers whose inputs are kept in `hidden`."""
        self.hidden: torch.Tensor | None = None
        self._layers = [
            _JoinedLayer(index, self._shapes, config.epsilon, self._products, empty) for index in range(config.layers)
        ]

    @property
    def parts(self) -> dict[str, torch.Tensor]:
        """Views of the weights by their names in a checkpoint, `LlamaConfig.shapes`; not once they are quantised."""
        found = {"model.embed_tokens.weight": self._embedding[: self.vocabulary], "model.norm.weight": self._norm[0]}
        if not self._tied:
            found["lm_head.weight"] = self._head
        for index, layer in enumerate(self._layers):
            found |= layer.parts(index, self._shapes)
        return found

    def randomise(self) -> None:
        """Fill the weights with random numbers, the same ones each time."""
        generator = torch.Generator(self._embedding.device).manual_seed(0)
        for name, tensor in self.parts.items():
            if tensor.ndim > 1 or name.endswith(".bias"):
                tensor.normal_(0, _SPREAD, generator=generator)
            else:
                tensor.fill_(1)

    def quantise(self) -> None:
        """Convert the weights to eight bits, layer by layer: no more than one layer is in memory twice."""
        self._products = Fp8Products(self._fetch, self._rotations.device)
        for layer in self._layers:
            layer.convert(self._products)

    @property
    def bytes_compressed(self) -> int:
        """The size of compressed copies of all weights that have a shape for it."""
        weights = [getattr(layer, name).values for layer in self._layers for name in _JOINED]
        return sum(bytes_compressed(weight.shape) for weight in (*weights, self._head))

    def compress(self) -> int:
        """Make compressed copies of the weights, which products of one row read from now on; return their bytes."""
        self._copy(compress)
        sizes: list[int] = []

        def note(part: torch.Tensor) -> torch.Tensor:
            sizes.append(part.nbytes)
            return part

        self.move_copies(note)
        return sum(sizes)

    def compress_again(self) -> None:
        """Make the compressed copies again, where they are, from the same weights."""
        self._copy(lambda values, copy: None if copy is None else compress(values, copy))

    def move_copies(self, place: Place) -> None:
        """Have the compressed copies elsewhere, like `move`."""
        self._copy(lambda _, copy: None if copy is None else CompressedWeight(*map(place, copy)))

    def _copy(self, make: Copy) -> None:
        for layer in self._layers:
            layer.copy(make)
        self._compressed_head = make(self._head, self._compressed_head)

    def move(self, place: Place) -> None:
        """Have the weights elsewhere: `place` is called with each tensor, always in the same order. Compressed copies
        stay where they are."""
        self._embedding = place(self._embedding)
        self._head = self._embedding[: self.vocabulary] if self._tied else place(self._head)
        self._norm = place(self._norm[0]), self._norm[1]
        for layer in self._layers:
            layer.move(place)

    def load_products(self, max_rows: int, max_sampled: int) -> None:
        """Have cuBLAS load its kernels for as many rows as steps of prompts have, and as are sampled from after these,
        which costs tens of milliseconds each."""
        layer = self._layers[0]
        for rows in range(256, max_rows + 1, 256):
            for weight in (layer.qkv, layer.out, layer.gate_up, layer.down):
                self._products.load(weight, rows)
        for rows in (*range(2, 32, 2), *range(32, max_sampled + 1, 8)):
            for weight in (layer.out, layer.gate_up, layer.down):
                self._products.load(weight, rows)
            functional.linear(self._head.new_zeros((rows, self._head.shape[1])), self._head)

    def show(self, embeddings: torch.Tensor) -> None:
        """Set the embeddings, [rows, hidden size], that token ids from `vocabulary` on stand for."""
        self._embedding[self.vocabulary : self.vocabulary + len(embeddings)] = embeddings

    @property
    def output(self) -> torch.Tensor:
        """The output rows, [vocabulary, hidden size]."""
        return self._head

    @property
    def embeddings(self) -> torch.Tensor:
        """The embeddings of token ids, [vocabulary or more, hidden size]."""
        return self._embedding

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the embeddings, [tokens, hidden size], of token ids, int [tokens]."""
        return self._embedding[tokens]  # for few tokens three times as fast as `functional.embedding`

    def __call__(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        attention: CudaAttention | _Stub,
        step: AttentionStep,
        rows: torch.Tensor | None,
        room: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the logits [rows, vocab] of these flat rows, of all rows if None. `x`: the tokens' embeddings,
        [tokens, hidden size], which are changed in place; `positions`: int [tokens]. `room`: where the logits of more
        than one row are written, from its first row on; None for new memory."""
        products, norms = self._products, [layer.norm for layer in self._layers]
        normed = products.norm(x, norms[0])
        entered = x.new_empty((len(x), len(self.taken), x.shape[1]))
        self.hidden = entered.flatten(1) if self.taken else None
        copies = {layer: Copied(x, entered[:, self.taken.index(layer)]) for layer in self.taken}
        for index, (layer, following) in enumerate(zip(self._layers, [*norms[1:], None], strict=True)):
            qkv = products.product(normed, layer.qkv, copies.get(index))
            for place, taken in enumerate(self.taken):
                if taken == index and self.taken.index(taken) < place:  # it is taken more than once
                    entered[:, place] = x
            attended = self._attend(qkv, index, positions, attention, step)
            if rows is not None and following is None:  # nothing else of the last layer is looked at
                if not len(rows):
                    return x.new_empty((0, len(self._head)))
                x, attended = x[rows], attended[rows]
            normed = products.add(x, attended, layer.out, layer.mlp_norm)
            normed = products.add_gated(x, normed, layer.gate_up, layer.down, following)
        return logits_of(x, self._norm, self._head, room, self._compressed_head)

    def _attend(
        self,
        qkv: torch.Tensor,
        index: int,
        positions: torch.Tensor,
        attention: CudaAttention | _Stub,
        step: AttentionStep,
    ) -> torch.Tensor:
        heads, kv_heads, dim = self.heads
        layer, (keys, values) = self._layers[index], attention.layer(index)
        query = kernels.rotate_and_store(
            qkv, self.heads, self._rotations, positions, step.rows, keys, values, layer.bias, layer.head_norms
        )
        key, value = qkv.view(len(qkv), -1, dim)[:, heads:].split(kv_heads, 1)  # type: ignore[no-untyped-call]
        return attention(step, index, query, key, value).flatten(1)


def logits_of(
    x: torch.Tensor,
    norm: Norm,
    output: torch.Tensor,
    room: torch.Tensor | None = None,
    compact: CompressedWeight | None = None,
) -> torch.Tensor:
    """Normalise x, [rows, size], and return its logits, [rows, vocabulary]; `output`: [vocabulary, size], and `compact`
    a compressed copy of it, which one row reads. `room`: where the logits of more than one row are written, from its
    first row on; None for new memory."""
    if len(x) == 1 and compact is not None:
        return compressed.product(x, compact, norm=norm, tile=_COMPRESSED_OUTPUT_TILE)
    if len(x) == 1:
        return kernels.gemv(x, output, norm=norm, tile=_OUTPUT_TILE)
    return torch.mm(kernels.rms_norm(x, *norm), output.t(), out=None if room is None else room[: len(x)])


def check_kind(config: LlamaConfig) -> None:
    """Raise UnsupportedModelError for a model that `LlamaDecoder` does not compute."""
    if config.gemma:
        raise UnsupportedModelError("the kernels do not know the norms and gates of Gemma")
    if window := next(filter(None, config.windows), None):
        raise UnsupportedModelError(f"the kernels do not know sliding windows, here of {window} tokens")
    if config.head_dim & (config.head_dim - 1):
        raise UnsupportedModelError(f"the kernels are for heads of a power of two, not of {config.head_dim}")
    shapes = config.shapes
    for name in (name for names in _linears(0).values() for name in names):
        if not kernels.fits_gemv(shapes[name]):
            raise UnsupportedModelError(
                f"the kernels are for weights of multiples of 16 rows and 64 columns: {name} has {shapes[name]}"
            )


class _Stub:
    """A stand-in for attention whose result depends on all of its arguments."""

    def __init__(self, decoder: LlamaDecoder, dtype: torch.dtype, device: torch.device) -> None:
        _, kv_heads, dim = decoder.heads
        self._cache = KvCache(torch.zeros((1, 1, 2, sum(_TRIAL), kv_heads, dim), dtype=dtype, device=device))
        self._scale = decoder.scale

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._cache.data[:, 0, 0], self._cache.data[:, 0, 1]

    def __call__(
        self, step: AttentionStep, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        mixed: torch.Tensor = query * self._scale + key[:, :1] + value[:, :1]
        return mixed


def trial(decoder: LlamaDecoder, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the logits of some tokens, float32 [tokens, vocab], with a stub in place of attention and a KV cache of
    this type: the first token alone, as in a decode step, then several, then the first of many."""
    stub = _Stub(decoder, dtype, device)
    most = min(decoder.vocabulary, len(decoder._rotations))  # tokens are their own positions
    tokens = torch.arange(1, 1 + sum(_TRIAL), device=device, dtype=torch.int32) % most
    parts = []
    for part in torch.split(tokens, _TRIAL):
        rows = torch.arange(len(part), device=device)
        step = AttentionStep(rows, len(part), part, part, None)
        parts.append(decoder(decoder.embed(part.long()), part, stub, step, rows[:_TRIED]).float())
    return torch.cat(parts)


def _norms(index: int) -> tuple[str, str]:
    """Return the names of a layer's norms in a checkpoint."""
    return f"model.layers.{index}.input_layernorm.weight", f"model.layers.{index}.post_attention_layernorm.weight"


def _biases(index: int) -> list[str]:
    """Return the names of a layer's biases in a checkpoint."""
    return [f"model.layers.{index}.self_attn.{name}_proj.bias" for name in "qkv"]


def _head_norms(index: int) -> list[str]:
    """Return the names of the norms of a layer's heads in a checkpoint."""
    return [f"model.layers.{index}.self_attn.{name}_norm.weight" for name in "qk"]


def _linears(index: int) -> dict[str, list[str]]:
    """Return the names of a layer's linears in a checkpoint, by those of their products."""
    return {name: [f"model.layers.{index}.{part}.weight" for part in parts] for name, parts in _JOINED.items()}


def rotations(rotary: Rotary, positions: int, device: torch.device) -> torch.Tensor:
    """Return the cosines of half a head, then the sines, for so many positions: float32 [positions, head_dim]."""
    angles = torch.arange(positions, device=device, dtype=torch.float32)[:, None] * rotary.frequencies.to(device)
    return torch.cat((angles.cos(), angles.sin()), -1) * rotary.attention_factor
