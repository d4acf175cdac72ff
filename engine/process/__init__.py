"""An engine in a process of its own: the host that runs it, the client that speaks to it, and the wire between them."""
