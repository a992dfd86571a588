"""Tests of the audit of packages that may be preloaded, mostly with packages that do one thing each."""

import json
import re
import sys
from pathlib import Path

import pytest

from ddplaunch.features.preload.known_packages import PackageTable
from tests.preload_audit import allowed_differences, packages
from tests.preload_audit.installation import Installation, run_audit

pytestmark = pytest.mark.timeout(0)

SINGLE = {
    **packages.UNSTABLE,
    **packages.GENERATORS,
    **{name: text for name, (text, _) in packages.ORDER_BOUND.items()},  # before those that change what these depend on
    **{name: text for name, (text, _) in packages.ACTIONS.items()},
    **{name: text for name, (text, _) in packages.NAMED_ORDER.items()},
    **packages.CLEAN,
}


@pytest.fixture
def installed(tmp_path):
    return Installation(tmp_path)


@pytest.mark.ci
def test_packages_that_do_one_thing_each(installed):
    """All in one audit, as most of its time is that of its interpreters."""
    for name, files in {**{name: {f"{name}.py": text} for name, text in SINGLE.items()}, **packages.FILES}.items():
        installed.install(name, files)
    installed.table.write_text(
        json.dumps({"packages": {"pack": {"modules": {"pack": [], "pack.good": []}}}, "harmless": {}})
    )
    result = installed.audit(*SINGLE, *packages.FILES, env={"FAKE_HOME": "/home"})
    assert result.code == 1
    entries = {name: result.entries[name.replace("_", "-")] for name in (*SINGLE, *packages.FILES)}
    refused = {name: entry["refused"] for name, entry in entries.items() if "refused" in entry}

    # Values that differ in each process, in any container.
    assert {name: refused.get(name) for name in packages.UNSTABLE} == {
        name: f"has another {name}.X in each process" for name in packages.UNSTABLE
    }
    for name in packages.GENERATORS:
        assert re.fullmatch(rf"keeps a random generator \(.*\) in {name}\.X", refused[name]), name

    # Actions.
    why = result.stderr.replace("_", "-")
    for name, (_, what) in packages.ACTIONS.items():
        what = what.replace("{site}", str(installed.site))
        assert f"{name}: {name} {what}\n".replace("_", "-") in why
    assert packages.ACTIONS.keys() <= refused.keys()

    # A package that depends on what a program does before has to come first, or names the words in such a source.
    order = ("order", "bound_by", "minds")
    for name, (_, what) in packages.ORDER_BOUND.items():
        assert [entries[name].get(each) for each in order] == ["bound", f"{name} {what}", None], name
    for name, (_, what) in packages.NAMED_ORDER.items():
        assert [entries[name].get(each) for each in order] == ["free", None, [what]], name

    for name in packages.CLEAN:
        assert name not in refused
        assert [entries[name].get(each) for each in order] == ["free", None, None], name
        assert (entries[name]["modules"], entries[name]["versions"]) == ({name: []}, ["1.0"])

    # An entry names variables and what else is loaded.
    assert entries["reads_home"]["variables"] == ["FAKE_HOME", "FAKE_MODE"]
    assert entries["sets_own"]["sets"] == ["MINE"]
    assert entries["of_fork"]["loads"] == ["logger", "plain"]

    # Also a variable whose value another package keeps, and one that counts where another is not set.
    for name in ("one_of_folder", "other_of_folder"):
        assert entries[name]["variables"] == ["FAKE_HOME", "FAKE_TMP"]
    assert "variables" not in entries["kept_folder"]

    # And what it would load if that were installed, or only searches for.
    assert [entries["optional"].get(each) for each in ("tries", "seeks")] == [["absent_thing"], None]
    assert [entries["seeks"].get(each) for each in ("tries", "seeks")] == [None, ["absent_other"]]

    # Forks repair one package, but not another that has copied from it.
    assert entries["torchmetrics"]["order"] == "free"
    assert refused["torchmetrics_kept"] == "has another torchmetrics_kept.R in a fork that is rank 1"

    # Only the listed modules of a distribution count.
    assert entries["pack"]["modules"] == {"pack": [], "pack.good": []}
    assert refused["importer"] == "imports pack.bad, which reads RANK"


@pytest.mark.slow
def test_an_entry_is_written_into_the_table_and_keeps_what_was_written_by_hand(installed):
    installed.install("ours", {"ours/__init__.py": "", "ours/late.py": "import os\nos.getenv('OURS')"})
    by_hand = {"modules": {"ours": [], "ours.late": ["Late"]}, "companions": ["other"], "versions": ["0.9"]}
    installed.table.write_text(json.dumps({"packages": {"ours": by_hand}, "harmless": {}}))
    assert installed.audit("ours", "--write").code == 0
    entry = json.loads(installed.table.read_text())["packages"]["ours"]
    del entry["on"], entry["with"]
    assert entry == {
        "top": ["ours"],
        "versions": ["0.9", "1.0"],
        "modules": by_hand["modules"],
        "order": "free",
        "variables": ["OURS"],
        "companions": ["other"],
    }


@pytest.mark.slow
def test_what_other_versions_have_shown_stays(installed):
    installed.install("ours", {"ours.py": "import os\nos.getenv('OURS')"})
    there = {
        "top": ["ours"],
        "versions": ["0.9", "1.4", "2.1"],
        "modules": {"ours": [], "ours.late": ["Late"]},
        "order": "bound",
        "bound_by": "ours minds the working folder",
        "variables": ["FORMER"],
        "loads": ["other"],
    }
    installed.table.write_text(json.dumps({"packages": {"ours": there}, "harmless": {}}))
    installed.audit("ours", "--write")
    entry = json.loads(installed.table.read_text())["packages"]["ours"]
    del entry["on"], entry["with"]
    assert entry == {
        **{key: there[key] for key in ("top", "modules", "order", "bound_by", "loads")},
        "versions": ["0.9", "2.1", "1.0"],
        "variables": ["FORMER", "OURS"],
    }


def test_an_import_that_ends_the_process_is_refused(installed):
    installed.install("ends", {"ends.py": "import os\nos._exit(3)"})
    assert installed.audit("ends").entries["ends"]["refused"].startswith("does not end: ")


@pytest.mark.ci
def test_a_package_that_changes_other_modules_is_not_harmless(installed):
    installed.install("victim", {"victim.py": "flag = [1]"})
    installed.install("harms", {"harms.py": "import victim\nvictim.flag.append(2)"})
    installed.install("harms_environment", {"harms_environment.py": "import os\nos.environ['HARMED'] = '1'"})
    installed.install("harms_threads", {"harms_threads.py": "import os\nos.environ['OMP_STACKSIZE'] = '1m'"})
    installed.install("harms_python", {"harms_python.py": "import os\nos.cpu_count = lambda: 1"})
    installed.install("harmless", {"harmless.py": "import atexit, os\nX = os.getpid()\nimport victim"})
    entry = {"top": ["victim"], "versions": ["1.0"], "modules": {"victim": []}, "order": "free"}
    installed.table.write_text(json.dumps({"packages": {"victim": entry}, "harmless": {}}))
    names = ("harms", "harms_environment", "harms_threads", "harms_python", "harmless")
    result = installed.audit("--harmless", *names, "--write")
    assert {*result.entries} == {"harmless", "harms-environment"}
    assert "harms: changes victim.flag\n" in result.stderr
    assert "harms-threads: sets $OMP_STACKSIZE\n" in result.stderr
    assert "harms-python: changes os.cpu_count\n" in result.stderr
    written = json.loads(installed.table.read_text())["harmless"]
    assert {name: each.get("sets") for name, each in written.items()} == {
        "harmless": None,
        "harms-environment": ["HARMED"],
    }


@pytest.mark.slow
def test_settings_that_are_changed_together(installed):
    installed.install("as_folder", {"as_folder.py": packages.ORDER_BOUND["as_folder"][0]})
    installed.install("clean", {"clean.py": "X = [1]"})
    entries = installed.audit("as_folder", "clean", "--together").entries
    assert "minds torch's settings or logging or the working folder or" in entries["as-folder"]["refused"]
    assert (entries["clean"]["order"], entries["clean"].get("refused")) == ("free", None)


@pytest.mark.ci
def test_real_packages_are_free(tmp_path):
    """With the real torch, whose import takes most of the time: they mind none of the settings, so all at once."""
    known = tmp_path / "known.json"
    result = run_audit(Path(sys.executable), "packaging", "filelock", "--table", str(known), "--together")
    assert result.code == 0, result.stderr
    assert {name: entry["order"] for name, entry in result.entries.items()} == {"packaging": "free", "filelock": "free"}


@pytest.mark.parametrize("name", ["transformers", "trl"])
def test_the_table_has_what_a_package_imports_only_where_its_metadata_are(name):
    hidden = allowed_differences.HIDDEN_IMPORTS["transformers.integrations.integration_utils"]
    package = PackageTable().packages[name]
    assert hidden <= {*package.tries}
    assert hidden.isdisjoint(package.seeks)
