"""A real browser without a window, Debian's chromium: renders a page, and reports its errors and requests."""

import html
import json
import os
import re
import shutil
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.scaled_timeouts import scaled_timeout

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here (apt-get install chromium)")

_OPTIONS = (
    "--headless",
    "--no-sandbox",  # tests run as root, where there is none
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--host-resolver-rules=MAP * ~NOTFOUND",  # it has errands of its own
    "--enable-logging=stderr",
)
_MEASURE = """<!DOCTYPE html>
<iframe style="border: 0; width: {width}px; height: 1600px" srcdoc="{page}"></iframe>
<script>
  addEventListener("load", () => {{
    const frame = document.querySelector("iframe"), inside = frame.contentDocument;
    const wide = [...inside.querySelectorAll("body *")].filter((each) => !each.closest(".scrolls, pre, svg")
      && each.getBoundingClientRect().right > frame.clientWidth + 1).map((each) => each.tagName);
    const {{scrollWidth, scrollHeight}} = inside.documentElement;
    document.title = JSON.stringify({{width: scrollWidth, height: scrollHeight, wide: wide}});
  }});
</script>
"""
"""A window of its own can be no narrower than 500 pixels."""


_SEARCH = """<!DOCTYPE html>
<iframe style="width: 900px; height: 900px" srcdoc="{page}"></iframe>
<script>
  addEventListener("load", () => {{
    const inside = document.querySelector("iframe").contentDocument, search = inside.getElementById("search");
    const shown = [];
    for (const word of {words}) {{
      search.value = word;
      search.dispatchEvent(new Event("input"));
      const blocks = [...inside.querySelectorAll("#output details:not(#others)")].filter((each) => !each.hidden);
      const text = (block, name) => block.querySelector(name).textContent;
      shown.push(blocks.map((each) => text(each, "b") + "|" + text(each, "pre")));
    }}
    document.title = JSON.stringify(shown);
  }});
</script>
"""


@dataclass(frozen=True)
class PageVisit:
    """The result of opening a page: screenshot, errors and requests."""

    console: list[str]  # messages of the browser and of scripts
    requests: list[str]  # the addresses that the page asked for
    dom: str  # the page as the browser has it
    picture: Path  # a PNG of it


@dataclass(frozen=True)
class Layout:
    """The size of a page, in CSS pixels."""

    width: int  # with what does not fit
    height: int
    wide: list[str]  # elements that stick out at the right


def open_page(page: Path, folder: Path, *, width: int = 1280, height: int = 1600, dark: bool = False) -> PageVisit:
    """Open a file from the disk; what the browser leaves is in ``folder``."""
    picture, log = folder / f"{page.stem}-{width}{'-dark' * dark}.png", folder / "network.json"
    scheme = ["--blink-settings=preferredColorScheme=0"] if dark else []
    done = _run(folder, page, width, height, f"--screenshot={picture}", "--dump-dom", f"--log-net-log={log}", *scheme)
    network = json.loads(log.read_text())
    names = {number: name for name, number in network["constants"]["logEventTypes"].items()}
    asked = [
        each["params"]["url"]
        for each in network["events"]
        if names[each["type"]] == "URL_REQUEST_START_JOB"
        and each.get("params", {}).get("initiator", "not an origin") != "not an origin"  # the browser's own errands
    ]
    console = re.findall(r":CONSOLE:\d+\] (.*)", done.stderr)
    return PageVisit(console, asked, done.stdout, picture)


def measure_page(page: Path, folder: Path, *, width: int) -> Layout:
    """Measure a page in a window of this width, from outside: the page itself lets no script run."""
    copy = folder / "measured.html"
    copy.write_text(_MEASURE.format(width=width, page=html.escape(page.read_text(encoding="utf-8"))), encoding="utf-8")
    dom = _run(folder, copy, 1600, 1600, "--dump-dom").stdout
    found = re.search(r"<title>(\{.*?\})</title>", dom)
    assert found, dom[:2000]
    return Layout(**json.loads(found[1]))


def search_page(page: Path, folder: Path, words: list[str]) -> list[list[str]]:
    """Type each of these words into the page's search; return which ranks are seen then, and their lines."""
    copy = folder / "searched.html"
    text = html.escape(page.read_text(encoding="utf-8"))
    copy.write_text(_SEARCH.format(words=json.dumps(words), page=text), encoding="utf-8")
    dom = _run(folder, copy, 1000, 1000, "--dump-dom").stdout
    found = re.search(r"<title>(\[.*?\])</title>", dom, re.S)
    assert found, dom[:2000]
    seen: list[list[str]] = json.loads(html.unescape(found[1]))
    return seen


def _run(folder: Path, page: Path, width: int, height: int, *options: str) -> subprocess.CompletedProcess[str]:
    assert CHROMIUM
    profile = folder / "profile"
    words = [CHROMIUM, *_OPTIONS, f"--user-data-dir={profile}", f"--window-size={width},{height}", *options]
    browser = subprocess.Popen(
        [*words, page.absolute().as_uri()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
        env={**os.environ, "HOME": str(folder)},
    )
    try:
        out, err = browser.communicate(timeout=scaled_timeout(60))
    finally:
        try:
            os.killpg(browser.pid, signal.SIGKILL)  # its helpers
        except ProcessLookupError:
            pass
        browser.wait()
    shutil.rmtree(profile, ignore_errors=True)
    assert browser.returncode == 0, err
    return subprocess.CompletedProcess(words, browser.returncode, out, err)
