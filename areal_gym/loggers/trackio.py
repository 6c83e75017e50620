"""Sends metrics to Trackio."""

from __future__ import annotations

import contextlib
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class TrackioLogger:
    """Records a run in Trackio's own directory; a resumed run continues the same one.

    Args:
        project: where the run appears: `trackio show --project areal-gym`.
        group: runs of one group are shown together.
        space_id: a Hugging Face Space, "user/name", that gets the metrics instead.
    """

    def __init__(
        self, project: str = "areal-gym", group: str | None = None, space_id: str | None = None
    ) -> None:
        self._project = project
        self._where = {"group": group, "space_id": space_id}

    def open(
        self, directory: Path, *, name: str, config: Mapping[str, Any], first_step: int
    ) -> str:
        """Begin or continue Trackio's run."""
        import trackio

        # Trackio continues runs by name, and another directory's run may have this one's.
        name_file = directory / "name"
        is_known = name_file.exists()
        if not is_known:
            name_file.write_text(f"{name}-{uuid.uuid4().hex[:6]}")
        name = name_file.read_text()
        with contextlib.redirect_stdout(sys.stderr):  # stdout is for data
            self._run = trackio.init(
                self._project,
                name,
                config=dict(config),
                resume="allow" if is_known else "never",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
                **self._where,
            )
        space = self._where["space_id"]
        if space is not None:
            return f"https://huggingface.co/spaces/{space}"
        return f"trackio show --project {self._project} (run {name})"

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record metrics."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Finish Trackio's run."""
        import trackio

        with contextlib.redirect_stdout(sys.stderr):
            trackio.finish()  # the run by itself would be finished again at the program's end
