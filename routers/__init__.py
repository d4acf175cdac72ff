"""HTTP in and out: one file per public API, internal routes, operations and SSE."""
