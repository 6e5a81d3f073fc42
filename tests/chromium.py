"""A headless Chromium driven over its DevTools protocol, with the standard library alone."""

from __future__ import annotations

import base64
import json
import os
import re
import secrets
import shutil
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--hide-scrollbars",
    "--remote-debugging-port=0",
)  # fmt: skip


def find() -> str | None:
    """The browser's program, if there is one; CHROMIUM may name it."""
    return os.environ.get("CHROMIUM") or next(
        (path for name in NAMES if (path := shutil.which(name))), None
    )


# Every text whose contrast with what lies behind it is below a bound (WCAG 2: 4.5 for text).
FAINT = """(least) => {
  const parse = (text) => {
    const values = text.match(/[\\d.]+/g).map(Number);
    const scale = text.startsWith("color(") ? 255 : 1;
    return [...values.slice(0, 3).map((one) => one * scale), values[3] ?? 1];
  };
  const light = (rgb) => {
    const [r, g, b] = rgb.slice(0, 3).map((one) => one / 255)
      .map((one) => (one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    for (let one = element; one; one = one.parentElement) {
      const color = parse(getComputedStyle(one).backgroundColor);
      if (color[3] > 0.99) return color;
    }
    return [255, 255, 255, 1];
  };
  const found = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const element = walk.currentNode.parentElement;
    const words = walk.currentNode.textContent.trim();
    const hidden = ["STYLE", "SCRIPT"].includes(element.tagName) || element.closest("svg");
    if (!words || hidden || !element.getClientRects().length) continue;
    const pair = [light(parse(getComputedStyle(element).color)), light(behind(element))];
    const contrast = (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
    if (contrast < least) found.push(`${contrast.toFixed(1)}: ${words.slice(0, 40)}`);
  }
  const shapes = "figure svg g[id*=text_] path, figure svg g[id*=text_] use";
  for (const shape of document.querySelectorAll(shapes)) {
    const around = behind(shape.closest("figure"));
    const pair = [light(parse(getComputedStyle(shape).fill)), light(around)];
    const contrast = (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
    if (contrast < least) found.push(`${contrast.toFixed(1)}: ${shape.closest("[id*=text_]").id}`);
  }
  return [...new Set(found)];
}"""


class Page:
    """One tab, and what it complained about."""

    def __init__(self, address: str, timeout: float) -> None:
        host, port, path = re.fullmatch(r"ws://([^:/]+):(\d+)(/.*)", address).groups()  # type: ignore[union-attr]
        self._socket = socket.create_connection((host, int(port)), timeout=timeout)
        key = base64.b64encode(secrets.token_bytes(16)).decode()
        lines = (f"GET {path} HTTP/1.1", f"Host: {host}:{port}", "Upgrade: websocket",
        "Connection: Upgrade",
                 f"Sec-WebSocket-Key: {key}", "Sec-WebSocket-Version: 13", "", "")  # fmt: skip
        self._socket.sendall("\r\n".join(lines).encode())
        self._buffer = b""
        while b"\r\n\r\n" not in self._buffer:
            self._buffer += self._socket.recv(4096)
        head, self._buffer = self._buffer.split(b"\r\n\r\n", 1)
        assert b" 101 " in head.splitlines()[0], head
        self._number = 0
        self.events: list[dict[str, Any]] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        self._number += 1
        self._send(
            json.dumps({"id": self._number, "method": method, "params": parameters}).encode()
        )
        while True:
            message = json.loads(self._receive())
            if message.get("id") == self._number:
                assert "error" not in message, message["error"]
                return message["result"]
            self.events.append(message)

    def open(self, url: str) -> None:
        """Load a page and wait until it has loaded."""
        self.events.clear()
        self.call("Page.navigate", url=url)
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(json.loads(self._receive()))

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press(self, key: str, code: int, text: str = "") -> None:
        """Press and release a key."""
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=code,
                text=text if kind == "keyDown" else "",
            )

    def size(self, width: int, height: int, *, dark: bool = False) -> None:
        """Make the window so large, and choose the theme."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def faint(self, least: float = 4.5) -> list[str]:
        """Texts, those of figures too, with less contrast than this to what lies behind them."""
        found: list[str] = self.run(f"({FAINT})({least})")
        return found

    def beyond(self) -> list[str]:
        """What reaches out of the window to the right and cannot be scrolled to."""
        inside = (
            "[...document.body.querySelectorAll('*')].filter(one => !one.closest('svg') &&"
            " !one.closest('.scroll, .command, .skip') && one.getClientRects().length"
            " && one.getBoundingClientRect().right > document.documentElement.clientWidth + 0.5)"
        )
        found: list[str] = self.run(f"{inside}.map(one => one.outerHTML.slice(0, 80))")
        return found

    def screenshot(self, file: Path, *, whole: bool = True) -> None:
        """A picture of the page."""
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)[
            "data"
        ]
        file.write_bytes(base64.b64decode(data))

    @property
    def complaints(self) -> list[str]:
        """Errors and warnings of the console, exceptions, and every request that is not for the
        page itself.
        """
        self.run("0")
        found = []
        for event in self.events:
            values = event.get("params", {})
            if event["method"] == "Runtime.exceptionThrown":
                found.append(str(values["exceptionDetails"].get("text")))
            elif event["method"] == "Runtime.consoleAPICalled" and values["type"] in (
                "error",
                "warning",
                "assert",
            ):
                found.append(str(values["args"]))
            elif event["method"] == "Log.entryAdded" and values["entry"]["level"] in (
                "error",
                "warning",
            ):
                found.append(values["entry"]["text"])
            elif (
                event["method"] == "Network.requestWillBeSent"
                and values["type"] != "Document"
                and not values["request"]["url"].startswith("data:")
            ):
                found.append(f"asked for {values['request']['url']}")
        return found

    def close(self) -> None:
        """Hang up."""
        self._socket.close()

    def _send(self, payload: bytes) -> None:
        mask = secrets.token_bytes(4)
        size = len(payload)
        head = (
            struct.pack("!BB", 0x81, 0x80 | size)
            if size < 126
            else struct.pack("!BBH", 0x81, 0xFE, size)
        )
        assert size < 65536, "longer commands are not needed"
        self._socket.sendall(
            head + mask + bytes(byte ^ mask[i % 4] for i, byte in enumerate(payload))
        )

    def _receive(self) -> bytes:
        message = b""
        while True:
            first, second = self._take(2)
            size = second & 0x7F
            if size == 126:
                (size,) = struct.unpack("!H", self._take(2))
            elif size == 127:
                (size,) = struct.unpack("!Q", self._take(8))
            payload = self._take(size)
            assert first & 0x0F != 8, "the browser hung up"
            if first & 0x0F in (0, 1):
                message += payload
                if first & 0x80:
                    return message

    def _take(self, size: int) -> bytes:
        while len(self._buffer) < size:
            part = self._socket.recv(1 << 16)
            assert part, "the browser hung up"
            self._buffer += part
        taken, self._buffer = self._buffer[:size], self._buffer[size:]
        return taken


@contextmanager
def browser(program: str, *, timeout: float = 60.0) -> Iterator[Page]:
    """A fresh browser with one empty tab."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            page = Page(_address(Path(profile), process, timeout), timeout)
            try:
                yield page
            finally:
                page.close()
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _address(profile: Path, process: subprocess.Popen[bytes], timeout: float) -> str:
    """Where the first tab listens."""
    from urllib.request import urlopen

    file, end = profile / "DevToolsActivePort", time.monotonic() + timeout
    while time.monotonic() < end:
        assert process.poll() is None, f"the browser ended at once with code {process.returncode}"
        if file.is_file() and (lines := file.read_text().splitlines()):
            with urlopen(f"http://127.0.0.1:{lines[0]}/json/list", timeout=timeout) as answer:
                pages = [tab for tab in json.load(answer) if tab["type"] == "page"]
            if pages:
                return pages[0]["webSocketDebuggerUrl"]
        time.sleep(0.05)
    raise TimeoutError(f"the browser did not open its debugging port within {timeout:g} s")
