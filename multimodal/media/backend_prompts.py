"""Prompts with media for backends that expand and encode by themselves (TensorRT-LLM): files are passed on, or encoded
elsewhere.
"""

from collections.abc import Sequence

from msgspec.structs import replace

from engine import trace
from engine.encoder import Encoder
from engine.errors import InvalidRequest
from engine.kit.tasks import all_of
from engine.media import Encoding, MediaFiles, MediaInput
from multimodal.errors import RequestError
from multimodal.media.loader import MediaLoader
from multimodal.text.messages import MediaRef, check_count
from multimodal.text.prompt import Prompt, Tokenise


class BackendPrompts:
    """Loads media for the backend or, where encode replicas encode them, for `encoder`.

    The backend reports the expanded prompt's length.
    """

    marks: frozenset[str] = frozenset()

    def __init__(self, loader: MediaLoader, max_images: int, encoder: Encoder | None) -> None:
        self._loader = loader
        self._max_images = max_images
        self._encoder = encoder

    async def prompt(self, text: str, refs: Sequence[MediaRef], tokenise: Tokenise, choices: int) -> Prompt:
        ids = await self.tokens(text, refs, tokenise)
        media = await all_of(self._load(ref) for ref in refs)
        if self._encoder is None or choices > 1:  # an encoding can be read once
            return Prompt(ids, MediaFiles(text, tuple(media)))
        try:
            with trace.span("encode"):
                encoding = await self._encoder.encode(media, text)
        except InvalidRequest as error:
            raise RequestError(str(error), "messages", "invalid_image") from error
        assert isinstance(encoding, Encoding), "the backend's own"
        return Prompt(ids, encoding)

    async def tokens(self, text: str, refs: Sequence[MediaRef], tokenise: Tokenise) -> list[int]:
        check_count(refs, self._max_images)
        return await tokenise(text)

    async def aclose(self) -> None:
        await self._loader.aclose()

    async def _load(self, ref: MediaRef) -> MediaInput:
        with trace.span("fetch"):
            loaded = await self._loader.load(ref.url, ref.param, ref.kind)
        assert isinstance(loaded, MediaInput), "a loader without a hidden size takes no embeddings"
        return replace(loaded, detail=ref.detail)
