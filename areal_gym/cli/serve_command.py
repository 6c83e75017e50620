"""`areal-gym serve`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from areal_gym.cli import complete
from areal_gym.cli.output import Options, common_options, print_data, talk
from areal_gym.errors import UsageError


@click.command("serve")
@click.argument("overrides", nargs=-1, metavar="[key=value]...", shell_complete=complete.settings)
@click.option(
    "--run",
    type=click.Path(path_type=Path),
    shell_complete=complete.runs,
    help="A run: its newest checkpoint.",
)
@click.option("--checkpoint", type=click.Path(path_type=Path), help="A checkpoint's directory.")
@click.option("--model", help="A model's directory.")
@click.option(
    "--env",
    shell_complete=complete.ids("envs"),
    help="Whose small policy to serve, without any of the above.",
)
@click.option(
    "--engine",
    shell_complete=complete.ids("engines"),
    help="The engine's id (areal-gym list engines).",
)
@click.option(
    "--engine.url", "engine_url", multiple=True, help="A server of the engine; several: again."
)
@click.option(
    "--trust", is_flag=True, help="Follow all settings of the run: its author may start programs."
)
@click.option("--gateway", metavar="HOST:PORT", help="Where to listen [127.0.0.1, any port].")
@common_options
@click.pass_obj
def serve_command(
    options: Options,
    overrides: tuple[str, ...],
    run: Path | None,
    checkpoint: Path | None,
    model: str | None,
    env: str | None,
    engine: str | None,
    engine_url: tuple[str, ...],
    trust: bool,
    gateway: str | None,
) -> None:
    """Put a policy behind the APIs of OpenAI and Anthropic, until interrupted.

    Prints one line of JSON: `base_url` and `api_key`. The key is made up, or AREAL_GYM_API_KEY.
    """
    from areal_gym.cli.setting_flags import existing, newest_checkpoint, resolve

    if sum(given is not None for given in (run, checkpoint, model, env)) != 1:
        raise UsageError(
            "which policy?", hints=["one of: --run RUN, --checkpoint DIR, --model DIR, --env ENV"]
        )
    recipe = None
    if run is not None:
        recipe = existing(run / "config.yaml", f"{run} holds no run")
        checkpoint = newest_checkpoint(run)
    elif checkpoint is not None:
        existing(checkpoint / "config.json", f"{checkpoint} holds no checkpoint")
    config = resolve(
        file=recipe,
        overrides=overrides,
        is_chosen=trust,
        env__id=env,
        engine__id=engine,
        engine__url=engine_url or None,
        engine__model=model,
        gateway=gateway,
    )

    from areal_gym.runs.live_display import make_display
    from areal_gym.runs.serve_policy import serve

    display = make_display(is_plain=options.is_plain)

    is_ready = False

    def tell(base_url: str, api_key: str) -> None:
        nonlocal is_ready
        is_ready = True
        display.close()
        print_data(json.dumps({"base_url": base_url, "api_key": api_key}))
        talk("Ctrl-C ends the server")

    try:
        serve(config, checkpoint=checkpoint, display=display, on_ready=tell)
    except KeyboardInterrupt:
        if not is_ready:  # of a server that serves, it is the proper end
            raise
    finally:
        display.close()
