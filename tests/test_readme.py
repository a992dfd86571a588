"""Tests that the commands of README*.md, CONTRIBUTING.md and docs/*.md print what the page shows.

Read from each page's fenced blocks:

``console``
    lines that begin with ``$ `` are typed into one bash, in order, in a folder that has the page's programs and
    docs/examples: each when the one before is done, or, where that ends in ``&``, has printed what is shown of it.
    Every other line must be a line of that command's output, in any order (ranks race), where ``…`` stands for
    anything, one number is as good as another, and columns have any width; what ``echo $?`` prints must be exact. A
    line ``^C`` is Ctrl-C, pressed when the lines above it have come. Blocks are run as on a machine without GPUs; with
    ``console gpus=4`` as the info string, with four that the tests' stand-in for NVIDIA's library plays. The making of
    an environment in front of a command is left out, and so is a pytest command: we are in such an environment
    already, run by pytest.
``hosts``
    the same on several machines: ``n0$ …`` and ``n1$ …`` are run at the same time, each on a virtual host of that name;
    the lines behind each are of that host's output.
``sh``
    commands for the reader's own machines. Each ``ddplaunch run`` and ``submit`` in them must be one that can be
    planned, here, with eight GPUs: it is given ``--dry-run``. Other commands are not looked at.
``python``, ``toml``
    where the first line is a comment with a file's name, that file is there for the commands of the page. What a job
    file starts is an empty file for ``sh``, if it is not here.

Blocks that type the same, with the same programs, are run once for all of their pages. Those of the README are run
every day; those of the other pages where this file or all tests are asked for, but for ``sh``, which starts nothing.
"""

from __future__ import annotations

import functools
import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import clean_environment
from tests.fake_nvml import fake_nvml  # noqa: F401, a fixture
from tests.scaled_timeouts import scaled_timeout

ROOT = Path(__file__).parent.parent
PAGES = [*sorted(ROOT.glob("README*.md")), ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:|#|mailto:)(?P<path>[^)#\s]+)[^)]*\)")
FILE_NAME = re.compile(r"# (?P<name>\w+\.(py|toml))\n")
OURS = re.compile(r"([A-Z_]+=\S+ )*ddplaunch (run|submit) ")
PROMPT = re.compile(r"(n(?P<host>\d))?\$ (?P<command>.*)")
SET_UP = re.compile(r"^python3 -m venv \.venv && (\.venv/bin/pip install [^&]+ && )+")
FOR_A_SHELL = re.compile(r"[|&;<>$`()]")
CTRL_C = "^C"
MARK = "@@@ done"
BLOCK_TIMEOUT_S = 120  # a block may start several programs, each of which imports torch

waits_by_itself = pytest.mark.timeout(0)  # each wait of such a test has its end, which a loaded machine puts off


@dataclass(frozen=True)
class Command:
    """A command of a page: its words, its host (if the block has several), and the output that the page shows."""

    host: int
    typed: str
    shown: list[str]


@dataclass(frozen=True)
class Block:
    """One fenced block: its language, the rest of its info string, and where it stands."""

    page: Path
    line: int
    language: str
    info: str
    body: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"

    @property
    def settings(self) -> dict[str, str]:
        """What the info string says: ``gpus=4``."""
        return dict(setting.split("=", 1) for setting in filter(None, self.info.split(",")))

    @property
    def commands(self) -> list[Command]:
        """The commands that are run; of an ``sh`` block those that are ours."""
        lines = self.body.splitlines()
        if self.language == "sh":
            typed = [line.partition("#")[0].strip() for line in lines]
            return [Command(0, each, []) for each in typed if OURS.match(each)]
        found: list[Command] = []
        for line in lines:
            if prompt := PROMPT.match(line):
                typed_here = SET_UP.sub("", prompt["command"]).replace(".venv/bin/", "")
                found.append(Command(int(prompt["host"] or 0), typed_here, []))
            elif line.strip():
                assert found, f"{self} shows output before a command"
                found[-1].shown.append(line)
        return [command for command in found if not command.typed.startswith("pytest")]

    @property
    def does(self) -> object:
        """What is the same in blocks that need only one run."""
        typed = [(command.host, command.typed) for command in self.commands]
        named = {name: text for name, text in programs(self.page).items() if Path(name).stem in str(typed)}
        return self.language, self.info, str(typed), str(named)


@functools.cache
def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = []
    for fence in FENCE.finditer(text):
        language, _, info = fence["info"].partition(" ")
        found.append(Block(page, text.count("\n", 0, fence.start()) + 1, language, info.strip(), fence["body"]))
    return found


@functools.cache
def programs(page: Path) -> dict[str, str]:
    """The programs that a page shows, by their files' names."""
    named = [
        (FILE_NAME.match(block.body), block.body) for block in blocks(page) if block.language in ("python", "toml")
    ]
    return {name["name"]: text for name, text in named if name}


def of_language(language: str) -> list[object]:
    """The blocks of this language on all pages, those that do the same together, as parameters of a test."""
    same: dict[object, list[Block]] = {}
    for page in PAGES:
        for block in blocks(page):
            if block.language == language and block.commands:
                same.setdefault(block.does, []).append(block)
    return [
        pytest.param(
            alike,
            id="+".join(map(str, alike)),
            marks=[] if language == "sh" or alike[0].page.name.startswith("README") else [pytest.mark.ci],
        )
        for alike in same.values()
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that has what a page's commands name, but for the page's own programs."""
    shutil.copytree(ROOT / "docs" / "examples", tmp_path / "docs" / "examples")
    return tmp_path


def write_programs(page: Path, folder: Path) -> None:
    for name, text in programs(page).items():
        (folder / name).write_text(text, encoding="utf-8")


def write_stand_ins(page: Path, folder: Path) -> str:
    """Write empty files for the programs that a page starts beside the ranks, and a target; return their folder."""
    (folder / "bin").mkdir()
    files = [text for name, text in programs(page).items() if name.endswith(".toml")]
    commands = [each for text in files for each in re.findall(r"""^command = ['"]+(\S+)""", text, re.MULTILINE)]
    for command in {"vllm", *commands}:
        if shutil.which(command) is None:
            (folder / "bin" / command).touch(mode=0o755)
    scripts = [each for text in files for each in re.findall(r"""^target = ['"](\w+\.py)""", text, re.MULTILINE)]
    modules = [each for text in files for each in re.findall(r"""^target = ['"]-m (\S+)""", text, re.MULTILINE)]
    for target in {"train.py", *scripts, *(f"{each.replace('.', '/')}.py" for each in modules)}:
        (folder / target).parent.mkdir(parents=True, exist_ok=True)
        (folder / target).touch()
    return str(folder / "bin")


def environment(gpus: int, request: pytest.FixtureRequest) -> dict[str, str]:
    """Variables that put this environment's ddplaunch first and have it find this many GPUs."""
    variables = clean_environment(request.getfixturevalue("fake_nvml").environ(gpus) if gpus else None)
    path = os.pathsep.join([str(Path(sys.executable).parent), variables.get("PATH", os.defpath)])
    return {**variables, "PATH": path, "COLUMNS": "100", "USER": variables.get("USER", "root")}


def pattern(line: str) -> re.Pattern[str]:
    """What a shown line means: numbers are any numbers, ``…`` is anything, columns are of any width."""
    parts = map(re.escape, line.rstrip().split("…"))
    parts = (re.sub(r"\d+\\\.\d+(?=(\\ )?s\b)", r"\\d+(?:\\.\\d+)?", part) for part in parts)  # "2.4s" may be "12s"
    parts = (re.sub(r"\d+", r"\\d+", part) for part in parts)
    parts = (re.sub(r"(\\ ){2,}", r" {2,}", part) for part in parts)
    return re.compile(".*".join(parts))


def not_printed(shown: list[str], printed: str) -> list[str]:
    """Return the shown lines that were not printed; of equal forms, as many must be printed as are shown."""
    lines = [line.rstrip() for line in printed.splitlines()]
    missing: list[str] = []
    needed: Counter[re.Pattern[str]] = Counter()
    for line in shown:
        form = pattern(line)
        needed[form] += 1
        if line != CTRL_C and sum(map(bool, map(form.fullmatch, lines))) < needed[form]:
            missing.append(line)
    return missing


class Shell:
    """A bash that is typed into, its output on both streams kept; a context manager that leaves nothing of it."""

    def __init__(
        self,
        folder: Path,
        variables: dict[str, str],
        start: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen,
    ) -> None:
        self._until = time.monotonic() + scaled_timeout(BLOCK_TIMEOUT_S)
        self._output = b""
        self._end = ExitStack()
        # What is killed leaves files.
        temporary = self._end.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        lines, typing = os.pipe()
        self._keyboard = self._end.enter_context(os.fdopen(typing, "w", encoding="utf-8"))
        try:
            self._bash = start(
                ["bash", f"/dev/fd/{lines}"],  # not -c: what is typed is in no command line, where pgrep looks
                cwd=folder,
                env={**variables, "TMPDIR": temporary},
                pass_fds=[lines],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        finally:
            os.close(lines)
        self._type(f"exec {lines}<&-; trap : INT; status=0")  # Ctrl-C is for the commands, as at a prompt

    def __enter__(self) -> Shell:
        return self

    def __exit__(self, *error: object) -> None:
        with self._end, self._bash:
            try:
                os.killpg(self._bash.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def carry_out(self, command: Command) -> str:
        """Type a command; return what it printed until it was done or, in the background, until the shown was there."""
        shown, self._output = command.shown, b""
        # The status is carried over our own echo, so that `echo $?` means the command before.
        self._type(f"(exit $status); {command.typed}\nstatus=$?; echo; echo '{MARK}'")
        if CTRL_C in shown:
            self._wait(lambda output: not not_printed(shown[: shown.index(CTRL_C)], output), command)
            os.killpg(self._bash.pid, signal.SIGINT)
        output = self._wait(lambda output: f"\n{MARK}\n" in output, command)
        if command.typed.endswith("&"):
            output = self._wait(lambda output: not not_printed(shown, output), command)
        return output.replace(f"\n{MARK}\n", "", 1)

    def leave(self) -> None:
        """Wait until bash has ended, and all that could still print."""
        self._keyboard.close()
        while self._more("the end of all that was started"):
            pass
        self._bash.wait()

    def _type(self, line: str) -> None:
        self._keyboard.write(f"{line}\n")
        self._keyboard.flush()

    def _wait(self, enough: Callable[[str], bool], command: Command) -> str:
        while not enough(output := self._output.decode(errors="replace")):
            if not self._more(f"$ {command.typed}"):
                pytest.fail(f"bash ended in $ {command.typed}\n{output}")
        return output

    def _more(self, what: str) -> bool:
        assert self._bash.stdout is not None
        ready, _, _ = select.select([self._bash.stdout], [], [], max(0.0, self._until - time.monotonic()))
        if not ready:
            pytest.fail(f"waited too long for {what}\n{self._output.decode(errors='replace')}")
        more = os.read(self._bash.stdout.fileno(), 1 << 16)
        self._output += more
        return bool(more)


@pytest.mark.slow
@waits_by_itself
@pytest.mark.parametrize("alike", of_language("console"))
def test_commands_print_what_the_page_shows(alike, folder, request):
    settings = alike[0].settings
    write_programs(alike[0].page, folder)
    runtime = request.getfixturevalue("tmp_path_factory").mktemp("r")  # a short path, as those of sockets are
    variables = {
        **environment(int(settings.get("gpus", 0)), request),
        "XDG_STATE_HOME": str(folder / ".state"),
        "XDG_RUNTIME_DIR": str(runtime),
    }
    with Shell(folder, variables, subprocess.Popen) as shell:
        printed = [shell.carry_out(command) for command in alike[0].commands]
        shell.leave()
    for block in alike:
        for command, output in zip(block.commands, printed, strict=True):
            if command.typed == "echo $?":
                assert output.split() == command.shown, f"{block}: $ {command.typed}"
            missing = not_printed(command.shown, output)
            assert not missing, f"{block}: not printed: {missing[0]}\n$ {command.typed}\n{output}"


@pytest.mark.slow
@waits_by_itself
@pytest.mark.parametrize("alike", of_language("hosts"))
def test_commands_on_several_hosts(alike, folder, network, request):
    for block in alike:
        write_programs(block.page, folder)
        hosts = network(1 + max(command.host for command in block.commands)).hosts
        started = [
            hosts[command.host].start(
                ["bash", "-c", command.typed],
                cwd=folder,
                # All hosts share the CPUs that each believes to have alone.
                env={**environment(0, request), "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for command in block.commands
        ]
        for process, command in zip(started, block.commands, strict=True):
            output, _ = process.communicate(timeout=scaled_timeout(BLOCK_TIMEOUT_S))
            missing = not_printed(command.shown, output)
            assert not missing, f"{block}: not printed: {missing[0]}\nn{command.host}$ {command.typed}\n{output}"


@pytest.mark.parametrize("alike", of_language("sh"))
def test_commands_for_other_machines_can_be_planned(alike, folder, run_in_fork, request):
    write_programs(alike[0].page, folder)
    variables = environment(8, request)
    variables["PATH"] += os.pathsep + write_stand_ins(alike[0].page, folder)
    for command in alike[0].commands:
        # Our options stand together, before the target or right behind it; of several programs the last has it.
        before = r".* :(?= )" if " : " in command.typed else r"\bddplaunch (run( (?!-)\S+)?|submit)"
        typed = re.sub(before, r"\g<0> --dry-run", command.typed, count=1)
        if typed.startswith("ddplaunch ") and not FOR_A_SHELL.search(typed):
            done = run_in_fork(*shlex.split(typed)[1:], cwd=folder, env=variables)
        else:
            done = subprocess.run(
                ["bash", "-c", typed],
                cwd=folder,
                env=variables,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=scaled_timeout(60),
            )
        assert done.returncode == 0, f"$ {typed}\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    paths = [link["path"] for link in LINK.finditer(page.read_text(encoding="utf-8"))]
    assert [path for path in paths if not (page.parent / path).exists()] == []


def test_a_page_has_one_name():
    """Its title, its name in the site's navigation and its name in the README's table of pages are the same."""
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    named = {page: name for name, page in re.findall(r"- ([^:\n]+): ([\w-]+\.md)$", navigation, re.MULTILINE)}
    linked = {
        Path(page).name.lower(): name
        for name, page in re.findall(
            r"\[([^\]]+)\]\(([\w/-]+\.md)\)", (ROOT / "README.md").read_text("utf-8").partition("## Pages")[2]
        )
    }
    site_only = {"index.md", "readme.zh-CN.md"}
    assert named.keys() - site_only == linked.keys()
    titles = {page: (ROOT / "docs" / page) for page in named.keys() - site_only}
    titles |= {f"{name.lower()}.md": ROOT / f"{name}.md" for name in ("CONTRIBUTING", "CHANGELOG")}
    for page, path in sorted(titles.items()):
        assert path.read_text(encoding="utf-8").splitlines()[0] == f"# {named[page]}" == f"# {linked[page]}"


MAX_WORDS = 38_000
"""Words of the README and of docs/*.md. What one page describes is a link on the others.

Without those for who changes or extends ddplaunch: docs/decisions/, docs/plugins.md. 3,700 words are the options,
which are generated.
"""


MAX_WORDS_OF_A_GUIDE = 700
"""Of its prose: without programs, their output, and tables."""


def prose(text: str) -> str:
    return "\n".join(line for line in FENCE.sub("", text).splitlines() if not line.startswith("|"))


def test_the_guides_are_short():
    nav = (ROOT / "mkdocs.yml").read_text("utf-8").partition("  - Guides:")[2].partition("  - Concepts:")[0]
    guides = [ROOT / "docs" / name for name in re.findall(r": ([\w-]+\.md)$", nav, re.MULTILINE)]
    assert len(guides) > 20
    counts = {guide.name: len(prose(guide.read_text(encoding="utf-8")).split()) for guide in guides}
    assert {name: count for name, count in counts.items() if count > MAX_WORDS_OF_A_GUIDE} == {}


def test_the_pages_are_short():
    pages = [ROOT / "README.md", ROOT / "README.zh-CN.md", *(ROOT / "docs").glob("*.md")]
    pages.remove(ROOT / "docs" / "plugins.md")
    counts = {page.name: len(page.read_text(encoding="utf-8").split()) for page in pages}
    longest = ", ".join(f"{name} {count}" for name, count in Counter(counts).most_common(8))
    assert sum(counts.values()) <= MAX_WORDS, longest
