"""Stand-ins for servers in a thread, for runs, which have an event loop of their own."""

import asyncio
import contextlib
import threading

from areal_gym.engines.embedded import EmbeddedEngine


@contextlib.contextmanager
def served_in_thread(make_server, policy, *, max_context=256, **options):
    """Serve a checkpoint with the embedded engine behind a stand-in; yield the server."""
    started, serving = threading.Event(), {}

    async def serve():
        engine = EmbeddedEngine.from_checkpoint(policy, max_context=max_context, num_slots=8)
        async with make_server(engine, model_path=str(policy), **options) as server:
            serving.update(server=server, loop=asyncio.get_running_loop(), over=asyncio.Event())
            started.set()
            await serving["over"].wait()

    thread = threading.Thread(target=asyncio.run, args=[serve()])
    thread.start()
    try:
        assert started.wait(30)
        yield serving["server"]
    finally:
        serving["loop"].call_soon_threadsafe(serving["over"].set)
        thread.join()
