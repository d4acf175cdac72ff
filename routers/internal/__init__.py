"""Routes between replicas, which the internal secret opens: prefill, encode, and answers that are leases."""
