"""The fast model runner for NVIDIA GPUs: Triton kernels, FlashInfer and CUDA graphs."""
