"""Starts the server of `rl view`: checks host and token, takes a port, and serves until Ctrl-C."""

from __future__ import annotations

import contextlib
import html
import secrets
import tempfile
import webbrowser
from collections.abc import Iterator
from pathlib import Path

from rl.errors import ConfigError
from rl.listener import address_of, bound, listen, loopback, read_token
from rl.views.viewer import terminal

try:
    import uvicorn

    from rl.views.viewer.server import Viewer, application
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
    token = read_token(token_file) if token_file is not None else secrets.token_urlsafe(24)
    listener = bound(host, port)
    listen(listener)
    address = f"{address_of(listener, host)}/"
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
