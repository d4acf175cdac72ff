"""Parts that any engine is built from: work off the event loop, the KV-event log, the codec of handoffs, checks."""
