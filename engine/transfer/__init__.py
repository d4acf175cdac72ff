"""Moving KV blocks and embeddings between processes: shared memory, CUDA IPC, NIXL and TCP."""
