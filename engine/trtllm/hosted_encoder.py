"""TensorRT-LLM's encoder in a process of its own: loading it takes minutes, and its processor runs on the loop of its
caller.
"""

from collections.abc import Sequence

from engine.config import TrtllmEncoderConfig
from engine.encoder import EncoderInfo
from engine.media import Encoding, MediaFiles, MediaInput, RemoteRows, attach_media, detach_media
from engine.process.child import ServiceProcess
from engine.process.client import ServiceClient
from engine.process.service import Interface, Method
from engine.transfer.shared_bytes import Data
from engine.trtllm.encoder import TrtllmEncoder


def _detach(prompt: MediaFiles) -> tuple[MediaFiles, list[Data]]:
    bare, parts = detach_media(prompt.files)
    return MediaFiles(prompt.text, tuple(bare)), [*parts]


def _attach(prompt: MediaFiles, parts: Sequence[Data]) -> MediaFiles:
    return MediaFiles(prompt.text, tuple(attach_media(prompt.files, parts)))


ENCODER: Interface[TrtllmEncoderConfig, TrtllmEncoder] = Interface(
    name="engine.trtllm.hosted_encoder:ENCODER",
    noun="encoder",
    config=TrtllmEncoderConfig,
    create=TrtllmEncoder,
    info=EncoderInfo,
    methods={
        "encode": Method(
            MediaFiles,
            Encoding,
            lambda service, prompt: service.encode(prompt.files, prompt.text),
            _detach,
            _attach,
            too_large="the prompt, images included, is too large",
            parameter="prompt",
        )
    },
    topics={},
    more_stop_seconds=lambda config: config.extra_stop_seconds,
    hang_seconds=lambda config: config.hang_seconds,
)


class HostedEncoder(ServiceClient[EncoderInfo]):
    """The `Encoder` of an encode replica's API processes.

    With an `address`, another process keeps the host that serves the encoder there; without, this one starts a host of
    its own.
    """

    def __init__(self, config: TrtllmEncoderConfig, address: str = "") -> None:
        self.process = None if address else ServiceProcess(ENCODER, config)
        if self.process is None:
            super().__init__(ENCODER, address)
        else:
            super().__init__(ENCODER, self.process.address, self.process.wait_failed)

    async def start(self) -> None:
        try:
            if self.process is not None:
                await self.process.start()
            await super().start()
        except BaseException:  # cancellation included
            await self.close()
            raise

    async def encode(self, media: Sequence[MediaInput], prompt: str = "") -> Encoding:
        encoding: Encoding = await self.call("encode", MediaFiles(prompt, tuple(media)))
        return encoding

    def release(self, rows: RemoteRows, *, lost: bool = False) -> None:
        """Do nothing: no embeddings stay here."""

    async def close(self) -> None:
        await super().close()
        if self.process is not None:
            await self.process.close()
