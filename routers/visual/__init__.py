"""Pictures and videos: routes, what is kept of them, and what works through the jobs of videos."""
