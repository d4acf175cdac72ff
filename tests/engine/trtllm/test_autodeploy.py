"""A17: `BACKEND=_autodeploy` uses the class with which upstream serves it, and takes no images."""

from pathlib import Path

import pytest

from engine.config import TrtllmConfig
from engine.errors import InvalidRequest
from engine.media import MediaFiles
from engine.trtllm.engine import TrtllmEngine
from tests.support import trtllm_gotchas as trtllm_gotchas_support
from tests.support.trtllm import BOTH_VERSIONS, found, picture
from tests.support.trtllm_gotchas import request, tokens

trt, folder = trtllm_gotchas_support.trt, trtllm_gotchas_support.folder  # fixtures


@BOTH_VERSIONS
async def test_autodeploy_has_a_class_of_its_own(folder: Path) -> None:
    arguments = {"enable_iter_perf_stats": True}
    async with TrtllmEngine(TrtllmConfig(model=str(folder), backend="_autodeploy", arguments=arguments)) as engine:
        assert type(engine.llm) is found("tensorrt_llm._torch.auto_deploy.LLM")
        assert len(await tokens(engine, request())) == 6
        with pytest.raises(InvalidRequest, match="images are not supported with BACKEND=_autodeploy"):
            await tokens(engine, request(media=MediaFiles("<image> w5", (picture(),))))
    async with TrtllmEngine(TrtllmConfig(model=str(folder), arguments=arguments)) as engine:
        assert type(engine.llm) is found("tensorrt_llm.LLM")


def test_its_processor_cannot_take_pixels(folder: Path) -> None:
    """The stand-in fails as main of early 2026 does: a variable is set for tensors only."""
    with found("tensorrt_llm._torch.auto_deploy.LLM")(model=str(folder)) as llm, pytest.raises(UnboundLocalError):
        llm.generate_async({"prompt": "<image> w5", "multi_modal_data": {"image": [object()]}})
