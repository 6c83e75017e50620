"""`areal-gym serve`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from areal_gym.cli import complete
from areal_gym.cli.output import Options, common_options, print_data, talk
from areal_gym.cli.setting_flags import policy_files, resolve, setting_flags, trust_option
from areal_gym.errors import UsageError


@click.command("serve")
@click.argument("overrides", nargs=-1, metavar="[key=value]...", shell_complete=complete.settings)
@click.option(
    "--run",
    type=click.Path(path_type=Path),
    shell_complete=complete.runs,
    help="A run: serve its newest checkpoint.",
)
@click.option("--checkpoint", type=click.Path(path_type=Path), help="A checkpoint directory.")
@setting_flags(
    {
        "--model": "engine.model",
        "--env": "env.id",
        "--engine": "engine.id",
        "--engine.url": "engine.url",
        "--gateway": "gateway",
    }
)
@trust_option
@common_options
@click.pass_obj
def serve_command(
    options: Options,
    overrides: tuple[str, ...],
    run: Path | None,
    checkpoint: Path | None,
    flags: Mapping[str, Any],
    trust: bool,
) -> None:
    """Serve a policy over the APIs of OpenAI and Anthropic, until interrupted.

    The policy is one of --run, --checkpoint, --model or --env (its small starter policy). Prints
    one line of JSON: `base_url` and `api_key`. The key is AREAL_GYM_API_KEY, or a random one.
    """
    policies = (run, checkpoint, flags.get("engine.model"), flags.get("env.id"))
    if sum(given is not None for given in policies) != 1:
        raise UsageError(
            "which policy?", hints=["one of: --run RUN, --checkpoint DIR, --model DIR, --env ENV"]
        )
    recipe, checkpoint = policy_files(run, checkpoint)
    config = resolve(file=recipe, overrides=overrides, flags=flags, is_chosen=trust)

    from areal_gym.runs.live_display import make_display
    from areal_gym.runs.serve_policy import serve

    display = make_display(is_plain=options.is_plain)
    is_ready = False

    def on_ready(base_url: str, api_key: str) -> None:
        nonlocal is_ready
        is_ready = True
        display.close()
        print_data(json.dumps({"base_url": base_url, "api_key": api_key}))
        talk("Ctrl-C stops the server")

    try:
        serve(config, checkpoint=checkpoint, display=display, on_ready=on_ready)
    except KeyboardInterrupt:
        if not is_ready:  # Ctrl-C is how a running server ends
            raise
    finally:
        display.close()
