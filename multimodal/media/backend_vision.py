"""Images of chats for backends that expand prompts and encode by themselves (TensorRT-LLM): passed on as files, or encoded elsewhere."""

from collections.abc import Sequence

from engine import trace
from engine.encoder import ImageInput, PromptEncoder
from engine.errors import InvalidRequest
from engine.kit.tasks import all_of
from engine.types import Media
from multimodal.errors import RequestError
from multimodal.media.loader import MediaLoader
from multimodal.text.messages import Attachment, check_count
from multimodal.text.prompt import Prompt, Tokenise


class BackendVision:
    """Loads images for the backend, or for `encoder`, where encode replicas have that part. How long the prompt gets the backend says."""

    marks: frozenset[str] = frozenset()

    def __init__(self, loader: MediaLoader, max_images: int, encoder: PromptEncoder | None) -> None:
        self._loader = loader
        self._max_images = max_images
        self._encoder = encoder

    async def prompt(self, text: str, attachments: Sequence[Attachment], tokenise: Tokenise, choices: int) -> Prompt:
        ids = await self.tokens(text, attachments, tokenise)
        images = await all_of(self._load(attachment) for attachment in attachments)
        if self._encoder is None or choices > 1:  # what was encoded elsewhere can be read once
            return Prompt(
                ids,
                media=Media(
                    text=text,
                    images=tuple(image.data for image in images),
                    details=tuple(image.detail for image in images),
                ),
            )
        try:
            with trace.span("encode"):
                return Prompt(ids, encoding=await self._encoder.encode(text, images))
        except InvalidRequest as error:
            raise RequestError(str(error), "messages", "invalid_image") from error

    async def tokens(self, text: str, attachments: Sequence[Attachment], tokenise: Tokenise) -> list[int]:
        check_count(attachments, self._max_images)
        return await tokenise(text)

    async def aclose(self) -> None:
        await self._loader.aclose()

    async def _load(self, attachment: Attachment) -> ImageInput:
        with trace.span("fetch"):
            loaded = await self._loader.load(attachment.url, attachment.param)
        return ImageInput(loaded.data, attachment.detail)
