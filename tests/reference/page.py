"""Renders docs/reference.md: commands and ``ddplaunch.runtime`` come from the code.

The tables of docs/variables.md and docs/json.md are written by hand; tests check that they are complete.
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
BY_HAND = (PAGE.with_name("variables.md"), PAGE.with_name("json.md"))

HEAD = """# Commands and options

For scripts: [JSON and files](json.md), [variables and exit codes](variables.md).
"""


SCHEDULER_LINKS = {
    "submit": "[Slurm](slurm.md), [Grid Engine, PBS, LSF](schedulers.md), "
    "[Kubernetes](kubernetes.md#submit-and-follow), [this machine](many-runs.md#a-queue-on-one-machine)",
    "manifest": "[Kubernetes](kubernetes.md)",
}


def render_page() -> str:
    """Render the whole page."""
    parts = (HEAD, *_render_commands(), *_render_runtime())
    return "\n".join(part.rstrip("\n") + "\n" for part in parts)


def read_lists(heading: str) -> list[dict[str, str]]:
    """Read the lists and tables below a heading: of each, the text, or the second column, by the names before it."""
    blocks = [block.strip("\n").splitlines() for block in read_section(heading).split("\n\n")]
    lists = [[row.removeprefix("- ").split(": ", 1) for row in block] for block in blocks if block[0].startswith("- ")]
    tables = [[row.split(" | ") for row in block[2:]] for block in blocks if block[0].startswith("| ")]
    return [{name: row[1] for row in each for name in re.findall(r"`([^`]+)`", row[0])} for each in lists + tables]


def read_section(heading: str) -> str:
    """Read the text below a heading, to the next."""
    return re.split("\n#+ ", _read_below(heading))[0]


def _read_below(heading: str) -> str:
    pages = (page.read_text(encoding="utf-8") for page in BY_HAND)
    return next(text.partition(f"\n{heading}\n")[2] for text in pages if f"\n{heading}\n" in text)


def render_list(rows: Iterable[tuple[str, str]]) -> str:
    return "".join(f"- {name}: {text}\n" for name, text in rows)


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
            yield f"{_describe_passed_options(command)}\n"
            before[name] = command
        elif options:
            yield render_list(_render_option(each) for each in options.values())
        for word, below in command.commands.items() if isinstance(command, click.Group) else ():
            yield f"### ddplaunch {name} {word}\n"
            yield inspect.cleandoc(below.help or "").partition("\n")[0] + "\n"
            yield render_list(_render_option(each) for each in _list_options(below).values())
    yield "`--help` shows the same for each command, `ddplaunch --version` the version.\n"


def _list_options(command: click.Command) -> dict[str, click.Option]:
    return {each.opts[-1]: each for each in command.params if isinstance(each, click.Option) and not each.hidden}


def _find_equal(options: Mapping[str, click.Option], others: Mapping[str, click.Option]) -> list[str]:
    """Find the options that another command has with the same text."""
    rows, other_rows = ({key: _render_option(each) for key, each in some.items()} for some in (options, others))
    return [key for key in rows if rows[key] == other_rows.get(key)]


def _describe_passed_options(command: BatchCommand) -> str:
    """Say that the options of run work too; an error says what to use instead of one that is refused."""
    refused = ", ".join(f"`{option}`" for option in command.refused_options)
    return f"All options of `ddplaunch run` work too, except {refused}: the error says what to use instead."


def _render_sections(
    command: str, sections: Mapping[str, Sequence[str]], options: Mapping[str, click.Option]
) -> Iterator[str]:
    for heading, names in sections.items():
        if rows := [_render_option(options[name]) for name in _find_options(names, options)]:
            yield f"### {command}: {heading[0].lower()}{heading[1:]}\n"
            yield render_list(rows)


def _find_options(names: Iterable[str], options: Mapping[str, click.Option]) -> list[str]:
    """Find the options with one of these names, in their order."""
    keys = {word: key for key, option in options.items() for word in (*option.opts, *option.secondary_opts)}
    return [keys[name] for name in names if name in keys]


def _render_option(option: click.Option) -> tuple[str, str]:
    words = ", ".join([*option.opts, *option.secondary_opts])
    help = re.sub(r"\s*\[default: (.*)\]$", r" Default: \1.", option.help or "")
    help = re.sub(r"; may be repeated\.$", ". Repeatable.", help)
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
    *("GIT_DIR", "GIT_TERMINAL_PROMPT", "LC_ALL"),  # set or removed for git
    *("GIT_CONFIG", "GIT_SSH", "GIT_ASKPASS"),  # prefixes of what git reads
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
    found = re.findall(r"^def (([a-z]\w*)\(.*?\) -> .*?):$", source, re.MULTILINE | re.DOTALL)
    purposes = {
        text: inspect.cleandoc(getattr(runtime, name).__doc__ or "").partition("\n\n")[0] for text, name in found
    }
    yield render_list((f"`{text}`", " ".join(purpose.replace("``", "`").split())) for text, purpose in purposes.items())
    yield "`help(runtime.preempted)` and the like show more.\n"


def _render_docstring(text: str) -> str:
    """Render a docstring as Markdown; indented text is code in both."""
    blocks = inspect.cleandoc(text).split("\n\n")
    plain = [block if block.startswith("    ") else block.replace("``", "`") for block in blocks]
    return re.sub(r"docs/(\w+)\.md", r"[\1](\1.md)", "\n\n".join(plain)) + "\n"
