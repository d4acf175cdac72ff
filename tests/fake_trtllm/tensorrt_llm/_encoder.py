"""`MultimodalEncoder`: media in, handles of deterministic embeddings out."""

import hashlib
from collections.abc import Iterator
from typing import Any

from tensorrt_llm._executor import Executor
from tensorrt_llm._llm import BaseLLM
from tensorrt_llm._results import RequestOutput, Response
from tensorrt_llm.disaggregated_params import DisaggregatedParams
from tensorrt_llm.sampling_params import SamplingParams

TOKENS, WIDTH = 16, 64
"""Shape of an item's embedding."""


class MultimodalEncoder(BaseLLM):
    """Equal media give equal embeddings: float32 [16, 64] of the media's hash."""

    def __init__(
        self, model: Any, trust_remote_code: bool = False, tensor_parallel_size: int = 1, dtype: str = "auto", **kwargs: Any
    ) -> None:
        arguments = {"model": model, "trust_remote_code": trust_remote_code, "tensor_parallel_size": tensor_parallel_size, "dtype": dtype}
        if dtype not in {"auto", "float16", "float32", "bfloat16"}:
            raise ValueError(f"unsupported dtype {dtype}")
        if kwargs.get("max_num_tokens") is None:
            kwargs["max_num_tokens"] = 16384
        self._load({**arguments, **kwargs, "mm_encoder_only": True}, encoder=True)

    def generate(self, inputs: Any, use_tqdm: bool = True) -> Any:
        if isinstance(inputs, list):
            return [self.generate_async(item).result() for item in inputs]
        return self.generate_async(inputs).result()

    def generate_async(self, inputs: Any, sampling_params: Any = None) -> RequestOutput:
        self._check_alive()
        if not isinstance(inputs, dict) or not inputs.get("multi_modal_data"):
            raise ValueError("the encoder takes dicts with multi_modal_data")
        params = SamplingParams(end_id=-1) if sampling_params is None else sampling_params
        executor: Executor = self._executor
        result = RequestOutput(executor, executor.new_id(), inputs.get("prompt"), list(inputs.get("prompt_token_ids", ())), params)
        digests = [_digest(item) for item in _items(inputs["multi_modal_data"])]
        handles = [_embedding(digest) for digest in digests]
        hashes = [[int.from_bytes(digest[at : at + 4]) for at in range(0, 32, 4)] for digest in digests]
        disaggregated = DisaggregatedParams(multimodal_embedding_handles=handles, multimodal_hashes=hashes)
        result._push(Response(0, finish_reason="stop", disaggregated_params=disaggregated, mm_embedding_handle=handles[0]))
        return result


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


MultimodalEncoder.__module__ = "tensorrt_llm.llmapi.mm_encoder"
