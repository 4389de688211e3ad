"""Drives a headless Chromium by its DevTools protocol over a pipe, without another package. The
network is off, but for servers on 127.0.0.1."""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
_FLAGS = (
    *(
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--no-first-run",
        "--disable-dev-shm-usage",
    ),
    *(
        "--disable-background-networking",
        "--disable-component-update",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    ),
)


class Browser:
    """One page. `errors` lists what its console and its Content-Security-Policy complained about,
    `requests` every address that it asked for."""

    file: Path

    def __init__(self, width: int = 1280, height: int = 900, dark: bool = False):
        self._folder = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        # Chromium reads commands from descriptor 3 and writes to 4.
        flags = " ".join(
            map(
                _quoted,
                (*_FLAGS, "--remote-debugging-pipe", f"--user-data-dir={self._folder.name}"),
            )
        )
        shell = f"exec {CHROMIUM} {flags}"
        self._process = subprocess.Popen(
            ["bash", "-c", f"{shell} about:blank 3<&{to_browser} 4>&{from_browser}"],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._ids, self._buffer, self._session = itertools.count(1), b"", None
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._loaded = False
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.resize(width, height)
        if dark:
            self.call(
                "Emulation.setEmulatedMedia",
                features=[{"name": "prefers-color-scheme", "value": "dark"}],
            )

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_) -> None:
        self._process.terminate()
        self._process.wait(timeout=20)
        os.close(self._write)
        os.close(self._read)
        self._folder.cleanup()

    def call(self, method: str, **parameters):
        """Sends a command and returns its result. Keeps the events that come first."""
        number = next(self._ids)
        message = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != number:
            pass
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def open(self, file: Path | str, seconds: float = 30) -> None:
        """Loads a file or an address and waits until it is complete."""
        self._loaded = False
        self.call("Page.navigate", url=file if isinstance(file, str) else file.resolve().as_uri())
        end = time.monotonic() + seconds
        while not self._loaded:
            assert time.monotonic() < end, f"{file} was not loaded in {seconds} s"
            self._next()
        self.evaluate("0")  # what the page says while it loads has arrived

    def wait(self, expression: str, seconds: float = 20):
        """Waits until a JavaScript expression is true, and returns its value."""
        end = time.monotonic() + seconds
        while not (value := self.evaluate(expression)):
            assert time.monotonic() < end, f"{expression} did not become true in {seconds} s"
            time.sleep(0.03)
        return value

    def evaluate(self, expression: str):
        """Returns the value of a JavaScript expression."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def mouse(self, kind: str, x: float, y: float, **more) -> None:
        """Sends a mouse event: mouseMoved, mousePressed, mouseReleased."""
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def resize(self, width: int, height: int) -> None:
        """Sets the size of the window in pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )

    def screenshot(self, file: Path) -> None:
        """Writes what the window shows as PNG."""
        file.write_bytes(
            base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])
        )

    def _next(self) -> dict:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], 60)
            chunk = os.read(self._read, 1 << 20) if ready else b""
            assert chunk, "chromium ended, or said nothing for a minute"
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(line)
        method, parameters = message.get("method"), message.get("params", {})
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(parameters["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in (
            "error",
            "warning",
            "assert",
        ):
            self.errors.append(json.dumps(parameters["args"]))
        elif method == "Log.entryAdded":
            self.errors.append(parameters["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        return message


def _quoted(flag: str) -> str:
    return f"'{flag}'"
