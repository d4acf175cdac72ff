"""From settings to the parts of a replica."""
