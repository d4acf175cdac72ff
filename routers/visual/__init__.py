"""Pictures and videos: routes, store of files, and the worker for jobs of videos."""
