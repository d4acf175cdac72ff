"""The TensorRT-LLM backend."""
