"""The paged KV cache: blocks, groups of layers, and the memory they live in."""
