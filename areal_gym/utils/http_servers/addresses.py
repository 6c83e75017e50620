"""Functions for the addresses of servers and for the secrets of their clients."""

from __future__ import annotations

import hmac
import ipaddress
import socket
from urllib.parse import urlsplit

from areal_gym.errors import InfrastructureError


def http_address(host: str, port: int) -> str:
    """Return `http://HOST:PORT`, with brackets around an IPv6 address."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def is_loopback(host: str) -> bool:
    """Return whether a host is a loopback address, which only this machine can reach."""
    try:
        return host.lower() == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def host_name(header: str) -> str:
    """Return the name in a Host header, or "" if it cannot be read."""
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return ""


def is_same_secret(given: str, secret: str) -> bool:
    """Compare a client's secret in constant time; headers may contain bytes that are not text."""
    return hmac.compare_digest(
        given.encode("utf-8", "surrogatepass"), secret.encode("utf-8", "surrogatepass")
    )


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket; port 0 is any free one. Raises InfrastructureError if it fails."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)  # many clients may connect as soon as they read the address
    except OSError as error:
        listener.close()
        raise InfrastructureError(
            f"cannot listen at {host}:{port}: {error.strerror or error}",
            hints=["any free port: --port 0"],
        ) from error
    return listener
