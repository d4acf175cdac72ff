"""Pictures and videos: routes, the store of files, and the worker for video jobs."""
