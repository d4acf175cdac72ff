"""`tensorrt_llm._torch`."""
