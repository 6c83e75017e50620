"""Time limits, connection limits and a clean shutdown for all HTTP servers of this package."""
