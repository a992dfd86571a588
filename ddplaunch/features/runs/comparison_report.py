"""``ddplaunch report A B …``: a table of what differs between runs, and of how they went."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress

from ddplaunch.base.errors import UsageError, sanitize_line
from ddplaunch.base.text import format_count, join_names
from ddplaunch.cli.lookup.run_index import FoundRun, find_run, index_runs
from ddplaunch.cli.run_options import PARAMS
from ddplaunch.cli.target_command import spellings
from ddplaunch.cli.text_table import fit_to_width, format_table
from ddplaunch.features.runs import rank_logs
from ddplaunch.features.runs.html_report import content_security_policy, write_html
from ddplaunch.features.runs.html_report.comparison_page import render_comparison
from ddplaunch.features.runs.html_report.page_inputs import collect_inputs, with_live_state
from ddplaunch.features.runs.html_report.page_run import PageRun
from ddplaunch.features.runs.printed_step_rate import find_step_rate
from ddplaunch.features.runs.program_usage import with_program_usage
from ddplaunch.features.runs.provenance import Provenance, read_diff, read_provenance
from ddplaunch.features.runs.ps import format_state
from ddplaunch.features.runs.run_comparison import (
    UNKNOWN,
    ComparedRun,
    Row,
    compare_arguments,
    compare_provenance,
    compare_results,
    peak_memory,
    to_json,
)
from ddplaunch.observe.history import history_store, sample_file
from ddplaunch.observe.history.run_record import RunRecord
from ddplaunch.observe.samples.sample import average
from ddplaunch.system.git_environ import git_environ

MAX_RUNS = 12  # each is a column of the table
MIN_CELL, MAX_CELL = 16, 60  # columns of a terminal
TAIL_BYTES = 64 << 10  # the end of rank 0's output, which is searched for its last numbers
GIT_TIMEOUT_S = 5.0


def find_compared_runs(words: Sequence[str]) -> list[ComparedRun]:
    """Find the runs that these words name. Raises UsageError if one is unknown, has no record, or is named twice."""
    runs = [find_run(word) for word in words]
    names = [each.run for each in runs]
    if twice := next((name for name in names if names.count(name) > 1), None):
        typed = [sanitize_line(word, 60) for word, name in zip(words, names, strict=True) if name == twice]
        raise UsageError(
            f"{join_names(typed)} are the same run: {twice}", "name two runs: ddplaunch ps --all lists them"
        )
    if len(names) > MAX_RUNS:
        raise UsageError(f"{len(names)} runs: report compares at most {MAX_RUNS} in a table", "name fewer runs")
    if missing := next((each.run for each in runs if each.record is None), None):
        what = f"{missing} has no record: it is starting, or runs with --no-history"
        raise UsageError(what, "ddplaunch ps shows its state")
    return [read_compared_run(each.run, each.record) for each in runs if each.record]


def read_compared_run(name: str, record: RunRecord) -> ComparedRun:
    """Read what is known of a run."""
    node = record.node_rank
    samples = sample_file.read_samples(os.path.join(history_store.run_dir(name), sample_file.sample_file_name(node)))
    mean = average(samples)
    rate = next((rank.collectives for rank in mean.ranks if rank.collectives is not None), None) if mean else None
    provenance, diff, output = read_provenance(name, node), read_diff(name, node), _read_output_end(name)
    known = provenance, diff, rate, find_step_rate(output), _last_line_with_number(output)
    return ComparedRun(with_program_usage(record), *known)


def _read_output_end(name: str) -> str:
    """Return the end of rank 0's output; "" where its output is not kept."""
    paths = rank_logs.rank_log_files(name).get(0)
    if not paths:
        return ""
    try:
        with open(paths[-1], "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            return file.read(TAIL_BYTES).decode(errors="replace")
    except OSError:
        return ""


def _last_line_with_number(text: str) -> str:
    """Return the last line that has a digit; "" if none has."""
    lines = re.split(r"[\r\n]+", text)
    last = next((line for line in reversed(lines) if re.search("[0-9]", line)), "")
    return sanitize_line(last.strip(), 200)


def differences(runs: Sequence[ComparedRun]) -> list[Row]:
    """Return a row for each difference between runs: arguments, folder, code, versions, machines."""
    flags = {name for name, takes in spellings(PARAMS).items() if not takes}
    provenance = [each.provenance for each in runs]
    rows = [*compare_arguments([each.record.argv[2:] for each in runs], flags)]
    folders = Row("folder", tuple(each.record.cwd for each in runs))
    rows += [folders] if folders.differs else []
    rows += compare_provenance(provenance, [each.diff for each in runs])
    first = provenance[0]
    if first and (stats := [describe_diff(first, each) if each else "" for each in provenance]) and any(stats):
        at = next((place for place, row in enumerate(rows) if row.name == "commit"), -1) + 1
        rows.insert(at, Row("diffstat", tuple(each or UNKNOWN for each in stats)))
    return rows


def describe_diff(before: Provenance, after: Provenance) -> str:
    """Return the size of the changes between the commits of two runs, "3 files, +10 -2"; "" for none or unknown."""
    if not (before.git and after.git and before.git.commit and after.git.commit):
        return ""
    commits = before.git.commit, after.git.commit
    if commits[0] == commits[1] or not all(re.fullmatch("[0-9a-f]{40,64}", each) for each in commits):
        return ""
    words = ["git", "--no-pager", "diff", "--shortstat", "--no-ext-diff", "--no-textconv", *commits, "--"]
    for root in dict.fromkeys((after.git.root, before.git.root)):
        with suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(
                words,
                cwd=root,
                env=git_environ(os.environ),
                capture_output=True,
                text=True,
                timeout=GIT_TIMEOUT_S,
                check=True,
            )
            files, added, removed = (
                int(match[1]) if (match := re.search(rf"(\d+) {what}", done.stdout)) else 0
                for what in ("file", "insertion", "deletion")
            )
            return f"{format_count(files, 'file')}, +{added} -{removed}"
    return ""


def render_tables(runs: Sequence[ComparedRun], across: int | None) -> Iterator[str]:
    """Yield the lines of the two tables, with ANSI styles; ``across``: columns of the terminal."""
    names = [each.record.run for each in runs]
    differs, results = differences(runs), [*compare_results(runs, format_state)]
    width = MAX_CELL
    if across is not None:
        longest = max(len(row.name) for row in (*differs, *results))
        width = max(MIN_CELL, (across - longest) // len(runs) - 2)
    yield from describe_gaps(runs, differs)
    if differs:
        yield from _format_rows("DIFFERS", differs, names, width)
    yield ""
    yield from _format_rows("RESULT", results, names, width)


def describe_gaps(runs: Sequence[ComparedRun], differs: Sequence[object]) -> list[str]:
    """Return sentences on gaps in the table of differences: what is not recorded, or that nothing differs."""
    unknown = [each.record.run for each in runs if each.provenance is None]
    notes = [f"commit and versions of {join_names(unknown)} are not recorded"] if unknown else []
    if not differs:
        notes.append("nothing that is recorded differs: arguments, folder, commit, changes, versions, machine")
    return notes


def _format_rows(head: str, rows: Sequence[Row], names: Sequence[str], width: int) -> Iterator[str]:
    cells = [
        (sanitize_line(row.name, 40), *(fit_to_width(sanitize_line(value, 400), width) for value in row.values))
        for row in rows
    ]
    return format_table((head, *(fit_to_width(name, width) for name in names)), cells)


def comparison_to_json(runs: Sequence[ComparedRun]) -> str:
    """Return the comparison as JSON."""
    names = [each.record.run for each in runs]
    results = {
        each.record.run: {
            "state": each.record.fate.value,
            "code": each.record.code,
            "began": each.record.began,
            "lasted": each.record.spent.wall_s,
            "effective": each.record.spent.goodput,
            "world_size": each.record.world_size,
            "steps_per_second": each.step_rate,
            "collectives_per_second": each.collective_rate,
            "peak_memory": peak_memory(each.record) or None,
            "last_line": each.last_line or None,
        }
        for each in runs
    }
    return json.dumps({"runs": names, "differs": to_json(differences(runs), names), "results": results}, indent=2)


def write_comparison(runs: Sequence[ComparedRun], file: str) -> None:
    """Write the page that compares runs. Raises UsageError if the file cannot be written."""
    pages, jobs = [], index_runs().jobs
    for run in runs:
        name = run.record.run
        found = FoundRun(name, jobs.get(name), run.record)
        shares = history_store.read_node_records(name) or [run.record]  # the stored record may just have been deleted
        inputs = collect_inputs(found, shares)
        pages.append(PageRun.from_records(with_live_state(found, shares, inputs), inputs))
    differs = [(row.name, *row.values) for row in differences(runs)]
    results = [(row.name, *row.values) for row in compare_results(runs, format_state)]
    page = render_comparison(pages, differs, results, describe_gaps(runs, differs), content_security_policy(live=False))
    write_html(page, file)


def format_comparison(words: Sequence[str], *, as_json: bool, html: str | None, across: int | None) -> Iterator[str]:
    """Yield the lines of the comparison of the runs that these words name; none if it is written to ``html``."""
    runs = find_compared_runs(words)
    if html is not None:
        write_comparison(runs, html)
    elif as_json:
        yield comparison_to_json(runs)
    else:
        yield from render_tables(runs, across)
