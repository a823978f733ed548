"""Drives headless Chromium through its debugging pipe: no driver, no further package."""

import base64
import json
import os
import shutil
import subprocess
import tempfile

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")

# What sticks out of the page, other than inside something that scrolls by itself.
OVERFLOW = """
(() => {
  const wide = document.documentElement.clientWidth, out = [];
  const scrolls = e => e && (/auto|scroll/.test(getComputedStyle(e).overflowX) || scrolls(e.parentElement));
  for (const e of document.body.querySelectorAll("*")) {
    if (e.ownerSVGElement) continue;
    const box = e.getBoundingClientRect();
    if (box.width && (box.right > wide + 0.5 || box.left < -0.5) && !scrolls(e.parentElement))
      out.push(e.tagName + "." + e.className + " " + Math.round(box.left) + "…" + Math.round(box.right));
  }
  if (document.documentElement.scrollWidth > wide) out.push("the page scrolls sideways");
  return out;
})()
"""
BOXES = """
[...document.querySelectorAll("figure svg.panel")].map(e => {
  const box = e.getBoundingClientRect();
  return {name: e.getAttribute("aria-label"), x: box.x + scrollX, y: box.y + scrollY,
          width: box.width, height: box.height};
})
"""
# Text that leaves its drawing would be cut off.
CUT = """
[...document.querySelectorAll("figure svg.panel")].flatMap(e => {
  const frame = e.getBoundingClientRect();
  return [...e.querySelectorAll("text")].filter(t => {
    const box = t.getBoundingClientRect();
    return box.left < frame.left - 1 || box.right > frame.right + 1 || box.top < frame.top - 1
      || box.bottom > frame.bottom + 1;
  }).map(t => e.getAttribute("aria-label") + ": " + t.textContent);
})
"""


def find():
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page in a headless browser."""

    def __init__(self):
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)

        def wire():
            # The browser expects its pipe at 3 and 4; high numbers first, so that neither overwrites the other.
            high_in, high_out = os.dup2(to_browser, 103), os.dup2(from_browser, 104)
            os.dup2(high_in, 3)
            os.dup2(high_out, 4)

        arguments = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        arguments += ["--remote-debugging-pipe"]
        arguments += ["--hide-scrollbars", "--no-first-run", f"--user-data-dir={self._profile.name}", "about:blank"]
        self._process = subprocess.Popen(
            [find(), *arguments], preexec_fn=wire, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(to_browser)
        os.close(from_browser)
        self._buffer, self._count, self._session = b"", 0, None
        self.requests = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method, **parameters):
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._count:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def _next(self):
        while b"\0" not in self._buffer:
            more = os.read(self._read, 1 << 20)
            if not more:
                raise RuntimeError("the browser ended")
            self._buffer += more
        text, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(text)
        if message.get("method") == "Network.requestWillBeSent":
            self.requests.append(message["params"]["request"]["url"])
        self._loaded = getattr(self, "_loaded", False) or message.get("method") == "Page.loadEventFired"
        return message

    def open(self, file, width, *, dark=False, media=""):
        """Open a page at a width in CSS pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 500
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media=media, features=[scheme])
        self._loaded = False
        self.call("Page.navigate", url=file.resolve().as_uri())
        while not self._loaded:
            self._next()

    def evaluate(self, script):
        return self.call("Runtime.evaluate", expression=script, returnByValue=True)["result"].get("value")

    def sticking_out(self):
        return self.evaluate(OVERFLOW)

    def cut_off(self):
        return self.evaluate(CUT)

    def drawings(self):
        return self.evaluate(BOXES)

    def screenshot(self, box=None):
        """Return a PNG of the whole page, or of a part of it."""
        clip = {} if box is None else {"clip": {**{key: box[key] for key in ("x", "y", "width", "height")}, "scale": 1}}
        answer = self.call("Page.captureScreenshot", captureBeyondViewport=True, **clip)
        return base64.b64decode(answer["data"])

    def pdf(self):
        return base64.b64decode(self.call("Page.printToPDF", preferCSSPageSize=True, printBackground=True)["data"])

    def close(self):
        self._process.terminate()
        self._process.wait(timeout=10)
        self._profile.cleanup()
        os.close(self._write)
        os.close(self._read)
