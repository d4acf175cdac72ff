"""Vision towers, each in a process of its own."""
