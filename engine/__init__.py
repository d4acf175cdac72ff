"""The engine seam: token ids in, deltas out. Backends, replicas and processes are folders."""
