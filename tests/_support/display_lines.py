"""A display that keeps what a run says."""

from areal_gym.runs.run_display import Display


class Lines(Display):
    """Keeps what a run says."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)
