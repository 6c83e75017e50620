"""An MCP server of the official SDK: `python -m tests._support.mcp_tools_server`."""

import io

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.utilities.types import Image

server = MCPServer("tools")


@server.tool()
def add(a: int, b: int) -> str:
    """Add two whole numbers."""
    return str(a + b)


@server.tool()
def fail(text: str) -> str:
    """Raise an error."""
    raise ValueError(text)


@server.tool()
def write(letter: str, count: int) -> str:
    """Write one letter many times."""
    return letter * count


@server.tool()
def draw() -> list:
    """Return an image and a text."""
    return [Image(data=b"\x89PNG", format="png"), "beside it"]


@server.tool()
def photograph(width: int, format: str = "png") -> list:
    """Return an image of a red sheet, one pixel high, and a text."""
    from PIL import Image as PillowImage  # places of tasks have no Pillow

    out = io.BytesIO()
    PillowImage.new("RGB", (width, 1), "red").save(out, "PNG")
    return [Image(data=out.getvalue(), format=format), "beside it"]


if __name__ == "__main__":
    server.run("stdio")
