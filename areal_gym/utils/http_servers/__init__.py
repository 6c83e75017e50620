"""Time limits, connection limits and a clean end, for every HTTP server of this package."""
