"""A real Chromium without a window, told what to do through its debugging pipe."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def find() -> str | None:
    """The browser on this machine; None when it has none."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Page:
    """What one page did.

    Attributes
    ----------
    errors : list of str
        What it wrote to the console as an error or a warning, and its uncaught exceptions.
    requests : list of str
        The addresses that it asked for, the page itself left out.
    """

    def __init__(self, browser: Browser, width: int, height: int, dark: bool) -> None:
        self._browser = browser
        target = browser.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        attached = browser.call("Target.attachToTarget", {"targetId": target, "flatten": True})
        self._session: str = attached["sessionId"]
        self.errors: list[str] = []
        self.requests: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._call("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", {"features": [scheme]})

    def _call(self, method: str, parameters: dict[str, Any] | None = None) -> dict[str, Any]:
        return self._browser.call(method, parameters, self._session, self._happened)

    def _happened(self, method: str, said: dict[str, Any]) -> None:
        if method == "Runtime.consoleAPICalled" and said["type"] in ("error", "warning"):
            self.errors.append(" ".join(str(a.get("value", a.get("description"))) for a in said["args"]))
        elif method == "Runtime.exceptionThrown":
            self.errors.append(str(said["exceptionDetails"]))
        elif method == "Log.entryAdded" and said["entry"]["level"] in ("error", "warning"):
            self.errors.append(said["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(said["request"]["url"])

    def open(self, place: Path | str) -> None:
        """Open a file or a URL, and wait until it is loaded."""
        url = place if isinstance(place, str) else place.as_uri()
        self._call("Page.navigate", {"url": url})
        self.evaluate("new Promise(done => document.readyState == 'complete' ? done() : onload = done)")
        self.requests.remove(url)

    def evaluate(self, script: str) -> Any:
        """What a script returns; of a promise, what it is fulfilled with."""
        asked = {"expression": script, "awaitPromise": True, "returnByValue": True}
        answer = self._call("Runtime.evaluate", asked)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def screenshot(self) -> bytes:
        """The whole page as a PNG."""
        answer = self._call("Page.captureScreenshot", {"captureBeyondViewport": True})
        return base64.b64decode(answer["data"])

    def pdf(self) -> bytes:
        """The page as it is printed."""
        return base64.b64decode(self._call("Page.printToPDF")["data"])


class Browser:
    """A running Chromium."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands = os.fdopen(commands, "wb", buffering=0)
        self._answers = os.fdopen(answers, "rb")
        self._rest = b""
        self._number = 0

    def call(
        self, method: str, parameters: dict[str, Any] | None = None, session: str | None = None, happened: Any = None
    ) -> dict[str, Any]:
        """Send a command, and return its answer. What happens meanwhile is told to ``happened``."""
        self._number += 1
        command = {"id": self._number, "method": method, "params": parameters or {}}
        if session is not None:
            command["sessionId"] = session
        self._commands.write(json.dumps(command).encode() + b"\0")
        while True:
            said = self._next()
            if said.get("id") == self._number:
                assert "error" not in said, (method, said)
                result: dict[str, Any] = said["result"]
                return result
            if happened is not None and said.get("sessionId") == session and "method" in said:
                happened(said["method"], said["params"])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            more = self._answers.read1(1 << 20)  # type: ignore[attr-defined]
            assert more, "the browser ended"
            self._rest += more
        text, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(text)
        return found

    def page(self, width: int = 1280, height: int = 900, dark: bool = False) -> Page:
        """A new page of a size."""
        return Page(self, width, height, dark)


@contextmanager
def running(command: str, folder: Path, options: Sequence[str] = ()) -> Iterator[Browser]:
    """Start a browser with an empty profile, and end it."""
    to_read, commands = os.pipe()
    answers, to_write = os.pipe()
    settings = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe"]
    # The pipes must be the file descriptors 3 and 4 of the browser.
    line = ["bash", "-c", f'exec "$@" 3<&{to_read} 4>&{to_write}', "bash", command, *settings, *options]
    with open(folder / "chromium.log", "wb") as log:
        process = subprocess.Popen(
            [*line, f"--user-data-dir={folder / 'profile'}"], pass_fds=(to_read, to_write), stdout=log, stderr=log
        )
    os.close(to_read)
    os.close(to_write)
    browser = Browser(commands, answers)
    try:
        yield browser
        browser.call("Browser.close")
    finally:
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
