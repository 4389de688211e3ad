"""Starts the server of `rl view`: checks host and token, takes a port, and serves until Ctrl-C."""

from __future__ import annotations

import contextlib
import html
import secrets
import socket
import tempfile
import webbrowser
from collections.abc import Iterator
from pathlib import Path

from rl.errors import ConfigError, ResourceError
from rl.views.viewer import terminal

try:
    import uvicorn

    from rl.views.viewer.server import Viewer, application, loopback
except ModuleNotFoundError as error:
    raise ConfigError(f"`rl view` needs {error.name}; type: pip install 'duet-rl[view]'") from None


def serve(directory: str, host: str, port: int, token_file: str | None, browse: bool) -> int:
    """Serves the samples of a run. Returns 0 after Ctrl-C.

    Raises ConfigError if there is no run, or for another host without a token; ResourceError if the
    port is in use.
    """
    path = Path(directory)
    terminal.check(path)
    if not loopback(host) and token_file is None:
        raise ConfigError(
            f"--host {host}: other machines could read the samples; name a token with "
            "--token-file FILE"
        )
    token = _token(token_file) if token_file is not None else secrets.token_urlsafe(24)
    listener = _listen(host, port)
    shown = f"[{host}]" if ":" in host else host
    address = f"http://{shown}:{listener.getsockname()[1]}/"
    url = f"{address}#token={token}" if token_file is None else address
    print(f"{url}\nCtrl-C ends it", flush=True)
    if token_file is not None:
        print(f"add #token=TOKEN to the address, with the token in {token_file}", flush=True)
    with Viewer(path) as viewer, contextlib.ExitStack() as opened:
        if browse:
            webbrowser.open(opened.enter_context(_redirect(f"{address}#token={token}")))
        config = uvicorn.Config(
            application(viewer, token, host),
            log_level="warning",
            access_log=False,
            lifespan="off",
            server_header=False,
        )
        with contextlib.suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[listener])
    return 0


@contextlib.contextmanager
def _redirect(url: str) -> Iterator[str]:
    """Yields the address of a file that sends a browser to `url`. Only its owner can read it.

    The command line of a browser, which every user of the machine can list, does not show the token
    then.
    """
    with tempfile.TemporaryDirectory(prefix="duet-view-") as folder:
        page = Path(folder) / "open.html"
        page.write_text(
            f'<!doctype html><meta http-equiv="refresh" content="0; url={html.escape(url)}">'
        )
        yield page.as_uri()


def _token(file: str) -> str:
    try:
        token = Path(file).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--token-file {file}: cannot be read: {error}") from None
    if len(token) < 16 or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(
            f"--token-file {file}: a token has at least 16 characters and no space; "
            f"write one: head -c 24 /dev/urandom | base64 > {file}"
        )
    return token


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except OverflowError:
        raise ConfigError(f"--port {port}: a port is a number from 1 to 65535") from None
    except socket.gaierror as error:
        raise ConfigError(f"--host {host}: {error.strerror}") from None
    except OSError as error:
        raise ResourceError(
            f"{host}:{port}: {error.strerror}; choose another --port, or leave it out"
        ) from None
    return listener
