"""`KvCacheRetentionConfig`, a binding class in the real package."""

from types import SimpleNamespace

from tensorrt_llm._contract import contract

_NAME = "tensorrt_llm.llmapi.KvCacheRetentionConfig"


class KvCacheRetentionConfig:
    """Which parts of a prompt's KV cache are kept longer than others."""

    class TokenRangeRetentionConfig:
        @contract(f"{_NAME}.TokenRangeRetentionConfig.__init__")
        def __init__(self, values: SimpleNamespace) -> None:
            vars(self).update(vars(values))

    @contract(f"{_NAME}.__init__")
    def __init__(self, values: SimpleNamespace) -> None:
        vars(self).update(vars(values))
