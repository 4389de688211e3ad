"""Checks and names the devices that a command computes on."""

from __future__ import annotations

from policy.mesh import processes
from rl.errors import ResourceError
from rl.records import manifest

_EXTRA = {"gpu": "cuda", "tpu": "tpu"}


def check(platform: str) -> None:
    """Starts jax. Raises ResourceError if its devices are not of the platform `platform`; `auto`
    takes any.

    Without a driver or the package of an accelerator jax itself may go on with the CPU.
    """
    import jax

    try:
        used = jax.devices()[0].platform
        says = ""
    except (RuntimeError, AssertionError) as error:  # AssertionError: no backend was registered
        used = None
        says = f" jax says: {error}" if str(error) else ""
    if used is not None and platform in ("auto", used):
        return
    have = "" if used is None else f"; jax finds only: {used}"
    install = (
        f"install it with `pip install 'duet-rl[{_EXTRA[platform]}]'`, or "
        if platform in _EXTRA
        else ""
    )
    raise ResourceError(
        f"platform: {platform} cannot be used here{have}; {install}set platform=cpu.{says}"
    )


def check_and_show(platform: str) -> None:
    """Checks the devices, and prints a line that names them on the first process. Raises as
    `check`."""
    check(platform)
    if processes.first():
        print(line(), flush=True)


def line() -> str:
    """Returns a line that names the devices, for the first lines of a run."""
    facts = manifest.devices()
    processes = f", {facts['processes']} processes" if facts["processes"] > 1 else ""
    return f"devices: {facts['count']} x {facts['kind']} ({facts['platform']}{processes})"
