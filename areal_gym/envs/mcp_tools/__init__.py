"""MCP servers whose tools the policy may call, in any environment: `env.kwargs.mcp_servers`."""
