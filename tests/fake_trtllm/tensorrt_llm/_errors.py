"""The exceptions of the contract."""


class RequestError(RuntimeError):
    """One request failed; the executor goes on."""


RequestError.__module__ = "tensorrt_llm.executor.utils"
