"""Living with other replicas: discovery, probing, circuit breaking, remote prefill and remote encode."""
