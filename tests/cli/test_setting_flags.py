"""Flags that are made from settings."""

import click
import pytest
from click.testing import CliRunner

from areal_gym.cli.setting_flags import setting_flags
from areal_gym.config import RunConfig, load_config
from areal_gym.config.settings_model import setting_fields


@pytest.fixture
def command():
    @click.command()
    @setting_flags({"--lr": "trainer.lr", "--url": "engine.url", "--ranks": "trainer.num_ranks"})
    def command(flags):
        click.echo(repr(flags))

    return command


def test_flag_has_type_bounds_and_help_of_its_setting(command):
    lr, url, ranks = command.params
    assert lr.help == dict(setting_fields(RunConfig))["trainer.lr"].description
    assert (lr.type.name, lr.type.min, lr.type.min_open) == ("float range", 0, True)
    assert (ranks.type.name, ranks.type.min) == ("integer range", 1)
    assert url.multiple


def test_command_gets_only_the_given_flags(command):
    done = CliRunner().invoke(command, ["--lr", "1e-5", "--url", "http://a", "--url", "http://b"])
    assert done.output == "{'trainer.lr': 1e-05, 'engine.url': ('http://a', 'http://b')}\n"
    assert CliRunner().invoke(command, []).output == "{}\n"
    refused = CliRunner().invoke(command, ["--ranks", "0"])
    assert refused.exit_code == 2
    assert "0 is not in the range x>=1" in refused.output


def test_flags_override_the_file_and_are_overridden(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("trainer: {algorithm: dapo, lr: 0.5}\nseed: 1\nsteps: 1\n")
    flags = {"trainer.lr": 0.25, "trainer.algorithm": "ppo", "seed": 2, "engine.model": "1e5"}
    config = load_config(recipe, ["seed=3"], flags=flags)
    assert (config.trainer.lr, config.seed, config.steps) == (0.25, 3, 1)
    assert config.trainer.advantage == "gae"
    assert config.engine.model == "1e5"  # a text, not a number
