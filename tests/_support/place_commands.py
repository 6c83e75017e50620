"""Commands and files for places, whatever starts them."""

import io
import tarfile


def archive(**texts):
    """Return a tar archive with a file of each name and text."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, text in texts.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text)
            tar.addfile(entry, io.BytesIO(text.encode()))
    return buffer.getvalue()


def sh(place, command, **options):
    """Run a command line in a place, for 20 seconds at most."""
    return place.run(["/bin/sh", "-c", command], **{"timeout_s": 20, **options})
