"""An MCP server of the standard library, which starts in no time and can misbehave.

python small_mcp_server.py [changing]    with a tool whose name is another one each time
python small_mcp_server.py [calm]        with the tools `add` and `count`
python small_mcp_server.py [few]         with the tool `stop` alone
"""

import json
import os
import socket
import sys
import time
from pathlib import Path

TEXT = {"type": "string"}
TOOLS = {
    "add": ("Add two whole numbers.", {"a": {"type": "integer"}, "b": {"type": "integer"}}),
    "count": ("Return how often this process was asked.", {}),
    "wait": ("Answer after ten seconds.", {}),
    "stop": ("End this server.", {}),
    "learn": ("Tell the client that there are other tools.", {}),
    "reach": ("Try to write a file and to reach a port.", {"path": TEXT, "port": TEXT}),
    "variable": ("Return a variable of the environment.", {"name": TEXT}),
}
counts = {"count": 0}


def listed():
    names = dict(TOOLS)
    if "calm" in sys.argv:
        names = {name: names[name] for name in ("add", "count")}
    if "few" in sys.argv:
        names = {"stop": names["stop"]}
    if "changing" in sys.argv:
        names[f"tool_{time.time_ns()}"] = ("Be another one each time.", {})
    for name, (description, properties) in names.items():
        schema = {"type": "object", "properties": properties, "required": list(properties)}
        yield {"name": name, "description": description, "inputSchema": schema}


def reach(path, port):
    outcomes = []
    try:
        Path(path).write_text("here")
        outcomes.append("wrote")
    except OSError as error:
        outcomes.append(type(error).__name__)
    try:
        socket.create_connection(("127.0.0.1", int(port)), timeout=1).close()
        outcomes.append("connected")
    except OSError:
        outcomes.append("not connected")
    return ", ".join(outcomes)


def call(name, arguments):
    if name == "add":
        return str(arguments["a"] + arguments["b"])
    if name == "count":
        counts["count"] += 1
        return str(counts["count"])
    if name == "wait":
        time.sleep(10)
    if name == "stop":
        os._exit(3)
    if name == "learn":
        send({"jsonrpc": "2.0", "method": "notifications/tools/list_changed"})
        return "learned"
    if name == "reach":
        return reach(**arguments)
    return os.environ.get(arguments["name"], "not set")


def send(message):
    print(json.dumps(message), flush=True)


def answer(request):
    method, params = request["method"], request.get("params", {})
    if method == "initialize":
        return {
            "protocolVersion": params["protocolVersion"],
            "capabilities": {"tools": {"listChanged": True}},
            "serverInfo": {"name": "small", "version": "1"},
        }
    if method == "tools/list":
        return {"tools": list(listed())}
    if method == "tools/call":
        return {"content": [{"type": "text", "text": call(params["name"], params["arguments"])}]}
    raise LookupError(method)


for line in sys.stdin:
    request = json.loads(line)
    if "id" not in request:
        continue
    reply = {"jsonrpc": "2.0", "id": request["id"]}
    try:
        reply["result"] = answer(request)
    except LookupError as error:
        reply["error"] = {"code": -32601, "message": f"no method {error}"}
    except Exception as error:
        reply["error"] = {"code": -32602, "message": repr(error)}
    send(reply)
