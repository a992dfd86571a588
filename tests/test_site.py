"""Tests that the pages as a site, read from the disk without a network, can be searched."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.browser import needs_browser, open_page

ROOT = Path(__file__).parent.parent


@pytest.mark.ci
@pytest.mark.slow
@needs_browser
def test_search_works_from_a_disk_and_loads_nothing(tmp_path):
    site = tmp_path / "site"
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", site],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        check=True,
    )
    visit = open_page(site / "index.html", tmp_path, query="?q=goodput")
    assert "md-search-result__item" in visit.dom
    assert 'href="goodput.html' in visit.dom.partition("md-search-result__list")[2]
    assert [each for each in visit.requests if not each.startswith("file:")] == []
    assert visit.console == []
