"""HTTP in and out: one file per public API, the records and streams that they share, internal routes, operations."""
