"""Parts that any engine is built from: streams, the KV-event log, request checks and logits processors."""
