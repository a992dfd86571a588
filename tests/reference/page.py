"""Renders docs/reference.md: commands and ``ddplaunch.runtime`` come from the code.

The tables of variables, exit codes and JSON are written by hand in the page; tests check that they are complete.
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


SCHEDULER_LINKS = {
    "submit": "[Slurm](slurm.md), [Grid Engine](gridengine.md), [PBS, LSF](pbs-lsf.md), "
    "[Kubernetes](kubernetes.md#submit-and-follow)",
    "manifest": "[Kubernetes](kubernetes.md)",
}


def render_page() -> str:
    """Render the whole page."""
    by_hand = _read_part("## Environment variables", "## ddplaunch.runtime")
    parts = (HEAD, *_render_commands(), by_hand, *_render_runtime())
    return "\n".join(part.rstrip("\n") + "\n" for part in parts)


def _read_part(start: str, end: str) -> str:
    """Read the part of the page from one heading to another."""
    return f"{start}\n{_read_below(start).partition(f'{chr(10)}{end}{chr(10)}')[0]}"


def read_tables(heading: str) -> list[dict[str, str]]:
    """Read the tables below a heading: of each, the second column by the names in the first."""
    blocks = [block.lstrip("\n") for block in read_section(heading).split("\n\n")]
    rows = [[row.split(" | ") for row in block.splitlines()[2:]] for block in blocks if block.startswith("| ")]
    return [{name: row[1] for row in each for name in re.findall(r"`([^`]+)`", row[0])} for each in rows]


def read_section(heading: str) -> str:
    """Read the text below a heading, to the next."""
    return re.split("\n#+ ", _read_below(heading))[0]


def _read_below(heading: str) -> str:
    return PAGE.read_text(encoding="utf-8").partition(f"\n{heading}\n")[2]


def render_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in (heads, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(heads), *lines[1:]]) + "\n"


def merge_equal_rows(rows: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Merge consecutive rows with the same text."""
    found: list[tuple[str, str]] = []
    for name, text in rows:
        if found and text in ("likewise", found[-1][1]):
            found[-1] = (f"{found[-1][0]}, {name}", found[-1][1])
        else:
            found.append((name, text))
    return found


# ---------------------------------------------------------------------------------------------------------- commands


def _render_commands() -> Iterator[str]:
    context = click.Context(cli)
    found = {name: command for name in cli.list_commands(context) if (command := cli.get_command(context, name))}
    before: dict[str, BatchCommand] = {}
    for name, command in found.items():
        yield f"## ddplaunch {name}\n"
        yield inspect.cleandoc(command.help or "").partition("\n")[0] + "\n"
        options = _list_options(command)
        if name == "run":
            yield "`ddplaunch run [OPTIONS] TARGET [ARGS]`: [what a target is](targets.md).\n"
            yield from _render_sections(name, SECTIONS, options)
        elif isinstance(command, BatchCommand):
            yield f"`ddplaunch {name} [OPTIONS] TARGET [ARGS]`: {SCHEDULER_LINKS[name]}.\n"
            sections = {heading: command.sections[heading] for heading in command.own_options}
            own = {key: options[key] for names in sections.values() for key in _find_options(names, options)}
            as_for = []
            for other in ("run", *before):
                equal = [own.pop(key) for key in _find_equal(own, _list_options(found[other]))]
                as_for.append(f"As for `ddplaunch {other}`: {', '.join(_render_option(each)[0] for each in equal)}.\n")
            yield from _render_sections(name, sections, own)
            yield from as_for
            yield "The job gets the options of `ddplaunch run`, except these:\n"
            yield _render_refused(command, before)
            before[name] = command
        elif options:
            yield render_table(("option", "meaning"), [_render_option(each) for each in options.values()])
        for word, below in command.commands.items() if isinstance(command, click.Group) else ():
            yield f"### ddplaunch {name} {word}\n"
            yield inspect.cleandoc(below.help or "").partition("\n")[0] + "\n"
            yield render_table(("option", "meaning"), [_render_option(each) for each in _list_options(below).values()])
    yield "`--help` shows the same for each command, `ddplaunch --version` the version.\n"


def _list_options(command: click.Command) -> dict[str, click.Option]:
    return {each.opts[-1]: each for each in command.params if isinstance(each, click.Option) and not each.hidden}


def _find_equal(options: Mapping[str, click.Option], others: Mapping[str, click.Option]) -> list[str]:
    """Find the options that another command has with the same text."""
    rows, other_rows = ({key: _render_option(each) for key, each in some.items()} for some in (options, others))
    return [key for key in rows if rows[key] == other_rows.get(key)]


def _render_refused(command: BatchCommand, before: Mapping[str, BatchCommand]) -> str:
    hints = list(command.refused_options.values())
    rows: list[tuple[str, str]] = []
    for option, hint in sorted(command.refused_options.items(), key=lambda each: hints.index(each[1])):
        same = next((other for other, its in before.items() if its.refused_options.get(option) == hint), None)
        rows.append((f"`{option}`", f"as for `ddplaunch {same}`" if same else _mark_code(hint)))
    rows.sort(key=lambda row: row[1].startswith("as for "))
    return render_table(("option", "instead"), merge_equal_rows(rows))


def _render_sections(
    command: str, sections: Mapping[str, Sequence[str]], options: Mapping[str, click.Option]
) -> Iterator[str]:
    for heading, names in sections.items():
        if rows := [_render_option(options[name]) for name in _find_options(names, options)]:
            yield f"### {command}: {heading[0].lower()}{heading[1:]}\n"
            yield render_table(("option", "meaning"), rows)


def _find_options(names: Iterable[str], options: Mapping[str, click.Option]) -> list[str]:
    """Find the options with one of these names, in their order."""
    keys = {word: key for key, option in options.items() for word in (*option.opts, *option.secondary_opts)}
    return [keys[name] for name in names if name in keys]


def _render_option(option: click.Option) -> tuple[str, str]:
    words = ", ".join([*option.opts, *option.secondary_opts])
    help = re.sub(r"\s*\[default: (.*)\]$", r" Default: \1.", option.help or "")
    if option.show_default and not option.is_flag:
        help += f" Default: {option.default}."
    return f"`{words}{_format_value(option)}`", _mark_code(help)


def _format_value(option: click.Option) -> str:
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


def _mark_code(text: str) -> str:
    """Put options and variables between backquotes, unless they are."""
    parts = re.split(r"(`[^`]*`)", text)
    parts[::2] = [WORD.sub(r"`\1`", part.replace("*", r"\*")) for part in parts[::2]]
    return "".join(parts)


# --------------------------------------------------------------------------------------------------------- variables


NO_VARIABLES = {
    *("DEFAULT_MAP", "F_SETPIPE_SZ", "PCI_BUS_ID", "BOOT_FAIL", "NODE_FAIL", "OUT_OF_MEMORY", "NO_LOG", "HIDES_FRAMES"),
    *("TYPE_CHECKING", "CLOCK_BOOTTIME", "SC_CLK_TCK", "SC_PAGE_SIZE", "SC_OPEN_MAX", "USER_SITE", "SESSION_ID"),
    *("TOKENIZERS_PARALLELISM", "IPC_LOCK"),
    "LSB_DJOB_HOSTFILE",  # read by the script of a job
    *("GLOO_", "NCCL_", "TORCH_", "TORCHELASTIC_", "PET_", "SLURM_", "SRUN_", "SSH_", "DDPLAUNCH_"),
    *("GIT_", "FI_", "TP_", "UCX_", "TERM_", "COLAB_", "FSSPEC_", "NETWORKX_"),
    *(
        "KMP_DUPLICATE_LIB_OK",
        "KMP_INIT_AT_FORK",
        "OPENBLAS_MAIN_FREE",
        "AZURE_LOG_LEVEL",
        "TOKENIZERS_LOG",
        "NO_COLOR",
    ),
    *("HF_XET", "I_MPI", "INTEL_LIB", "JE_ARROW", "LRU_CACHE", "COMPILE_STROBELIGHT"),  # read by libraries
    *("SLURM_CONF", "SLURM_JWT", "SLURM_CLUSTERS"),  # of an outer job, left for sbatch
    *("INVALID_DEPEND", "STAGE_OUT", "ARRAY_TASKS"),  # events of sbatch's mail
    *("TIME_LIMIT", "TIME_LIMIT_90", "TIME_LIMIT_80", "TIME_LIMIT_50"),
}
"""Strings in the source that are no variables: other names, and prefixes of names."""

NAME = re.compile(r"_?[A-Z][A-Z0-9]*(_[A-Z0-9]*)+")


def list_upper_case_strings(path: Path) -> list[str]:
    """List the strings of a source file that look like a variable's name, sorted."""
    found = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    texts = {each.value for each in found if isinstance(each, ast.Constant) and isinstance(each.value, str)}
    return sorted(text for text in texts if NAME.fullmatch(text))


# ----------------------------------------------------------------------------------------------------------- runtime


def _render_runtime() -> Iterator[str]:
    yield "## ddplaunch.runtime\n"
    yield _render_docstring(runtime.__doc__ or "")
    source = Path(runtime.__file__).read_text(encoding="utf-8")
    for match in re.finditer(r"^def (([a-z]\w*)\(.*?\) -> .*?):$", source, re.MULTILINE | re.DOTALL):
        yield f"### runtime.{match[2]}\n"
        yield f"`{match[1]}`\n"
        yield _render_docstring(getattr(runtime, match[2]).__doc__ or "")


def _render_docstring(text: str) -> str:
    """Render a docstring as Markdown; indented text is code in both."""
    blocks = inspect.cleandoc(text).split("\n\n")
    plain = [block if block.startswith("    ") else block.replace("``", "`") for block in blocks]
    return re.sub(r"docs/(\w+)\.md", r"[\1](\1.md)", "\n\n".join(plain)) + "\n"
