"""HTTP in and out: each public API, shared endpoints and bodies, routes between replicas, the proxy, operations."""
