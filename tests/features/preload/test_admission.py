"""Tests of which imports of a program may be preloaded, with small tables and packages."""

import json
import os
from pathlib import Path

import pytest

from ddplaunch.features.preload import known_packages, preload_plan, program_source
from ddplaunch.features.preload.import_selector import ImportSelector
from ddplaunch.system.target.target import find_target
from tests.conftest import write_program
from tests.features.preload.table import Installation

NOT_LISTED = "imports stranger, which is not in the table"

UNKNOWN = "not in the table"


class Admitting:
    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.installation = folder / "program", Installation(folder)
        self.folder.mkdir()
        self.add = self.installation.add
        self._monkeypatch = monkeypatch
        monkeypatch.syspath_prepend(str(self.installation.site))
        self.add("free")
        self.add("bound", order="bound")
        self.add("stranger", "import sys\nsys.meta_path.insert(0, None)\n", known=False)
        self.add("quiet", "import json\nX = json.dumps({})\n", known=False)
        self.add("calm", known=False, harmless=True)

    def admit(self, source: str, *variables: str, late: bool = True) -> ImportSelector:
        self._monkeypatch.setattr(known_packages, "TABLE_FILE", str(self.installation.write()))
        write_program(self.folder, "train.py", source)
        target = find_target("train.py", (), as_module=False, as_program=False, cwd=str(self.folder))
        return ImportSelector(
            program_source.read_program(target),
            known_packages.PackageTable(),
            target.sys_path_0 or "",
            variables,
            include_deferred=late,
        )

    def modules(self, source: str) -> list[str]:
        return self.admit(source).modules

    def reasons(self, source: str) -> dict[str, str]:
        return self.admit(source).excluded


@pytest.fixture
def admitting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Admitting:
    return Admitting(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("before", "modules"),
    [
        ("", ["free", "bound"]),
        ('"""Text."""\nimport os, torch\nX = 1\ndef f(): print()\n', ["free", "bound"]),
        ("print()\n", ["free"]),
        ("import torch\ntorch.set_default_dtype(torch.float64)\n", ["free"]),
        ("import calm\n", ["free", "bound"]),
        ("import quiet\n", ["free"]),
        ("import torch, quiet\nquiet.go()\n", []),
        ("import stranger\n", []),
        ("def f(): import stranger\n", ["free", "bound"]),
        ("def f(): import stranger\nf()\n", []),
        ("import sys\nif sys.argv: import stranger\n", []),
        ("try: import not_there_at_all\nexcept ImportError: pass\n", ["free", "bound"]),
        ("exec('x')\n", []),
        ("def f(): exec('x')\n", ["free", "bound"]),
        ("import torch\ntorch.x = 1\n", []),
        ("import torch\ndef f(): torch.x = 1\nprint()\n", []),
        ("import torch\ndef f(): torch.x = 1\n", ["free", "bound"]),
        ("import sys\nsys.path.insert(0, 'nowhere')\n", ["free"]),
        ("import sys\nsys.path.insert(0, sys.argv[0])\n", []),
    ],
)
def test_statements_before_an_import_decide_whether_it_is_preloaded(admitting, before, modules):
    """A free import depends only on what may change others; a bound one on all that has an effect."""
    assert sorted(admitting.modules(before + "import torch, free, bound\n")) == sorted(modules)


def test_the_reason_is_given_for_each_module_left_out(admitting):
    admitting.add("bad", harmless=True, refused="makes a temporary folder at import")
    admitting.add("old", version="1.0", harmless=True)
    admitting.add("next", version="2.0", harmless=True)
    admitting.add("beta", version="1.2rc1", harmless=True)
    admitting.add("alone", harmless=True, companions=["stranger"])
    admitting.add("needs", harmless=True, loads=["stranger"])
    source = "import torch, bad, old, next, beta, alone, needs\nprint()\nimport bound\nimport stranger\nimport free\n"
    assert admitting.reasons(source) == {
        "bad": "makes a temporary folder at import",
        "old": "1.0 has not been audited",
        "next": "2.0 has not been audited",
        "beta": "1.2rc1 has not been audited",
        "alone": "stranger is installed",
        "needs": NOT_LISTED,
        "bound": "comes after train.py:2, which may matter",
        "stranger": UNKNOWN,
        "free": "comes after train.py:4, an import of stranger, where stranger.py:2 uses sys.meta_path",
    }


@pytest.mark.parametrize(
    ("entries", "source", "modules"),
    [
        # what a program assigns to are settings
        ({"torch": {"settings": ["torch.backends"]}},
         "import torch\ntorch.backends.cudnn.benchmark = True\nimport free\n", ["free"]),
        # a known package that cannot be used is unknown: its sources show whether it leaves others as they are
        ({"next": {"version": "2.0"}}, "import next, free\n", ["free"]),
        ({"next": {"source": "exec('')", "version": "2.0"}}, "import next, free\n", []),
        # a variable that is set afterwards came too late for the import
        ({"reads": {"variables": ["MINDED"]}}, "import reads, os\nos.environ['MINDED'] = str(1)\n", ["reads"]),
        # a variable that an import sets, and the program names
        ({"sets": {"sets": ["KMP_X"]}}, "import sets\n", ["sets"]),
        ({"sets": {"sets": ["KMP_X"]}}, "import os\nprint(os.environ.get('KMP_X'))\nimport sets\n", []),
        # a late module of another package is as known as that
        ({"lazy": {"modules": {"lazy": (), "free": ("Trainer",), "gone": ("Trainer",), "next": ("Trainer",)}},
          "next": {"version": "2.0"}}, "import lazy\nlazy.Trainer\n", ["lazy", "free"]),
        # a bound import that stands before that of torch
        ({}, "import bound, free\nimport torch\n", ["bound", "free"]),
    ],
)  # fmt: skip
def test_fields_of_table_entries_decide_what_is_preloaded(admitting, entries, source, modules):
    for name, entry in entries.items():
        admitting.add(name, **entry)
    assert admitting.modules(source) == modules


def test_two_versions_in_one_folder(admitting):
    (admitting.installation.site / "free-1.3.dist-info").mkdir()
    assert admitting.reasons("import free\n") == {"free": "? has not been audited"}


def test_another_folder_has_the_second_module_of_a_package(admitting, tmp_path, monkeypatch):
    """A second module that is not installed may be optional."""
    admitting.add("two", top=["two", "second"])
    assert admitting.modules("import two\n") == ["two"]
    write_program(tmp_path / "other/site-packages", "second.py", "")
    monkeypatch.syspath_prepend(str(tmp_path / "other/site-packages"))
    assert admitting.modules("import two\n") == []


def test_an_editable_install_is_not_preloaded(admitting, tmp_path, monkeypatch):
    (admitting.installation.site / "free.py").unlink()
    write_program(tmp_path / "elsewhere", "free.py", "")
    monkeypatch.syspath_prepend(str(tmp_path / "elsewhere"))
    assert admitting.modules("import free\n") == []


@pytest.mark.parametrize(
    ("line", "there"),
    [
        ("import os\nos.environ['MINDED'] = '1'\n", True),  # early, and so set for the import as well
        ("import os\nos.environ['MINDED'] = str(1)\n", False),
        ("import os, torch\nos.environ['MINDED'] = '1'\n", False),
        ("import os\nos.environ.setdefault('MINDED', str(1))\n", True),  # it is set already
        ("import os\nos.environ['OTHER'] = str(1)\n", True),
        ("import os\ndef f(): os.environ['MINDED'] = str(1)\n", True),
        ("import os\ndef f(): os.environ['MINDED'] = str(1)\nprint()\n", False),
    ],
)
def test_variables_that_an_import_reads(admitting, line, there):
    admitting.add("reads", variables=["MINDED"])
    found = admitting.admit(line + "import reads, free\n", *(["MINDED"] if "setdefault" in line else []))
    assert found.modules == (["reads", "free"] if there else ["free"])


@pytest.mark.parametrize(
    ("line", "before"),
    [
        ("import os\nfor name in 'AB': os.environ[name] = '1'\n", ["free"]),
        ("import calm\ncalm.load_dotenv()\n", ["free"]),
        ("import os\nos.environ['OMP_NUM_THREADS'] = str(1)\n", ["reads", "free"]),
    ],
)
def test_variables_that_are_set_before_torch(admitting, line, before):
    """Each rank imports torch, and all others, after a variable that torch reads is set to an unknown value."""
    admitting.add("reads", variables=["MINDED"])
    found = admitting.admit(line + "import reads, torch, free\n")
    assert found.modules == []
    assert found.torch_barrier
    assert {"torch", "reads", "free"} <= found.excluded.keys()
    found = admitting.admit("import torch\n" + line + "import reads, free\n")
    assert (sorted({*found.modules} - {"calm"}), found.torch_barrier) == (sorted(before), None)


@pytest.mark.parametrize(
    ("before", "there"),
    [
        ("import torch\nprint()\n", True),
        ("import torch\ntorch.set_default_dtype(torch.float64)\n", False),
        ("import torch\ndef f(): torch.set_default_device('cuda')\n", True),
        ("import torch\ndef f(): torch.set_default_device('cuda')\nf()\n", False),
    ],
)
def test_an_import_that_depends_on_torch_settings_comes_before_they_change(admitting, before, there):
    admitting.add("minding", minds=["torch's settings"])
    assert admitting.modules(before + "import minding\n") == (["minding"] if there else [])


def test_a_late_module_of_a_preloaded_package_is_excluded_with_the_reason(admitting):
    admitting.add("minding", minds=["logging"], modules={"minding": (), "minding.more": ()})
    source = "import logging, minding\nprint()\ndef f():\n    from minding.more import it\n"
    assert admitting.modules(source) == ["minding"]
    assert admitting.reasons(source) == {"minding.more": "comes after train.py:2, which may matter"}


LAZY = {"lazy": (), "lazy.trainer": ("Trainer",), "lazy.model": ("Model",), "lazy.inside": ()}


@pytest.mark.parametrize(
    ("source", "modules"),
    [
        ("from lazy import Trainer\n", ["lazy", "lazy.trainer"]),
        ("from lazy.trainer import x\n", ["lazy", "lazy.trainer"]),
        ("from lazy import inside\n", ["lazy", "lazy.inside"]),
        ("import lazy\ndef f(): lazy.Trainer()\n", ["lazy", "lazy.trainer"]),
        ("from lazy import Model\nimport stranger\nModel.Trainer\n", ["lazy", "lazy.model"]),
        ("import lazy\nlazy.x = 1\nlazy.Trainer\n", ["lazy"]),
        ("def main():\n  from lazy import Trainer\n", ["lazy", "lazy.trainer"]),
        ("def main():\n  if x: from lazy import Trainer\n", []),
        ("if x: from lazy import Trainer\n", []),
        ("def main():\n  from lazy import Trainer\nimport stranger\n", []),
        ("def main():\n  import stranger\n  from lazy import Trainer\n", []),
    ],
)
def test_the_words_that_lead_to_a_module(admitting, source, modules):
    admitting.add("lazy", modules=LAZY)
    assert admitting.modules("import torch\n" + source) == modules


def test_a_module_that_this_version_does_not_have_is_left_out(admitting):
    admitting.add("lazy", modules=LAZY)
    (admitting.installation.site / "lazy" / "trainer.py").unlink()
    assert admitting.modules("from lazy import Trainer, Model\n") == ["lazy", "lazy.model"]


def test_imports_in_functions_are_not_preloaded_for_one_rank(admitting):
    admitting.add("lazy", modules=LAZY)
    assert admitting.admit("import lazy\nlazy.Trainer\ndef f(): import free\n", late=False).modules == ["lazy"]


@pytest.mark.parametrize("place", ["{program}", "{folder}/more", "{folder}/on_path"])
@pytest.mark.parametrize("file", ["loaded.py", "loaded/__init__.py", "loaded-1.0.dist-info/METADATA"])
def test_a_package_is_not_preloaded_if_a_folder_of_the_user_hides_it(admitting, tmp_path, monkeypatch, place, file):
    """A folder counts beside the program, on PYTHONPATH, or if the program adds it to ``sys.path``."""
    admitting.add("loaded")
    admitting.add("uses", loads=["loaded"])
    source = f"import sys\nsys.path.insert(0, {str(tmp_path / 'more')!r})\nimport uses, free\n"
    assert admitting.modules(source) == ["uses", "free"]
    folder = Path(place.format(program=admitting.folder, folder=tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "on_path"))
    hidden = write_program(folder, file, "")
    if hidden.parent != folder:
        hidden = hidden.parent
    if file == "loaded.py" or "init" in file:
        monkeypatch.syspath_prepend(str(tmp_path / "on_path"))
    assert admitting.modules(source) == ["free"]
    assert admitting.reasons(source)["uses"] == f"{os.path.relpath(hidden)} comes first"


def test_plugins_next_to_the_program(admitting):
    write_program(admitting.folder, "mine.egg-info/entry_points.txt", "[console_scripts]\nx = y:z\n")
    assert admitting.modules("import free\n") == ["free"]
    write_program(admitting.folder, "mine.egg-info/entry_points.txt", "[free.plugins]\nx = y:z\n")
    assert admitting.modules("import free\n") == []


def test_the_state_that_the_auditor_allows(admitting):
    admitting.add("loaded", sets=["A"], generators=["loaded.g"])
    admitting.add("uses", loads=["loaded"], variables=["B"])
    found = admitting.admit("import uses\n")
    assert found.allowed_state == {
        "top_modules": ["bound", "free", "loaded", "torch", "uses"],
        "changed_variables": ["A"],
        "generators": ["loaded.g"],
    }
    target = find_target("train.py", (), as_module=False, as_program=False, cwd=str(admitting.folder))
    plan = preload_plan.make_preload_plan(target, "auto", {}, ("RANK",), is_single_process=False)
    assert plan.environment_reads == ("B",)


def test_packages_that_torch_loads_are_allowed_though_not_in_the_table(admitting):
    """triton is allowed: a package that imports torch._dynamo loads it, if torch is a build for GPUs."""
    admitting.add("torch", loads=["part-of-torch"])
    assert "part_of_torch" in admitting.admit("import free\n").allowed_state["top_modules"]


def test_optional_imports_of_a_package_count_if_they_are_installed(admitting):
    """An optional import counts only if it is installed; otherwise the zygote would have to start again."""
    admitting.add("asks", tries=["stranger", "absent.part"], seeks=["sought"])
    admitting.add("gentle", tries=["bound.part", "absent"])
    assert admitting.reasons("import gentle\nimport asks\n") == {"asks": NOT_LISTED}
    admitting.add("known_now", refused="prints")
    admitting.add("gentle", tries=["known_now"])
    assert admitting.reasons("import gentle\n") == {"gentle": "imports known_now, which prints"}
    admitting.add("gentle", tries=["free"], seeks=["sought"])
    admitting.add("free", variables=["READ"])
    assert admitting.reasons("import os\nos.environ['READ'] = f()\nimport gentle\n") == {
        "gentle": "train.py:2 sets READ"
    }
    write_program(admitting.folder, "sought.py", "")
    assert admitting.reasons("import gentle\n")["gentle"].endswith("sought.py comes first")


@pytest.mark.parametrize("name", ["accelerate", "transformers"])
def test_packages_that_load_dynamo_read_the_variables_of_its_cache_folder(name):
    """A package counts as reading the variables from which ``torch._dynamo`` makes the name of its cache folder."""
    entry = json.loads(Path(known_packages.TABLE_FILE).read_text())["packages"][name]
    assert {"LOGNAME", "TEMP", "TMP", "TMPDIR", "USER"} <= {*entry["variables"]}
    assert "TORCHINDUCTOR_CACHE_DIR" in entry["sets"]


def test_a_harmless_package_may_set_variables(admitting):
    admitting.add("calm", known=False, harmless=True)
    admitting.installation._harmless["calm"]["sets"] = ["ITS"]
    admitting.add("reader", variables=["ITS"])
    assert admitting.modules("import calm\nimport free\nimport reader\n") == ["free"]


def test_a_folder_that_the_program_makes_is_not_there_yet(admitting):
    admitting.add("reader", variables=["TMPDIR"])
    source = "import os\nos.makedirs({0!r}, exist_ok=True)\nos.environ['TMPDIR'] = {0!r}\nimport reader\n"
    folder = admitting.folder / "scratch"
    assert admitting.modules(source.format(str(folder))) == []
    folder.mkdir()
    assert admitting.modules(source.format(str(folder))) == ["reader"]


@pytest.mark.parametrize(
    ("source", "modules"),
    [
        ("import logging\nlogging.getLogger('reader').setLevel(10)\nimport torch, reader, uses, free\n", ["free"]),
        ("import logging\nlogging.getLogger('reader.part').setLevel(10)\nimport free, uses\n", ["free"]),
        ("import logging\nfor name in 'ab': logging.getLogger(name).setLevel(10)\nimport free\n", []),
        ("import logging, torch\nfor name in 'ab': logging.getLogger(name).setLevel(10)\nimport free\n", []),
        ("import logging, reader\nlogging.getLogger('reader').setLevel(10)\nimport uses\n", ["reader", "uses"]),
        ("import logging, torch\nlogging.getLogger('torch').setLevel(10)\nimport uses, free\n", ["uses", "free"]),
        ("import logging\ndef f(name): logging.getLogger(name)\nf('a')\nimport free\n", ["free"]),
    ],
)
def test_loggers_that_may_be_configured_before_the_import_does(admitting, source, modules):
    admitting.add("reader")
    admitting.add("uses", loads=["reader", "torch"])
    assert admitting.modules(source) == modules


@pytest.mark.parametrize(
    ("line", "modules"),
    [
        ("vars(functools).update(f=1)", []),
        ("warnings.filters.insert(0, None)", []),
        ("x.f = 1", []),
        ("for name in 'AB': os.environ[name] = '1'", []),
        ("def f(name): os.environ[name] = '1'", ["free"]),
        ("os.environ['OTHER'] = '1'", ["free"]),
        ("os.environ['READ'] = '1'", []),
        ("def f(): os.environ['READ'] = '1'", []),
        ("def f(): sys.meta_path.append(f)", []),
        ("def f(): exec(sys.modules['x'])", ["free"]),
    ],
)
def test_an_unknown_package_that_changes_a_module_or_variables(admitting, line, modules):
    admitting.add("reader", variables=["READ"])
    admitting.add("changer", f"import functools, os, sys, warnings\nimport functools as x\n{line}\n", known=False)
    assert admitting.modules("import changer, free\n") == modules
