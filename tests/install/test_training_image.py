"""The training image: built by the Dockerfile on a base that is made of this machine.

No registry is asked and no network is there: the base has this interpreter and the packages that
areal-gym itself needs, so that pip installs only the package.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import sys
import sysconfig
import tarfile
import tempfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from areal_gym.errors import SandboxError
from areal_gym.sandbox.containers import connect
from areal_gym.sandbox.image import add_file, add_system_files
from areal_gym.version import __version__
from tests._support.paths import ROOT

pytestmark = pytest.mark.slow

BASE, IMAGE = "areal-gym-test-base:tests", "areal-gym:tests"
PROGRAMS = ("sh", "bash", "env", "cat", "ls", "mkdir", "chown", "rm", "cp", "uname", "id", "touch")
LEFT_OUT = {"__pycache__", "test", "tests", "idlelib", "tkinter", "site-packages", "turtledemo"}


@pytest.fixture(scope="module")
def client():
    pytest.importorskip("docker")
    try:
        client = connect()
    except SandboxError as error:
        pytest.skip(error.message)
    yield client
    client.close()


@pytest.fixture(scope="module")
def image(client):
    """The image's id, once it is built."""
    import docker

    with tempfile.TemporaryFile() as file:
        with tarfile.open(fileobj=file, mode="w") as tar:
            write_base(tar)
        file.seek(0)
        path = ["ENV PATH=/usr/local/bin:/usr/bin:/bin"]
        client.api.import_image_from_data(file, repository=BASE, changes=path)
    try:
        image, _ = client.images.build(
            path=str(ROOT),
            tag=IMAGE,
            buildargs={
                "BASE": BASE,
                "EXTRAS": "",
                "PIP_ARGS": "--no-index --no-build-isolation",
            },
            network_mode="none",
            rm=True,
            forcerm=True,
        )
    except docker.errors.BuildError as error:
        raise AssertionError("".join(e.get("stream", "") for e in error.build_log)) from error
    yield image.id
    for tag in (IMAGE, BASE):
        client.images.remove(tag, force=True)


def write_base(tar):
    """A root file system: some programs, this interpreter, and the packages of the core."""
    written: set[str] = set()
    python = os.path.realpath(f"{sys.base_prefix}/bin/python3")
    library = sysconfig.get_path("stdlib")
    site = sysconfig.get_path("purelib", vars={"base": sys.base_prefix})
    programs = {
        f"/bin/{name}": f"/bin/{name}" for name in PROGRAMS if os.path.exists(f"/bin/{name}")
    }
    targets = {python: python, **programs}
    for directory, names, files in os.walk(library):
        names[:] = [name for name in names if name not in LEFT_OUT]
        for name in files:
            if not name.endswith(".a"):
                targets[f"{directory}/{name}"] = f"{directory}/{name}"
    for distribution in core_distributions():
        for file in distribution.files or ():
            source = str(distribution.locate_file(file))
            if ".." not in file.parts and os.path.isfile(source) and ".pyc" not in source:
                targets[source] = f"{site}/{file}"
    for source, target in targets.items():
        add_file(tar, os.path.realpath(source), target, written)
    binaries = [path for path in targets if ".so" in path or path in programs]
    add_system_files(tar, written, python=python, binaries=binaries)


def core_distributions():
    """What areal-gym needs without extras, and what builds it."""
    wanted, seen = ["areal-gym", "pip", "setuptools"], {}
    while wanted:
        name = re.sub(r"[-_.]+", "-", wanted.pop()).lower()
        if name in seen:
            continue
        seen[name] = importlib.metadata.distribution(name)
        for text in seen[name].requires or ():
            needed = Requirement(text)
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                wanted.append(needed.name)
    return [found for name, found in seen.items() if name != "areal-gym"]


def run(client, image, *command):
    container = client.containers.run(
        image, list(command), network_mode="none", detach=True, shm_size="64m"
    )
    try:
        code = container.wait(timeout=300)["StatusCode"]
        return code, container.logs().decode()
    finally:
        container.remove(force=True)


def test_image_runs_the_command_line_as_an_ordinary_user(client, image):
    assert run(client, image, "--version") == (0, f"areal-gym, version {__version__}\n")
    code, shown = run(client, image, "list", "envs")
    assert code == 0
    assert "countdown" in shown
    settings = client.images.get(image).attrs["Config"]
    assert settings["User"] == "10001:10001"
    assert settings["Entrypoint"] == ["areal-gym"]


def test_image_says_what_works_in_it(client, image):
    code, shown = run(client, image, "doctor")
    assert code in (0, 3), shown  # no torch is in this one
    assert __version__ in shown
    assert "Traceback" not in shown


def test_image_has_no_more_than_the_package(client, image):
    """Neither the checkout nor its environment travel into the image."""
    (layer,) = [
        entry for entry in client.images.get(image).history() if "COPY dir" in entry["CreatedBy"]
    ]
    sources = sum(file.stat().st_size for file in Path(ROOT, "areal_gym").rglob("*.*"))
    assert layer["Size"] < 2 * sources
