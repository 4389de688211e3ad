"""`rl view`: shows every sample of a run in a browser, token by token."""

from __future__ import annotations

import argparse
import os

SUMMARY = "show every sample of a run in a browser, token by token"
DESCRIPTION = """Serve a page on this machine that lists the samples of a run by a filter, and shows
each with its tokens, its group and its rewards. A run that is still going on is followed."""
HELP = """examples:
  rl view runs/a
  rl view runs/a --no-open --port 8090        # then: ssh -L 8090:localhost:8090 MACHINE
  rl view runs/a --static site                # a folder that any file server shows

exit codes: 0 done; 2 no run there, or another host without a token file; 5 the port is in use"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the verb."""
    parser.add_argument(
        "run_directory", type=os.path.expanduser, metavar="RUN", help="folder or URL of a run"
    )
    parser.add_argument("--port", type=int, default=0, metavar="N", help="default: a free port")
    parser.add_argument(
        "--host", default="127.0.0.1", metavar="H", help="address to listen on (default: 127.0.0.1)"
    )
    parser.add_argument(
        "--token-file",
        type=os.path.expanduser,
        metavar="F",
        help="file with the token that readers need (default: random)",
    )
    parser.add_argument(
        "--no-open", action="store_true", help="print the address without opening a browser"
    )
    parser.add_argument(
        "--static", type=os.path.expanduser, metavar="DIR", help="write a folder instead of serving"
    )


def run(arguments: argparse.Namespace) -> int:
    """Serves the page until Ctrl-C, or writes the folder. Returns the exit code."""
    from rl.run.mirror.viewed import local_run

    directory = local_run(arguments.run_directory)
    if arguments.static is not None:
        from rl.views.viewer import static

        return static.write(directory, arguments.static)
    from rl.views.viewer import serve

    return serve.serve(
        directory,
        arguments.host,
        arguments.port,
        arguments.token_file,
        not arguments.no_open,
    )
