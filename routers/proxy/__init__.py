"""The role router: requests and WebSockets, forwarded to replicas."""
