"""The command `python -m areal_gym.sandbox.image`."""

from __future__ import annotations

import argparse
import sys
from contextlib import closing

from areal_gym.errors import GymError
from areal_gym.sandbox.containers import connect
from areal_gym.sandbox.docker import DEFAULT_IMAGE
from areal_gym.sandbox.image import build_image, import_host


def main() -> int:
    """Build or import the image; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m areal_gym.sandbox.image",
        description="Build the image of the docker sandbox.",
    )
    parser.add_argument("--tag", default=DEFAULT_IMAGE, help="its name (default: %(default)s)")
    source = parser.add_mutually_exclusive_group()
    host_help = "use the files of this interpreter; needs no registry"
    source.add_argument("--from-host", action="store_true", help=host_help)
    source.add_argument("--base", help="build the Dockerfile on this image")
    options = parser.parse_args()
    try:
        with closing(connect()) as client:
            if options.from_host:
                image_id = import_host(client, options.tag)
            else:
                image_id = build_image(client, options.tag, base=options.base)
    except GymError as error:
        print("\n  ".join([f"areal-gym: error: {error.message}", *error.hints]), file=sys.stderr)
        return error.exit_code
    print(f"{options.tag}  {image_id}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
