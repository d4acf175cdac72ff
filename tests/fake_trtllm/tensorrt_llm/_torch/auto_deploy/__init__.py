"""`tensorrt_llm._torch.auto_deploy`."""
