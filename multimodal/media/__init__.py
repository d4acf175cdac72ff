"""Files that requests refer to: fetched within limits, checked, not decoded. `loader.py` is the way in."""
