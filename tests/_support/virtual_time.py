"""An event loop whose clock moves only when nothing else can happen, and then at once."""

import asyncio
import math
import selectors


class _Jump(selectors.SelectSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout=None):
        events = super().select(0)
        if not events:
            assert timeout is not None, "deadlock: nothing can happen any more"
            self.now = math.nextafter(self.now + timeout, math.inf)  # a loop runs what is past
        return events


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop where hours pass in milliseconds, and a deadlock is an error."""

    def __init__(self) -> None:
        self._clock = _Jump()
        super().__init__(self._clock)
        # Otherwise a timer a billionth of a second ahead runs now, and the clock stays: one that
        # asks for the time that is left would run for ever.
        self._clock_resolution = 0.0

    def time(self):
        return self._clock.now

    def settle(self, seconds=0.0):
        """Let everything happen that can, in that much time."""

        async def wait():
            await asyncio.sleep(seconds)
            while True:
                await asyncio.sleep(0)
                if not self._ready:
                    return

        self.run_until_complete(wait())

    def end(self):
        """Check that no task is left, and close the loop."""
        assert not asyncio.all_tasks(self)
        self.close()
