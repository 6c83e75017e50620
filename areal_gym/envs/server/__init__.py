"""Serves environments to other processes and machines: over HTTP, and as MCP servers."""
