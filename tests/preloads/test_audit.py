"""What the audit makes of packages that do one thing each, in an interpreter that has these alone."""

import json
import sys
from pathlib import Path

import pytest

from tests.preloads import packages
from tests.preloads.installation import Installation, audit

pytestmark = pytest.mark.timeout(0)

SINGLE = {
    **packages.KEEPS,
    **packages.GENERATORS,
    **{name: text for name, (text, _) in packages.DOES.items()},
    **{name: text for name, (text, _) in packages.BOUND.items()},
    **{name: text for name, (text, _) in packages.MINDS.items()},
    **packages.CLEAN,
}


@pytest.fixture(scope="module")
def installation(tmp_path_factory):
    made = Installation(tmp_path_factory.mktemp("installation"), packages.TORCH)
    for name, files in {**{name: {f"{name}.py": text} for name, text in SINGLE.items()}, **packages.PARTS}.items():
        made.install(name, files)
    made.table.write_text(
        json.dumps({"packages": {"pack": {"modules": {"pack": [], "pack.good": []}}}, "harmless": {}})
    )
    return made


@pytest.fixture(scope="module")
def said(installation):
    return installation.audit(*SINGLE, *packages.PARTS, "--together", "--reasons", "99", env={"FAKE_HOME": "/home"})


@pytest.mark.parametrize("name", packages.KEEPS)
def test_what_differs_in_each_process_is_refused_whatever_holds_it(said, name):
    assert said.entries[name.replace("_", "-")]["refused"] == f"has another {name}.X in each process"


@pytest.mark.parametrize("name", packages.GENERATORS)
def test_what_keeps_a_random_generator_is_refused(said, name):
    reason = said.entries[name.replace("_", "-")]["refused"]
    assert reason.startswith("keeps a random generator (")
    assert reason.endswith(f") in {name}.X")


@pytest.mark.parametrize("name", packages.DOES)
def test_what_does_more_than_make_modules_is_refused(said, installation, name):
    expected = packages.DOES[name][1].replace("{site}", str(installation.site))
    assert f"{name}: {name} {expected}\n".replace("_", "-") in said.why.replace("_", "-")
    assert "refused" in said.entries[name.replace("_", "-")]


@pytest.mark.parametrize("name", packages.BOUND)
def test_what_minds_the_lines_before_it_is_bound_to_come_first(said, name):
    entry = said.entries[name.replace("_", "-")]
    assert entry["order"] == "bound"
    assert entry["bound_by"] == f"{name} {packages.BOUND[name][1]}"


@pytest.mark.parametrize("name", packages.MINDS)
def test_what_minds_lines_that_a_program_cannot_hide_says_which(said, name):
    entry = said.entries[name.replace("_", "-")]
    assert entry["order"] == "free"
    assert entry["minds"] == [packages.MINDS[name][1]]


@pytest.mark.parametrize("name", packages.CLEAN)
def test_what_does_nothing_of_the_kind_is_free(said, name):
    entry = said.entries[name.replace("_", "-")]
    assert entry.get("refused") is None
    assert entry.get("bound_by") is None
    assert entry.get("minds") is None
    assert entry["order"] == "free"
    assert entry["modules"] == {name: []}
    assert entry["versions"] == ["1.0"]


def test_an_entry_names_variables_and_what_else_is_loaded(said):
    assert said.entries["reads-home"]["variables"] == ["FAKE_HOME", "FAKE_MODE"]
    assert said.entries["sets-own"]["sets"] == ["MINE"]
    assert said.entries["of-fork"]["loads"] == ["logger", "plain"]


def test_what_a_fork_repairs_is_known_but_not_what_copies_from_it(said):
    assert said.entries["torchmetrics"]["order"] == "free"
    assert said.entries["torchmetrics-kept"]["refused"] == "has another torchmetrics_kept.R in a fork that is rank 1"


def test_only_the_listed_modules_of_a_distribution_count(said):
    assert said.entries["pack"]["modules"] == {"pack": [], "pack.good": []}
    assert said.entries["importer"]["refused"] == "imports pack.bad, which reads RANK"
    assert said.code == 1


@pytest.fixture
def quiet(tmp_path):
    return Installation(tmp_path, packages.TORCH)


def test_an_entry_is_written_into_the_table_and_keeps_what_was_written_by_hand(quiet):
    quiet.install("ours", {"ours/__init__.py": "", "ours/late.py": "import os\nos.getenv('OURS')"})
    by_hand = {"modules": {"ours": [], "ours.late": ["Late"]}, "companions": ["other"], "versions": ["0.9"]}
    quiet.table.write_text(json.dumps({"packages": {"ours": by_hand}, "harmless": {}}))
    assert quiet.audit("ours", "--write").code == 0
    entry = json.loads(quiet.table.read_text())["packages"]["ours"]
    del entry["on"], entry["with"]
    assert entry == {
        "top": ["ours"],
        "versions": ["0.9", "1.0"],
        "modules": by_hand["modules"],
        "order": "free",
        "variables": ["OURS"],
        "companions": ["other"],
    }


def test_what_other_versions_have_shown_stays_where_that_is_asked_for(quiet):
    quiet.install("ours", {"ours.py": "import os\nos.getenv('OURS')"})
    there = {
        "top": ["ours"],
        "versions": ["0.9", "1.4", "2.1"],
        "modules": {"ours": [], "ours.late": ["Late"]},
        "order": "bound",
        "bound_by": "ours minds the working folder",
        "variables": ["FORMER"],
        "loads": ["other"],
        "on": "2026-01-01",
        "with": "Python 3.10.1, torch 2.4.0",
    }
    quiet.table.write_text(json.dumps({"packages": {"ours": there}, "harmless": {}}))
    assert quiet.audit("ours", "--write", "--join").code == 0
    entry = json.loads(quiet.table.read_text())["packages"]["ours"]
    assert entry.pop("with").startswith("Python 3.10.1, torch 2.4.0; Python 3.")
    assert entry.pop("on") > "2026-01-01"
    assert entry == {
        **{key: there[key] for key in ("top", "modules", "order", "bound_by", "loads")},
        "versions": ["0.9", "1.0", "2.1"],
        "variables": ["FORMER", "OURS"],
    }


def test_another_major_version_that_is_refused_changes_nothing(quiet):
    quiet.install("ours", {"ours.py": "import os\nX = os.getpid()"})
    there = {"top": ["ours"], "versions": ["2.1"], "modules": {"ours": []}, "order": "free"}
    quiet.table.write_text(json.dumps({"packages": {"ours": there}, "harmless": {}}))
    quiet.audit("ours", "--write", "--join")
    assert json.loads(quiet.table.read_text())["packages"]["ours"] == there


def test_an_import_that_ends_the_process_is_refused(quiet):
    quiet.install("ends", {"ends.py": "import os\nos._exit(3)"})
    assert quiet.audit("ends").entries["ends"]["refused"].startswith("does not end: ")


def test_what_changes_others_is_not_harmless(quiet):
    quiet.install("victim", {"victim.py": "flag = [1]"})
    quiet.install("harms", {"harms.py": "import victim\nvictim.flag.append(2)"})
    quiet.install("harms_environment", {"harms_environment.py": "import os\nos.environ['HARMED'] = '1'"})
    quiet.install("harms_python", {"harms_python.py": "import os\nos.cpu_count = lambda: 1"})
    quiet.install("harmless", {"harmless.py": "import atexit, os\nX = os.getpid()\nimport victim"})
    entry = {"top": ["victim"], "versions": ["1.0"], "modules": {"victim": []}, "order": "free"}
    quiet.table.write_text(json.dumps({"packages": {"victim": entry}, "harmless": {}}))
    said = quiet.audit("--harmless", "harms", "harms_environment", "harms_python", "harmless", "--write")
    assert [*said.entries] == ["harmless"]
    assert "harms: changes victim.flag\n" in said.why
    assert "harms-environment: sets $HARMED\n" in said.why
    assert "harms-python: changes os.cpu_count\n" in said.why
    assert [*json.loads(quiet.table.read_text())["harmless"]] == ["harmless"]


def test_the_words_of_a_lazy_package_are_found(quiet):
    quiet.install("lazy", {"lazy/__init__.py": "_class_to_module = {'Net': 'nets.net', 'Other': 'other'}"})
    entry = {"top": ["lazy"], "versions": ["1.0"], "modules": {"lazy": [], "lazy.nets.net": []}}
    quiet.table.write_text(json.dumps({"packages": {"lazy": entry}, "harmless": {}}))
    assert quiet.audit("--words", "lazy").entries == {"lazy": {"lazy.nets.net": ["Net"]}}


@pytest.mark.ci
def test_real_packages_are_free(tmp_path):
    known = tmp_path / "known.json"
    said = audit(Path(sys.executable), "packaging", "filelock", "--together", "--table", str(known), timeout=180)
    assert said.code == 0, said.why
    assert {name: entry["order"] for name, entry in said.entries.items()} == {"packaging": "free", "filelock": "free"}
