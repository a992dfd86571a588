"""Renders docs/reference.md: commands and ``ddplaunch.runtime`` come from the code.

The tables of variables, exit codes and JSON are written by hand, in the page; the tests check that they are complete.
"""

import ast
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import click

import ddplaunch
from ddplaunch import runtime
from ddplaunch.cli.click_commands import cli
from ddplaunch.cli.run_options import SECTIONS
from ddplaunch.features.submit.batch_command import BatchCommand

PACKAGE = Path(ddplaunch.__file__).parent
PAGE = PACKAGE.parent / "docs" / "reference.md"

HEAD = """# Reference

Later versions may add fields to the JSON.
"""


OF_SCHEDULERS = {
    "submit": "[Slurm](slurm.md), [Grid Engine](gridengine.md), [PBS, LSF](pbs-lsf.md)",
    "manifest": "[Kubernetes](kubernetes.md)",
}


def page() -> str:
    """Render the whole page."""
    parts = (
        HEAD, *_commands(), written("## Environment variables", "## ddplaunch.runtime"), *_runtime(),
    )  # fmt: skip
    return "\n".join(part.rstrip("\n") + "\n" for part in parts)


def written(start: str, end: str) -> str:
    """Return the part of the page between two headings, which is written by hand; the tests check its tables."""
    return f"{start}\n{_below(start).partition(f'{chr(10)}{end}{chr(10)}')[0]}"


def tables(heading: str) -> list[dict[str, str]]:
    """Return the tables below a heading: the names in the first column of each, with the second column."""
    blocks = [block.splitlines()[2:] for block in section(heading).split("\n\n") if block.lstrip("\n").startswith("| ")]
    rows = [[row.split(" | ") for row in block] for block in blocks]
    return [{name: row[1] for row in each for name in re.findall(r"`([^`]+)`", row[0])} for each in rows]


def section(heading: str) -> str:
    """Return the text below a heading."""
    return re.split("\n#+ ", _below(heading))[0]


def _below(heading: str) -> str:
    return PAGE.read_text(encoding="utf-8").partition(f"\n{heading}\n")[2]


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    written = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in (heads, *rows)]
    return "\n".join([written[0], "|" + "---|" * len(heads), *written[1:]]) + "\n"


def together(rows: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Make one row of those that follow each other and say the same."""
    found: list[tuple[str, str]] = []
    for name, text in rows:
        if found and text in ("likewise", found[-1][1]):
            found[-1] = (f"{found[-1][0]}, {name}", found[-1][1])
        else:
            found.append((name, text))
    return found


# ---------------------------------------------------------------------------------------------------------- commands


def _commands() -> Iterator[str]:
    context = click.Context(cli)
    found = {name: command for name in cli.list_commands(context) if (command := cli.get_command(context, name))}
    before: dict[str, BatchCommand] = {}
    for name, command in found.items():
        yield f"## ddplaunch {name}\n"
        yield inspect.cleandoc(command.help or "").partition("\n")[0] + "\n"
        options = _options(command)
        if name == "run":
            yield "`ddplaunch run [OPTIONS] TARGET [ARGS]`: [what a target is](targets.md).\n"
            yield from _sections(name, SECTIONS, options)
        elif isinstance(command, BatchCommand):
            yield f"`ddplaunch {name} [OPTIONS] TARGET [ARGS]`: {OF_SCHEDULERS[name]}.\n"
            sections = {heading: command.sections[heading] for heading in command.own_options}
            own = {key: options[key] for names in sections.values() for key in _shown(names, options)}
            as_for = []
            for other in ("run", *before):
                alike = [own.pop(key) for key in _alike(own, _options(found[other]))]
                as_for.append(f"As for `ddplaunch {other}`: {', '.join(_row(each)[0] for each in alike)}.\n")
            yield from _sections(name, sections, own)
            yield from as_for
            yield "The job gets the options of `ddplaunch run`, except these:\n"
            yield _refused(command, before)
            before[name] = command
        elif options:
            yield table(("option", "meaning"), [_row(each) for each in options.values()])
        for word, below in command.commands.items() if isinstance(command, click.Group) else ():
            yield f"### ddplaunch {name} {word}\n"
            yield inspect.cleandoc(below.help or "").partition("\n")[0] + "\n"
            yield table(("option", "meaning"), [_row(each) for each in _options(below).values()])
    yield "`--help` shows the same for each command, `ddplaunch --version` the version.\n"


def _options(command: click.Command) -> dict[str, click.Option]:
    return {each.opts[-1]: each for each in command.params if isinstance(each, click.Option) and not each.hidden}


def _alike(options: Mapping[str, click.Option], others: Mapping[str, click.Option]) -> list[str]:
    """Those of the options that another command has in the same words."""
    return [key for key, each in options.items() if key in others and _row(each) == _row(others[key])]


def _refused(command: BatchCommand, before: Mapping[str, BatchCommand]) -> str:
    hints = list(command.refused_options.values())
    rows: list[tuple[str, str]] = []
    for option, hint in sorted(command.refused_options.items(), key=lambda each: hints.index(each[1])):
        same = next((other for other, its in before.items() if its.refused_options.get(option) == hint), None)
        rows.append((f"`{option}`", f"as for `ddplaunch {same}`" if same else _code(hint)))
    return table(("option", "instead"), together(sorted(rows, key=lambda row: row[1].startswith("as for "))))


def _sections(
    command: str, sections: Mapping[str, Sequence[str]], options: Mapping[str, click.Option]
) -> Iterator[str]:
    for heading, names in sections.items():
        if rows := [_row(options[name]) for name in _shown(names, options)]:
            yield f"### {command}: {heading[0].lower()}{heading[1:]}\n"
            yield table(("option", "meaning"), rows)


def _shown(names: Iterable[str], options: Mapping[str, click.Option]) -> list[str]:
    """Those of the options that have one of these names, in their order."""
    keys = {word: key for key, option in options.items() for word in (*option.opts, *option.secondary_opts)}
    return [keys[name] for name in names if name in keys]


def _row(option: click.Option) -> tuple[str, str]:
    words = ", ".join([*option.opts, *option.secondary_opts])
    help = re.sub(r"\s*\[default: (.*)\]$", r" Default: \1.", option.help or "")
    if option.show_default and not option.is_flag:
        help += f" Default: {option.default}."
    return f"`{words}{_value(option)}`", _code(help)


def _value(option: click.Option) -> str:
    if option.is_flag:
        return ""
    if isinstance(option.type, click.Choice):
        return f" {'|'.join(option.type.choices)}"
    assert option.metavar, f"{option.name} has no metavar"
    return f" {option.metavar}"


VARIABLE = r"[A-Z]+_[A-Z_0-9]+"
WORD = re.compile(
    rf"(?<![\w`-])(--[a-z][\w-]*(?:='[^']*'|=\S*[\w/]| {VARIABLE}=[\w:]+\b)?|{VARIABLE}(?:=[\w:]+\b)?|PYTHONPATH)"
)
"""An option or a variable in running text."""


def _code(text: str) -> str:
    """Set options and variables as code, where they are not yet."""
    parts = re.split(r"(`[^`]*`)", text)
    parts[::2] = [WORD.sub(r"`\1`", part.replace("*", r"\*")) for part in parts[::2]]
    return "".join(parts)


# --------------------------------------------------------------------------------------------------------- variables


NO_VARIABLES = {
    *("DEFAULT_MAP", "F_SETPIPE_SZ", "PCI_BUS_ID", "BOOT_FAIL", "NODE_FAIL", "OUT_OF_MEMORY", "NO_LOG", "HIDES_FRAMES"),
    *(
        "TYPE_CHECKING",
        "CLOCK_BOOTTIME",
        "LOAD_ATTR",  # instructions of Python
        "LOAD_METHOD",
        "SC_CLK_TCK",
        "SC_PAGE_SIZE",
        "SC_OPEN_MAX",
        "USER_SITE",
        "SESSION_ID",
        "TOKENIZERS_PARALLELISM",
        "IPC_LOCK",
        "LSB_DJOB_HOSTFILE",  # the script of a job reads it
    ),
    *("GLOO_", "NCCL_", "TORCH_", "PET_", "SLURM_", "SRUN_", "SSH_", "DDPLAUNCH_"),
    *("SLURM_CONF", "SLURM_JWT", "SLURM_CLUSTERS"),  # of an outer job's, left for sbatch
    *("INVALID_DEPEND", "STAGE_OUT", "ARRAY_TASKS"),  # what sbatch sends mail on
    *("TIME_LIMIT", "TIME_LIMIT_90", "TIME_LIMIT_80", "TIME_LIMIT_50"),
}
"""What looks like one in the source: other names, and beginnings of names."""


NAME = re.compile(r"_?[A-Z][A-Z0-9]*(_[A-Z0-9]*)+")


def all_caps(path: Path) -> list[str]:
    """The strings of a source file that look like a variable's name, sorted."""
    found = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    texts = {each.value for each in found if isinstance(each, ast.Constant) and isinstance(each.value, str)}
    return sorted(text for text in texts if NAME.fullmatch(text))


# ----------------------------------------------------------------------------------------------------------- runtime


def _runtime() -> Iterator[str]:
    yield "## ddplaunch.runtime\n"
    yield _prose(runtime.__doc__ or "")
    source = Path(runtime.__file__).read_text(encoding="utf-8")
    for match in re.finditer(r"^def (([a-z]\w*)\(.*?\) -> .*?):$", source, re.MULTILINE | re.DOTALL):
        yield f"### runtime.{match[2]}\n"
        yield f"`{match[1]}`\n"
        yield _prose(getattr(runtime, match[2]).__doc__ or "")


def _prose(text: str) -> str:
    """A docstring as Markdown; what is indented there is code in both."""
    blocks = inspect.cleandoc(text).split("\n\n")
    plain = [block if block.startswith("    ") else block.replace("``", "`") for block in blocks]
    return re.sub(r"docs/(\w+)\.md", r"[\1](\1.md)", "\n\n".join(plain)) + "\n"
