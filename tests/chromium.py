"""A headless Chromium, driven over its DevTools pipe: no driver and no library needed.

Messages are JSON that ends with a zero byte; the browser reads them from descriptor 3 and writes
its own to descriptor 4.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from contextlib import suppress

LIMIT_S = 60.0
# Becomes the browser, with the pipes where it looks for them; those that are 3 or 4 themselves are
# moved out of the way first. In a child that Python forks for it JAX's threads would be in danger.
_CONNECT = """
import fcntl, os, sys
high = [fcntl.fcntl(int(pipe), fcntl.F_DUPFD_CLOEXEC, 10) for pipe in sys.argv[1:3]]
os.dup2(high[0], 3)
os.dup2(high[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


def find():
    """The browser's path, or None."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((path for name in names if (path := shutil.which(name))), None)


class Page:
    """A tab that shows a file; what goes wrong in it is kept in `errors`."""

    def __init__(self, browser, folder, width=1200, height=900, dark=False):
        to_read, self._to = os.pipe()
        self._from, to_write = os.pipe()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
        # The network is cut off: the page must not need it.
        flags += ["--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={folder}"]

        connect = [sys.executable, "-ISc", _CONNECT, str(to_read), str(to_write)]
        self._process = subprocess.Popen(
            [*connect, browser, *flags, "about:blank"],
            pass_fds=(to_read, to_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        self._buffer, self._number, self._session = b"", 0, None
        self.errors = []
        self.requests = []
        targets = self.call("Target.getTargets")["targetInfos"]
        tab = next(target["targetId"] for target in targets if target["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=tab, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.resize(width, height)
        self.scheme("dark" if dark else "light")

    def call(self, method, **params):
        """The answer of the browser to one command."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            found = self._next()
            if found.get("id") == self._number:
                if "error" in found:
                    raise RuntimeError(f"{method}: {found['error']}")
                return found["result"]

    def _next(self):
        end = time.monotonic() + LIMIT_S
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from], [], [], max(0, end - time.monotonic()))
            part = os.read(self._from, 1 << 16) if ready else b""
            if not part:
                raise TimeoutError("the browser does not answer")
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\0")
        found = json.loads(line)
        self._note(found.get("method"), found.get("params"))
        return found

    def _note(self, event, params):
        if event == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description", details["text"]))
        elif event == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(params["entry"]["text"])
        elif event == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.errors.append(str(params["args"]))
        elif event == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def open(self, path):
        self.call("Page.navigate", url=path.as_uri())
        end = time.monotonic() + LIMIT_S
        while self.run("document.readyState") != "complete" and time.monotonic() < end:
            time.sleep(0.02)

    def run(self, code):
        """What an expression of the page is."""
        found = self.call("Runtime.evaluate", expression=code, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"])
        return found["result"].get("value")

    def click(self, selector, k=0):
        """A click of the mouse in the middle of an element, as a reader would."""
        node = f"document.querySelectorAll({selector!r})[{k}]"
        self.run(f"{node}.scrollIntoView({{block: 'center'}})")
        middle = "(box => [box.x + box.width / 2, box.y + box.height / 2])"
        x, y = self.run(f"{middle}({node}.getBoundingClientRect())")
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def type(self, selector, text):
        self.run(f"document.querySelector({selector!r}).focus()")
        self.call("Input.insertText", text=text)

    def resize(self, width, height=900):
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )

    def scheme(self, name):
        features = [{"name": "prefers-color-scheme", "value": name}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def picture(self, path, whole=True):
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def close(self):
        self._session = None
        with suppress(TimeoutError, OSError, RuntimeError):
            self.call("Browser.close")
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._to)
        os.close(self._from)
