"""Tests of ``ddplaunch report --html FILE`` on the command line."""

import pytest

from tests.conftest import assert_refused, write_program
from tests.observe.history.test_history import keep
from tests.start_modes import LIGHT

pytestmark = pytest.mark.usefixtures("state")

RUN = "bad"

FAILS = """
    import os
    import time

    if os.environ["RANK"] == "1":
        raise ValueError("<b>no labels</b>")
    time.sleep(600)
"""


def test_the_html_report_replaces_a_file(run_ddplaunch, run_in_fork, tmp_path):
    write_program(tmp_path, "<script>.py", FAILS)
    assert run_ddplaunch("run", "--nproc", "2", "--run-id", RUN, *LIGHT, "<script>.py").returncode == 1
    (tmp_path / "a page.html").write_text("before")
    done = run_in_fork("report", RUN, "--html", "a page.html")
    assert (done.returncode, done.stdout, done.stderr) == (0, "written: a page.html\n", "")
    text = (tmp_path / "a page.html").read_text()
    assert text.startswith("<!DOCTYPE html>\n")
    assert text.endswith("</html>\n")
    assert "rank 1 failed with ValueError: &lt;b&gt;no labels&lt;/b&gt; (exit code 1)" in text
    assert text.count("<script>") == 1
    assert run_in_fork("report", RUN, "--html", "-").stdout.startswith("<!DOCTYPE html>\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((RUN, "--html", "missing/page.html"), "--html missing/page.html: No such file or directory"),
        ((RUN, "--html", "."), "--html .: Is a directory"),
        ((RUN, "--html", "/dev/full"), "--html /dev/full: No space left on device"),
        ((RUN, "--html", ""), "--html : No such file or directory"),
        ((RUN, "--json", "--html", "page.html"), "--json and --html contradict each other"),
        (("nothing", "--html", "page.html"), 'no run named "nothing"'),
    ],
)
def test_invalid_report_options_are_refused(words, message, run_in_fork, tmp_path):
    keep(run_id=RUN, code=1)
    assert_refused(run_in_fork("report", *words), f"Error: {message}\n")
    assert not (tmp_path / "page.html").exists()
