"""Runs the program where torch and its like are not installed; a process of its own.

Called with a policy's directory, of which only the tokenizer is there: prints one line of JSON for
each command, with its exit code and what it said. The packages are hidden from the import system,
which then finds them as little as on a machine that never had them.
"""

import asyncio
import contextlib
import io
import json
import sys
import threading
from importlib.machinery import PathFinder
from pathlib import Path

HIDDEN = {"torch", "transformers", "safetensors", "matplotlib", "accelerate", "peft", "datasets"}


class WithoutHidden(PathFinder):
    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        if fullname.partition(".")[0] in HIDDEN:
            return None
        return super().find_spec(fullname, path, target)


sys.meta_path[:] = [WithoutHidden if finder is PathFinder else finder for finder in sys.meta_path]

from aiohttp import web  # noqa: E402

from areal_gym.chat import Renderer  # noqa: E402
from areal_gym.cli.app import run  # noqa: E402
from areal_gym.engines.scripted import ScriptedEngine  # noqa: E402
from areal_gym.engines.sglang.fake import FakeSGLangServer  # noqa: E402


async def complete(request):
    """OpenAI's chat completions, by somebody who knows nothing but its own name."""
    body = await request.json()
    message = {"role": "assistant", "content": f"{body['model']} has no idea"}
    return web.json_response({"choices": [{"message": message}]})


@contextlib.contextmanager
def served(policy):
    """URLs of a stand-in for SGLang, and of an OpenAI-compatible server: both know no answer."""
    tokenizer = Renderer.from_checkpoint(policy).tokenizer
    engine = ScriptedEngine(
        lambda question: "no idea",
        tokenizer=tokenizer,
        end_of_turn_id=json.loads((policy / "config.json").read_text())["eos_token_id"],
        max_context=256,
    )
    found, ready = {}, threading.Event()

    async def serve():
        app = web.Application()
        app.router.add_post("/v1/chat/completions", complete)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with FakeSGLangServer(engine, model_path=str(policy), chunk_tokens=256) as server:
            found["urls"] = server.url, f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
            found.update(loop=asyncio.get_running_loop(), over=asyncio.Event())
            ready.set()
            await found["over"].wait()
        await runner.cleanup()

    thread = threading.Thread(target=asyncio.run, args=[serve()])
    thread.start()
    assert ready.wait(30)
    try:
        yield found["urls"]
    finally:
        found["loop"].call_soon_threadsafe(found["over"].set)
        thread.join()


def call(*argv, typed=""):
    out, err = io.StringIO(), io.StringIO()
    sys.stdin = io.StringIO(typed)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(argv)
    line = {"argv": argv, "code": code, "out": out.getvalue(), "err": err.getvalue()}
    print(json.dumps(line), flush=True)


def main():
    policy = Path(sys.argv[1])
    call("list")
    call("show", "tir")
    call("show", "ppo_clip")
    call("play", "math", typed="7\n")
    call("check", "math", "--tasks", "1")
    call("data", "show", "math", "-n", "2")
    call("doctor")
    call("train", "--env", "math", "--dry-run")
    with served(policy) as (url, openai_url):
        call(
            *("eval", "--env", "math", "-n", "2", "--engine", "sglang", "--engine.url", url),
            *(f"engine.model={policy}", "engine.max_context=256", "rollout.max_new_tokens=32"),
            *("--out", "measured"),
        )
        asked = ("eval", "--env", "math", "-n", "3", "--model", openai_url)
        call(*asked, "engine.kwargs.model=Ada", "--out", "asked")
        call(*asked, "--agent", "program", "agent.kwargs.command=cat")
    call("train", "--env", "math")
    call("train", "--env", "math", "--objective", "sft")
    call("eval", "--env", "math")
    call("eval", "--env", "math", "--model", str(policy))
    assert not HIDDEN & {name.partition(".")[0] for name in sys.modules}


if __name__ == "__main__":
    main()
