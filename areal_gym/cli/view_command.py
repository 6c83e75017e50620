"""`areal-gym view`."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import sys
import webbrowser
from pathlib import Path
from urllib.parse import quote

import click

from areal_gym.cli import complete
from areal_gym.cli.output import common_options, print_data, print_json, talk
from areal_gym.errors import UsageError
from areal_gym.utils.markup import counted


@click.command("view")
@click.argument(
    "runs",
    nargs=-1,
    metavar="[RUN]...",
    type=click.Path(path_type=Path),
    shell_complete=complete.runs,
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=7576,
    show_default=True,
    help="Port to listen on; 0 is any free one.",
)
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address to listen on; beyond this machine, the URL has a token.",
)
@click.option("--browser/--no-browser", default=True, help="Open a browser, if there is one.")
@click.option("--export", "file", type=click.Path(path_type=Path), help="Write one HTML file.")
@click.option("--json", "as_json", is_flag=True, help="Print the URL and the runs as JSON.")
@common_options
def view_command(
    runs: tuple[Path, ...],
    port: int,
    host: str,
    browser: bool,
    file: Path | None,
    as_json: bool,
) -> None:
    """View runs in a browser: curves, trajectories, tokens; live while a run is training.

    RUN is a run directory or a directory of runs; the default is runs/. --export writes the
    page to one file that opens anywhere, also without a network.
    """
    from areal_gym.viewer import Catalog, export

    catalog = Catalog(runs or (Path("runs"),))
    if file is not None:
        num_bytes = export(catalog, file)
        if as_json:
            names = [run.name for run in catalog.runs()]
            print_json({"file": str(file), "bytes": num_bytes, "runs": names})
        else:
            print_data(f"{file}: {num_bytes / 1e6:.1f} MB")
        return

    _require_server()
    from areal_gym.viewer.viewer_server import is_loopback, listen, make_app, serve

    token = None if is_loopback(host) else secrets.token_urlsafe(16)
    with listen(host, port) as listener:
        address = f"[{host}]" if ":" in host else host
        url = f"http://{address}:{listener.getsockname()[1]}/" + (
            f"?token={token}" if token else ""
        )
        names = [run.name for run in catalog.runs()]
        if as_json:
            print_json({"url": url, "runs": names})
        else:
            if len(names) == 1:
                url += f"#/run/{quote(names[0])}"
            print_data(url)
        sys.stdout.flush()  # the reader of a pipe needs it now
        talk(f"{counted(len(names), 'run')}; Ctrl-C stops the viewer")
        if browser and not as_json:
            webbrowser.open(url)
        with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C is how the viewer ends
            asyncio.run(serve(make_app(catalog, token=token), listener))


def _require_server() -> None:
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError:
        raise UsageError(
            "the viewer needs starlette and uvicorn", hints=["pip install 'areal-gym[viewer]'"]
        ) from None
