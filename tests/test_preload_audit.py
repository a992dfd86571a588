"""Tests of the audit of packages that may be preloaded, mostly with packages that do one thing each."""

import json
import re
import sys
from pathlib import Path

import pytest

from ddplaunch.features.preload.known_packages import PackageTable
from tests.tools.preload_audit import allowed_differences, packages
from tests.tools.preload_audit.installation import Installation, run_audit

pytestmark = pytest.mark.timeout(0)

SINGLE = {
    **packages.UNSTABLE,
    **packages.GENERATORS,
    **{name: text for name, (text, _) in packages.MINDS.items()},  # before those that change what these depend on
    **{name: text for name, (text, _) in packages.ACTIONS.items()},
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
    installed.table.write_text(json.dumps({"pack": {"modules": {"pack": [], "pack.good": []}}}))
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
    for name, (_, what) in {**packages.MINDS, **packages.ACTIONS}.items():
        what = what.replace("{site}", str(installed.site))
        assert f"{name}: {name} {what}\n".replace("_", "-") in why
    assert packages.MINDS.keys() | packages.ACTIONS.keys() <= refused.keys()

    for name in packages.CLEAN:
        assert name not in refused
        assert (entries[name]["modules"], entries[name]["versions"]) == ({name: []}, ["1.0"])

    # An entry names what else is loaded, or would be if it were installed.
    assert entries["of_fork"]["loads"] == ["logger", "plain"]
    assert entries["optional"]["tries"] == ["absent_thing"]
    assert "tries" not in entries["seeks"]

    # Forks repair one package, but not another that has copied from it.
    assert "torchmetrics" not in refused
    assert refused["torchmetrics_kept"] == "has another torchmetrics_kept.R in a fork that is rank 1"

    # Only the listed modules of a distribution count.
    assert entries["pack"]["modules"] == {"pack": [], "pack.good": []}
    assert refused["importer"] == "imports pack.bad, which reads RANK"


@pytest.mark.ci
def test_an_entry_is_written_into_the_table_and_keeps_what_was_written_by_hand(installed):
    installed.install("ours", {"ours/__init__.py": "", "ours/late.py": "try: import absent_thing\nexcept: pass"})
    by_hand = {"modules": {"ours": [], "ours.late": ["Late"]}, "versions": ["0.9"]}
    installed.table.write_text(json.dumps({"ours": by_hand}))
    assert installed.audit("ours", "--write").code == 0
    assert json.loads(installed.table.read_text())["ours"] == {
        "top": ["ours"],
        "versions": ["0.9", "1.0"],
        "modules": by_hand["modules"],
        "tries": ["absent_thing"],
    }


@pytest.mark.ci
def test_what_other_versions_have_shown_stays(installed):
    installed.install("ours", {"ours.py": ""})
    there = {
        "top": ["ours"],
        "versions": ["0.9", "1.4", "2.1"],
        "modules": {"ours": [], "ours.late": ["Late"]},
        "loads": ["other"],
    }
    installed.table.write_text(json.dumps({"ours": there}))
    installed.audit("ours", "--write")
    assert json.loads(installed.table.read_text())["ours"] == {**there, "versions": ["0.9", "2.1", "1.0"]}


def test_an_import_that_ends_the_process_is_refused(installed):
    installed.install("ends", {"ends.py": "import os\nos._exit(3)"})
    assert installed.audit("ends").entries["ends"]["refused"].startswith("does not end: ")


@pytest.mark.ci
def test_settings_that_are_changed_together(installed):
    installed.install("as_decimal", {"as_decimal.py": packages.MINDS["as_decimal"][0]})
    installed.install("clean", {"clean.py": "X = [1]"})
    entries = installed.audit("as_decimal", "clean", "--together").entries
    assert "minds logging or Python's settings or" in entries["as-decimal"]["refused"]
    assert "refused" not in entries["clean"]


@pytest.mark.ci
def test_real_packages_can_be_preloaded(tmp_path):
    """With the real torch, whose import takes most of the time: they mind none of the settings, so all at once."""
    known = tmp_path / "known.json"
    result = run_audit(Path(sys.executable), "packaging", "filelock", "--table", str(known), "--together")
    assert result.code == 0, result.stderr
    assert {name for name, entry in result.entries.items() if "refused" not in entry} == {"packaging", "filelock"}


@pytest.mark.parametrize("name", ["transformers", "trl"])
def test_the_table_has_what_a_package_imports_only_where_its_metadata_are(name):
    hidden = allowed_differences.HIDDEN_IMPORTS["transformers.integrations.integration_utils"]
    package = PackageTable().packages[name]
    assert hidden <= {*package.tries}
