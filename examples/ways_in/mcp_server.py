"""Tools as an MCP server, for any environment: `env.kwargs.mcp_servers`."""

from mcp.server.mcpserver import MCPServer

server = MCPServer("double")


@server.tool()
def double(number: int) -> str:
    """Return twice a number."""
    return str(2 * number)


if __name__ == "__main__":
    server.run("stdio")
