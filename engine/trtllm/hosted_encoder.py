"""The `PromptEncoder` of an encode replica's API processes: asks the process in which TensorRT-LLM's encoder runs."""

import itertools
from collections.abc import Sequence
from contextlib import aclosing

from engine.config import TrtllmEncoderConfig
from engine.encoder import ImageInput
from engine.errors import EngineFailure
from engine.handoff import decode_encoding
from engine.process.child import EngineProcess
from engine.process.client import EngineClient
from engine.types import Encoding, GenerateRequest, Media, SamplingParams


class HostedEncoder:
    """With an `address` an encoder is served there already, by a process that is somebody else's to keep; without, by one of its own."""

    def __init__(self, config: TrtllmEncoderConfig, address: str = "", log_level: str = "info") -> None:
        self._process = None if address else EngineProcess(config, log_level=log_level)
        self._client = (
            EngineClient(address)
            if self._process is None
            else EngineClient(self._process.address, self._process.wait_failed)
        )
        self._ids = itertools.count()

    @property
    def healthy(self) -> bool:
        return self._client.healthy

    async def start(self) -> None:
        """Raises EngineFailure, with nothing left running."""
        try:
            if self._process is not None:
                await self._process.start()
            await self._client.start()
        except BaseException:  # cancellation included
            await self.close()
            raise

    async def encode(self, prompt: str, images: Sequence[ImageInput]) -> Encoding:
        """As `TrtllmEncoder.encode`."""
        media = Media(
            text=prompt, images=tuple(image.data for image in images), details=tuple(image.detail for image in images)
        )
        request_id, nothing = f"encode-{next(self._ids)}", SamplingParams(max_tokens=0)
        async with aclosing(
            self._client.generate(
                GenerateRequest(request_id=request_id, prompt_token_ids=(), sampling=nothing, media=media)
            )
        ) as stream:
            delta = await anext(stream)
        if delta.held is None:
            raise EngineFailure("the encoder returned nothing")
        return decode_encoding(delta.held.state)

    async def close(self) -> None:
        await self._client.close()
        if self._process is not None:
            await self._process.close()
