"""The vision part of a model: media in, deterministic embeddings out.

Embeddings are handles or part of a prompt. Equal media give equal embeddings.
"""

import hashlib
import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from engine.media import MediaSpan
from tensorrt_llm._contract import NEWEST
from tensorrt_llm._engines import read_json
from tensorrt_llm._results import RequestOutput, Response
from tensorrt_llm.disaggregated_params import DisaggregatedParams

TOKENS, WIDTH = 16, 64
"""Shape of an item's embedding."""


def encode(executor: Any, inputs: Any, params: Any, disaggregated: Any, mrope: bool) -> RequestOutput:
    """Return the finished result.

    Its own parameters have the handles, with `mrope` also those of positions; the parameters of its output were made
    before there were any.
    """
    if not isinstance(inputs, dict) or not inputs.get("multi_modal_data"):
        raise ValueError("the encoder takes dicts with multi_modal_data")
    result = RequestOutput(
        executor, executor.new_id(), inputs.get("prompt"), list(inputs.get("prompt_token_ids", ())), params
    )
    digests = [_digest(item) for item in _items(inputs["multi_modal_data"])]
    embeddings = [_embedding(digest) for digest in digests]
    handles: Any = [_shared(item) for item in embeddings if NEWEST] or [_shared(_joined(embeddings))]
    hashes = [[int.from_bytes(digest[at : at + 4]) for at in range(0, 32, 4)] for digest in digests]
    encoded = DisaggregatedParams(multimodal_embedding_handles=handles)
    encoded.multimodal_hashes = hashes
    if mrope:
        position(encoded)
    if disaggregated is not None:
        encoded.request_type = disaggregated.request_type
        encoded.multimodal_embedding_handles = (handles,)  # a comma too many, in 1.2.1
    executor.answer(result, Response(0, finish_reason="stop", encoded=encoded, mm_embedding_handle=handles[0]))
    return result


def take(handles: Any, token_ids: list[int], model: Any) -> list[Any]:
    """The embeddings, rebuilt, so that their producer's memory is free again.

    1.2.1's `get_prompt_token_ids` takes one handle for one image; its encoder has one for all images of a request.
    """
    if not NEWEST and len(handles) > 1:
        raise NotImplementedError("Only one mm_handle is supported for now")
    images = token_ids.count(image_token_of(model) or -1)
    assert images == len(handles), f"Number of images ({images}) must match number of mm_handles ({len(handles)})"
    from tensorrt_llm._torch.shared_tensor import SharedTensorContainer  # noqa: PLC0415 - needs torch

    return [SharedTensorContainer.from_dict(handle).get_local_view() for handle in handles]


def embed(media: dict[str, Any]) -> list[Any]:
    """Embeddings of raw media, made here."""
    return [_embedding(_digest(item)) for item in _items(media)]


def position(params: Any) -> None:
    """Write what a model with mRoPE has on DisaggregatedParams.

    These are handles of positions and of what is added to later ones.
    """
    import torch  # noqa: PLC0415 - slow, and needed for such models only

    params.mrope_position_ids_handle = _shared(torch.zeros(3, 1, TOKENS))
    params.mrope_position_deltas_handle = _shared(torch.zeros(1))


def load(model: Any) -> None:
    """Have at hand, before the first request, what a model with images needs."""
    if image_token_of(model) is not None:
        importlib.import_module("tensorrt_llm._torch.shared_tensor")


def image_token_of(model: Any) -> int | None:
    config = read_json(Path(model) / "config.json")
    token: int | None = config.get("image_token_id", config.get("image_token_index"))
    return token


def has_mrope(model: Any) -> bool:
    return "mrope_section" in (read_json(Path(model) / "config.json").get("rope_scaling") or {})


def expand(token_ids: list[int], model: Any, embeddings: Sequence[Any]) -> tuple[list[int], tuple[MediaSpan, ...]]:
    """The prompt with each image's placeholder repeated for every token of its embedding, and where the images are."""
    image_token = image_token_of(model)
    if image_token is None or token_ids.count(image_token) != len(embeddings):
        raise ValueError(
            f"the prompt has {token_ids.count(image_token or -1)} placeholders for {len(embeddings)} embeddings"
        )
    left = iter(embeddings)
    expanded: list[int] = []
    images = []
    for token in token_ids:
        if token == image_token:
            data = next(left).contiguous().numpy().tobytes()
            key = hashlib.blake2b(data, digest_size=32).hexdigest()
            images.append(
                MediaSpan(key=key, start=len(expanded), length=TOKENS, rows=TOKENS, dtype="float32", data=data)
            )
        expanded += [token] * (TOKENS if token == image_token else 1)
    return expanded, tuple(images)


def _items(media: dict[str, Any]) -> Iterator[Any]:
    for items in media.values():
        yield from items if isinstance(items, list) else [items]


def _digest(item: Any) -> bytes:
    """Of the pixels or samples of an image or a tensor, of the text or bytes of anything else."""
    if isinstance(item, tuple):  # samples and their rate
        item = item[0]
    if isinstance(item, str):
        item = item.encode()
    elif hasattr(item, "tobytes"):
        item = item.tobytes()
    elif not isinstance(item, bytes):
        item = item.detach().cpu().contiguous().numpy().tobytes()
    return hashlib.blake2b(item, digest_size=32).digest()


def _embedding(digest: bytes) -> Any:
    import torch  # noqa: PLC0415 - slow, and needed for images only

    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7]))
    return torch.randn(TOKENS, WIDTH, generator=generator)


def _joined(embeddings: list[Any]) -> Any:
    import torch  # noqa: PLC0415 - slow, and needed for images only

    return torch.cat(embeddings)


def _shared(tensor: Any) -> dict[str, Any]:
    from tensorrt_llm._torch.shared_tensor import SharedTensorContainer  # noqa: PLC0415 - needs torch

    return SharedTensorContainer.from_tensor(tensor).dump_to_dict()
