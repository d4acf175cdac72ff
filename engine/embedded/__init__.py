"""The embedded engine: scheduler, paged KV cache, models, sampler and guided decoding."""
