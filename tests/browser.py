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
from typing import Any

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
_FRAME = """<!DOCTYPE html>
<iframe style="border: 0; width: WIDTHpx; height: 1600px" srcdoc="PAGE"></iframe>
<script>
  addEventListener("load", () => {
    const frame = document.querySelector("iframe"), inside = frame.contentDocument;
    const evaluate = () => { SCRIPT };
    document.title = JSON.stringify(evaluate());
  });
</script>
"""
"""A page in a window, which by itself can be no narrower than 500 pixels, and a script from outside."""

_MEASURE = """
const wide = [...inside.querySelectorAll("body *")].filter((each) => !each.closest(".scrolls, pre, svg")
  && each.getBoundingClientRect().right > frame.clientWidth + 1).map((each) => each.tagName);
const {scrollWidth, scrollHeight} = inside.documentElement;
return {width: scrollWidth, height: scrollHeight, wide: wide};
"""

_SEARCH = """
const search = inside.getElementById("search");
return WORDS.map((word) => {
  search.value = word;
  search.dispatchEvent(new Event("input"));
  const blocks = [...inside.querySelectorAll("#output details:not(#others)")].filter((each) => !each.hidden);
  return blocks.map((each) => each.querySelector("b").textContent + "|" + each.querySelector("pre").textContent);
});
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


def open_page(
    page: Path, folder: Path, *, width: int = 1280, height: int = 1600, dark: bool = False, query: str = ""
) -> PageVisit:
    """Open a file from the disk, at an address that ends in ``query``; what the browser leaves is in ``folder``."""
    picture, log = folder / f"{page.stem}-{width}{'-dark' * dark}.png", folder / "network.json"
    scheme = ["--blink-settings=preferredColorScheme=0"] if dark else []
    done = _run(
        folder,
        page,
        width,
        height,
        f"--screenshot={picture}",
        "--dump-dom",
        f"--log-net-log={log}",
        *scheme,
        query=query,
    )
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
    return Layout(**_evaluate(page, folder, width, _MEASURE))


def search_page(page: Path, folder: Path, words: list[str]) -> list[list[str]]:
    """Type each of these words into the page's search; return which ranks are seen then, and their lines."""
    found: list[list[str]] = _evaluate(page, folder, 900, _SEARCH.replace("WORDS", json.dumps(words)))
    return found


def _evaluate(page: Path, folder: Path, width: int, script: str) -> Any:
    """Return the result of a script, of which ``inside`` is the document of the page."""
    copy = folder / "framed.html"
    parts = {"WIDTH": str(width), "SCRIPT": script, "PAGE": html.escape(page.read_text(encoding="utf-8"))}
    copy.write_text(re.sub("WIDTH|SCRIPT|PAGE", lambda part: parts[part[0]], _FRAME), encoding="utf-8")
    dom = _run(folder, copy, 1600, 1600, "--dump-dom").stdout
    found = re.search(r"<title>(.*?)</title>", dom, re.S)
    assert found, dom[:2000]
    return json.loads(html.unescape(found[1]))


def _run(
    folder: Path, page: Path, width: int, height: int, *options: str, query: str = ""
) -> subprocess.CompletedProcess[str]:
    assert CHROMIUM
    profile = folder / "profile"
    words = [CHROMIUM, *_OPTIONS, f"--user-data-dir={profile}", f"--window-size={width},{height}", *options]
    browser = subprocess.Popen(
        [*words, page.absolute().as_uri() + query],
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
