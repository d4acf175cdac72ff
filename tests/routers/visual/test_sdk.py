"""OpenAI's own client, before a real server."""

import base64
import io
import warnings
from pathlib import Path

import pytest
from openai import BadRequestError, OpenAI
from PIL import Image

from tests.routers.visual.test_images import picture
from tests.support.servers import ServerThread


def test_pictures_and_videos_by_the_sdk(tmp_path: Path) -> None:
    pytest.importorskip("av")
    settings = {"modality": "visual", "cache_dir": tmp_path, "api_keys": ("secret",)}
    with ServerThread(**settings) as server, OpenAI(base_url=f"{server.url}/v1", api_key="secret") as client:
        made = client.images.generate(
            model="fake", prompt="a red circle", n=2, size="256x256", output_format="webp", extra_body={"seed": 7}
        )
        assert made.data is not None
        assert made.usage is not None
        assert [entry.seed for entry in made.data] == [7, 8]  # type: ignore[attr-defined]
        with Image.open(io.BytesIO(base64.b64decode(made.data[0].b64_json or ""))) as image:
            assert (image.format, image.size) == ("WEBP", (256, 256))
        changed = client.images.edit(model="fake", prompt="blue", image=("a.png", picture()), mask=("m.png", picture()))
        assert changed.data
        with pytest.raises(BadRequestError, match="VISUAL_MAX_IMAGES") as refused:
            client.images.generate(model="fake", prompt="a", n=11)
        assert refused.value.param == "n"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # OpenAI has given its videos up
            video = client.videos.create_and_poll(
                model="fake",
                prompt="a red circle",
                seconds="4",
                size="64x128",
                input_reference=("a.png", picture()),
                poll_interval_ms=20,  # type: ignore[arg-type]
            )
            assert (video.status, video.progress, video.seconds, video.size) == ("completed", 100, "4", "64x128")
            assert client.videos.download_content(video.id).read().startswith(b"\x1aE\xdf\xa3")
            assert [one.id for one in client.videos.list(limit=1)] == [video.id]
            assert client.videos.delete(video.id).deleted
