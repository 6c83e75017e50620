"""These tests check how pictures look in a terminal, and that `play` names their files."""

import io
from pathlib import Path

import pytest
from click.testing import CliRunner
from PIL import Image

from areal_gym.cli.app import app
from areal_gym.cli.terminal_pictures import blocks
from areal_gym.images import use_image_store

RED, BLUE = (255, 0, 0), (0, 0, 255)


def png_of(picture):
    out = io.BytesIO()
    picture.save(out, "PNG")
    return out.getvalue()


def test_a_cell_shows_two_pixels_one_above_the_other():
    picture = Image.new("RGB", (3, 4), RED)
    picture.putpixel((1, 1), BLUE)
    text = blocks(png_of(picture), columns=80)
    assert text.plain == "▀▀▀\n▀▀▀"
    colors = [(span.style.color.triplet, span.style.bgcolor.triplet) for span in text.spans]
    assert colors == [(RED, RED), (RED, BLUE), (RED, RED)] + 3 * [(RED, RED)]


@pytest.mark.parametrize(
    ("size", "cells"), [((960, 480), (96, 24)), ((480, 960), (24, 24)), ((1, 1), (1, 1))]
)
def test_large_pictures_keep_their_ratio_of_sides(size, cells):
    lines = blocks(png_of(Image.new("RGB", size)), columns=96, lines=24).plain.split("\n")
    assert (len(lines[0]), len(lines)) == cells


@pytest.mark.parametrize("is_plain", [False, True])
def test_play_draws_the_picture_and_names_its_file(tmp_path, monkeypatch, is_plain):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as if the output were a terminal
    monkeypatch.delenv("NO_COLOR", raising=False)
    argv = ["play", "shapes", *(["--plain"] if is_plain else [])]
    with use_image_store(tmp_path):
        done = CliRunner().invoke(app, argv, input="/gold\n")
    assert done.exit_code == 0
    assert "reward 1" in done.output
    assert ("▀" in done.output) is not is_plain
    (file,) = (line for line in done.output.splitlines() if line.endswith(".png"))
    assert Path(file).is_file()
    assert Path(file).is_relative_to(tmp_path)
