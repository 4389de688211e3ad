"""Where a server of the command line listens, and what it asks of its clients."""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path

from rl.errors import ConfigError, ResourceError

_LEAST = 16  # characters of a token
_BACKLOG = 1024  # connections that wait to be accepted


def loopback(host: str) -> bool:
    """Tells whether an address or name is this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def names_server(header: str, host: str) -> bool:
    """Tells whether a Host header names a server that listens on `host`.

    A server on all addresses takes any IP address and the names of this machine: DNS rebinding needs
    another name.
    """
    name = header.rpartition(":")[0] if header.rpartition(":")[2].isdecimal() else header
    name = name.strip("[]").lower()
    if loopback(host):
        return loopback(name)
    if name == host.lower():
        return True
    if host not in ("0.0.0.0", "::"):
        return False
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name in {"localhost", socket.gethostname().lower(), socket.getfqdn().lower()}
    return True


def origin_names_server(origin: str, host: str) -> bool:
    """Tells whether an Origin header names a server that listens on `host`, at any port. Browsers
    send it with the requests of a page; a page without a place has the origin `null`."""
    _, _, name = origin.partition("://")
    return names_server(name, host)


def read_token(file: str) -> str:
    """Returns the token in a file. Raises ConfigError if there is none, or a short one."""
    try:
        text = Path(file).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--token-file {file}: cannot be read: {error}") from None
    return valid_token(text, f"--token-file {file}")


def valid_token(text: str, source: str) -> str:
    """Returns a token. Raises ConfigError, which names its source, for one that is too short or
    that no header can hold."""
    if len(text) < _LEAST or not text.isascii() or not text.isprintable() or " " in text:
        raise ConfigError(
            f"{source}: a token has at least {_LEAST} characters and no space; "
            "write one: head -c 24 /dev/urandom | base64 > FILE"
        )
    return text


def bound(host: str, port: int) -> socket.socket:
    """Returns a socket that has the address and does not listen yet. Raises ConfigError for an
    address that does not exist, ResourceError for one that is in use."""
    if not 0 <= port <= 65535:
        raise ConfigError(f"--port {port}: give a number up to 65535, or 0 for a free port")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except socket.gaierror as error:
        raise ConfigError(f"--host {host}: {error.strerror}") from None
    except OSError as error:
        raise ResourceError(f"{host}:{port}: {error.strerror}; choose another --port") from None
    return listener


def listen(listener: socket.socket) -> None:
    """Lets clients connect to a bound socket. Raises ResourceError if another process listens
    there."""
    try:
        listener.listen(_BACKLOG)
    except OSError as error:
        address = ":".join(map(str, listener.getsockname()[:2]))
        raise ResourceError(f"{address}: {error.strerror}; choose another --port") from None


def address_of(listener: socket.socket, host: str) -> str:
    """Returns the address of a server for browsers and clients, without a path."""
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{listener.getsockname()[1]}"
