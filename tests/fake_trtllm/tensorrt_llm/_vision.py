"""The vision part of a model alone: media in, handles of deterministic embeddings out. Equal media give equal embeddings."""

import hashlib
from collections.abc import Iterator
from typing import Any

from tensorrt_llm._results import RequestOutput, Response
from tensorrt_llm.disaggregated_params import DisaggregatedParams

TOKENS, WIDTH = 16, 64
"""Shape of an item's embedding."""


def encode(executor: Any, inputs: Any, params: Any, disaggregated: Any) -> RequestOutput:
    """The result, finished. Its own parameters have the handles; those of its output were made before there were any."""
    if not isinstance(inputs, dict) or not inputs.get("multi_modal_data"):
        raise ValueError("the encoder takes dicts with multi_modal_data")
    result = RequestOutput(executor, executor.new_id(), inputs.get("prompt"), list(inputs.get("prompt_token_ids", ())), params)
    digests = [_digest(item) for item in _items(inputs["multi_modal_data"])]
    handles: Any = [_embedding(digest) for digest in digests]
    hashes = [[int.from_bytes(digest[at : at + 4]) for at in range(0, 32, 4)] for digest in digests]
    encoded = DisaggregatedParams(multimodal_embedding_handles=handles, multimodal_hashes=hashes)
    if disaggregated is not None:
        encoded.request_type = disaggregated.request_type
        encoded.multimodal_embedding_handles = (handles,)  # a comma too many, in 1.2.1
    result._push(Response(0, finish_reason="stop", encoded=encoded, mm_embedding_handle=handles[0]))
    return result


def take(handles: Any) -> list[int]:
    """Rebuild the embeddings, so that their producer's memory is free again: how many tokens each has."""
    from tensorrt_llm._torch.shared_tensor import SharedTensorContainer  # noqa: PLC0415 - needs torch

    return [SharedTensorContainer.from_dict(handle).get_local_view().shape[0] for handle in handles]


def expand(token_ids: list[int], image_token: int | None, lengths: list[int]) -> list[int]:
    """The prompt with each image's placeholder repeated for every token of its embedding."""
    if image_token is None or token_ids.count(image_token) != len(lengths):
        raise ValueError(f"the prompt has {token_ids.count(image_token or -1)} placeholders for {len(lengths)} embeddings")
    left = iter(lengths)
    return [token for token in token_ids for _ in range(next(left) if token == image_token else 1)]


def _items(media: dict[str, Any]) -> Iterator[Any]:
    for items in media.values():
        yield from items if isinstance(items, list) else [items]


def _digest(item: Any) -> bytes:
    """Of the pixels or samples of an image or a tensor, of the text or bytes of anything else."""
    if isinstance(item, str):
        item = item.encode()
    elif hasattr(item, "tobytes"):
        item = item.tobytes()
    elif not isinstance(item, bytes):
        item = item.detach().cpu().contiguous().numpy().tobytes()
    return hashlib.blake2b(item, digest_size=32).digest()


def _embedding(digest: bytes) -> dict[str, Any]:
    import torch  # noqa: PLC0415 - slow, and needed for encoders only

    from tensorrt_llm._torch.shared_tensor import SharedTensorContainer  # noqa: PLC0415 - needs torch

    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7]))
    return SharedTensorContainer.from_tensor(torch.randn(TOKENS, WIDTH, generator=generator)).dump_to_dict()
