"""Pictures and videos out: requests in, files out. `base.py` has the seams, `engine.py` the queue in front of a
pipeline, `service.py` the process that it runs in.
"""
