"""Renders docs/reference.md from the code: commands, variables, exit codes, files, and ``ddplaunch.runtime``."""

import ast
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import click
from msgspec.structs import asdict

import ddplaunch
from ddplaunch import runtime
from ddplaunch.cli.batch_command import BatchCommand
from ddplaunch.cli.click_commands import cli
from ddplaunch.cli.run_options import SECTIONS
from ddplaunch.system.clusters import SYSTEMS
from ddplaunch.system.clusters.systems.host_lists import HOSTFILES
from ddplaunch.system.clusters.systems.node_platforms import NODE_VARIABLE_SYSTEMS
from tests.reference import records, variables

PACKAGE = Path(ddplaunch.__file__).parent
PAGE = PACKAGE.parent / "docs" / "reference.md"

HEAD = """# Reference

Generated from the source code by `python -m tests.reference`. Later versions may add fields to the JSON.
"""


OF_SCHEDULERS = {
    "submit": "[Slurm](slurm.md), [Grid Engine](gridengine.md), [PBS, LSF](pbs-lsf.md)",
    "manifest": "[Kubernetes](kubernetes.md)",
}


def page() -> str:
    """Render the whole page."""
    parts = (HEAD, *_commands(), *_variables(), *_exit_codes(), *_files(), *_runtime())
    return "\n".join(part.rstrip("\n") + "\n" for part in parts)


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


def described(names: Iterable[str], texts: Mapping[str, str]) -> list[tuple[str, str]]:
    return together((f"`{name}`", _code(texts[name])) for name in names)


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


def _variables() -> Iterator[str]:
    yield "## Environment variables\n"
    yield "### ddplaunch's own\n"
    yield _of(variables.OF_DDPLAUNCH)
    yield "### What every rank gets\n"
    yield "In addition to the inherited ones, `DDPLAUNCH_DEVICE` and `DDPLAUNCH_PREEMPTED_FILE`.\n"
    yield _of(variables.OF_RANKS)
    yield "### What ranks get in some jobs\n"
    yield _of(variables.SOMETIMES)
    yield "### What ddplaunch reads\n"
    yield _of(variables.READ)
    yield (
        "torchrun's `PET_*` are read as [its options](torchrun.md). `ddplaunch submit` hides from `sbatch` the "
        "variables that would overrule its script, such as `SBATCH_PARTITION`, and those of an outer job (`SLURM_*`, "
        "`SRUN_*`).\n"
    )
    yield "### What is read of clusters\n"
    yield "[Clusters](clusters.md) says which of these decides.\n"
    yield table(("system", "variables"), [(name, ", ".join(f"`{each}`" for each in of)) for name, of in clusters()])


def _of(texts: Mapping[str, str]) -> str:
    return table(("variable", "meaning"), described(texts, texts))


ROW_NAMES = {"generic_nodes": "nodes", "ddplaunch_submit": "submitted"}
"""Functions that have not the name of their row."""


FILE_NAMES = {"single_node_check": "none of these: refused", "hydra_pmi": "pmi", "openmpi_pmix": "pmix"}
"""Rows of files whose variables belong to no function."""


def clusters() -> Iterator[tuple[str, list[str]]]:
    """Each system with the variables that its function in ``clusters/`` names, or its row; in the end those of none."""
    listed = {
        row.cluster: sorted({each for each in map(str, asdict(row).values()) if NAME.fullmatch(each)})
        for row in NODE_VARIABLE_SYSTEMS
    }
    listed |= {name: sorted(names) for name, names in HOSTFILES.items()}
    for path in sorted((PACKAGE / "system" / "clusters").rglob("*.py")):
        top = _defined(ast.parse(path.read_text(encoding="utf-8")))
        rows = {name: ROW_NAMES.get(name, name) for name in top if name in SYSTEMS or name in ROW_NAMES}
        for name, row in rows.items():
            listed[row] = sorted(_variables_of(top[name], {each: top[each] for each in top.keys() - rows.keys()}))
        names = [name for name in all_caps(path) if name not in variables.NO_VARIABLES]
        if not rows and names:
            listed[FILE_NAMES.get(path.stem, path.stem)] = names
    yield from sorted(listed.items(), key=lambda each: (":" in each[0], each[0]))


def _defined(module: ast.Module) -> dict[str, ast.AST]:
    """What a module defines at its top, by name."""
    found: dict[str, ast.AST] = {each.name: each for each in module.body if isinstance(each, ast.FunctionDef)}
    for each in module.body:
        if isinstance(each, ast.Assign):
            names = [name.id for target in each.targets for name in ast.walk(target) if isinstance(name, ast.Name)]
            values = each.value.elts if len(names) > 1 and isinstance(each.value, ast.Tuple) else [each.value]
            found |= dict(zip(names, values, strict=True))
    return found


def _variables_of(node: ast.AST, top: Mapping[str, ast.AST]) -> set[str]:
    """The variables that a function names, or what it uses of ``top``."""
    found = set()
    for each in ast.walk(node):
        if isinstance(each, ast.Constant) and NAME.fullmatch(str(each.value)):
            found.add(str(each.value))
        elif isinstance(each, ast.Name) and each.id in top and top[each.id] is not node:
            found |= _variables_of(top[each.id], {name: value for name, value in top.items() if name != each.id})
    return found - variables.NO_VARIABLES


NAME = re.compile(r"_?[A-Z][A-Z0-9]*(_[A-Z0-9]*)+")


def all_caps(path: Path) -> list[str]:
    """The strings of a source file that look like a variable's name, sorted."""
    found = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    texts = {each.value for each in found if isinstance(each, ast.Constant) and isinstance(each.value, str)}
    return sorted(text for text in texts if NAME.fullmatch(text))


# -------------------------------------------------------------------------------------------------- codes and files


def _exit_codes() -> Iterator[str]:
    yield "## Exit codes\n"
    yield (
        "The exit code is that of the first rank that [failed](failures.md), or one of the launcher's, with a name in "
        "`ddplaunch.base.errors`. All nodes return the same.\n"
    )
    ours = {number: (name, text) for name, number, text in records.error_codes()}
    rows = []
    for code in sorted({*ours, *records.EXITS}):
        name, text = ours.get(code, ("", ""))
        means, after = records.EXITS.get(code, (text, ""))
        shown = f"{code} + N" if name == "EXIT_SIGNAL" else "1 to 125" if code == 1 else str(code)
        means = ": ".join(filter(None, [(means or text).rstrip("."), after]))
        rows.append((shown, f"{means} (`{name}`)" if name else means))
    yield table(("code", "meaning"), rows)


def _files() -> Iterator[str]:
    yield "## The dry run as JSON\n"
    yield "`ddplaunch run --dry-run --json`, and `plan.json` of the log folder, which has all ranks on node 0 only.\n"
    yield table(("field", "meaning"), described(records.plan_fields(), records.PLAN))
    yield "## The devices as JSON\n"
    yield "`ddplaunch devices --json`. Sizes are in bytes; `null` is unknown.\n"
    yield table(("field", "meaning"), described(records.devices_fields(), records.DEVICES))
    yield "## The runs as JSON\n"
    yield "`ddplaunch ps --json`: a list of these.\n"
    yield table(("field", "meaning"), described(records.runs_fields(), records.RUNS))
    yield "## A run as JSON\n"
    yield "`ddplaunch report --json`, of [a run](runs.md). `null` is unknown, or not yet.\n"
    yield table(("field", "meaning"), described(records.record_fields(), records.RECORD))
    yield "## The stacks as JSON\n"
    yield (
        "`stacks.json` of the [log folder](logs.md#the-log-folder), written before the ranks of an attempt are "
        "stopped.\n"
    )
    yield table(("field", "meaning"), described(records.inspection_fields(), records.INSPECTION))
    yield "`ddplaunch stacks --json` adds these:\n"
    yield table(("field", "meaning"), described(records.stacks_fields(), records.STACKS))
    yield "`ddplaunch top --json`:\n"
    yield table(("field", "meaning"), described(list(records.TOP), records.TOP))
    yield "## events.jsonl\n"
    yield (
        "One object per line, in the [log folder](logs.md#the-log-folder): `time` since the epoch and `elapsed` since "
        "the launcher's start, in seconds, `event`, and its own fields.\n"
    )
    rows = [
        (f"`{name}`", ", ".join(f"`{field}`" for field in own) or "none", records.EVENTS[name])
        for name, own in sorted(records.events().items(), key=lambda each: list(records.EVENTS).index(each[0]))
    ]
    yield table(("event", "fields", "means"), rows)
    yield "## What --log-json writes\n"
    yield ("One object per line, on stderr, for all [messages of ddplaunch itself](logs.md#for-machines).\n")
    yield table(("field", "meaning"), described(records.MESSAGE_FIELDS, records.MESSAGE_FIELDS))
    yield "A kind may have more:\n"
    yield table(("kind", "own fields", "means"), [(f"`{kind}`", *row) for kind, row in records.MESSAGE_KINDS.items()])
    yield "## What --notify sends\n"
    yield "One object on the standard input of [the command](notify.md).\n"
    yield table(("field", "meaning"), described(records.NOTIFY_FIELDS, records.NOTIFY_FIELDS))
    yield "An event may have more:\n"
    yield table(("event", "own fields", "means"), [(f"`{name}`", *row) for name, row in records.NOTIFY_EVENTS.items()])
    verdict, failure = records.failure_fields()
    yield "## failure.json\n"
    yield table(("field", "meaning"), described(verdict, records.VERDICT))
    yield "Of each failure:\n"
    yield table(("field", "meaning"), described(failure, records.FAILURE))


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
