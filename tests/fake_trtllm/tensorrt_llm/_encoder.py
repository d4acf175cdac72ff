"""`MultimodalEncoder`: an LLM that encodes media and does nothing else."""

from types import SimpleNamespace
from typing import Any

from tensorrt_llm._contract import contract
from tensorrt_llm._llm import BaseLLM
from tensorrt_llm._results import RequestOutput
from tensorrt_llm._vision import encode, has_mrope
from tensorrt_llm.sampling_params import SamplingParams

_NAME = "tensorrt_llm.llmapi.MultimodalEncoder"


class MultimodalEncoder(BaseLLM):
    """Its requests never carry parameters of their own, so that its results are clean."""

    @contract(f"{_NAME}.__init__")
    def __init__(self, call: SimpleNamespace) -> None:
        values = vars(call)
        arguments = values.pop("kwargs") | values
        if arguments["dtype"] not in {"auto", "float16", "float32", "bfloat16"}:
            raise ValueError(f"unsupported dtype {arguments['dtype']}")
        if arguments.get("max_num_tokens") is None:
            arguments["max_num_tokens"] = 16384
        self._load({**arguments, "mm_encoder_only": True})

    @contract(f"{_NAME}.generate")
    def generate(self, call: SimpleNamespace) -> Any:
        if isinstance(call.inputs, list):
            return [self.generate_async(item).result() for item in call.inputs]
        return self.generate_async(call.inputs).result()

    @contract(f"{_NAME}.generate_async")
    def generate_async(self, call: SimpleNamespace) -> RequestOutput:
        self._check_alive()
        params = SamplingParams(end_id=-1) if call.sampling_params is None else call.sampling_params
        return encode(self._executor, call.inputs, params, None, has_mrope(self.args.model))


MultimodalEncoder.__module__ = "tensorrt_llm.llmapi.mm_encoder"
