"""Runs: their history, and the commands that list, follow, stop and report them."""

from __future__ import annotations

from ddplaunch.core.feature import Command, Feature, FeatureContext, NodeSide
from ddplaunch.features.runs.options import History


class Runs(Feature):
    options = (History,)
    requests = ("output_request", "time_tracker")
    commands = (
        Command(
            "stop", "Stop a run in progress.", module="stop", heading="Run", also=("kill", "cancel", "end", "terminate")
        ),
        Command("wait", "Wait for a run to end and return its exit code.", module="stop", heading="Run"),
        Command(
            "ps",
            "List your runs: in progress here, submitted and recently ended.",
            module="ps",
            heading="Watch",
            place=1,
            also=("status", "list", "ls", "jobs", "queue"),
        ),
        Command("logs", "Show the output of a run.", module="logs", heading="Watch", also=("log", "tail", "output")),
        Command(
            "report", "Summarize a run, or compare several: result, goodput, memory.", module="report", heading="Watch"
        ),
        Command(
            "rerun",
            "Run the command of an earlier run again.",
            module="rerun",
            heading="Run",
            also=("repeat", "again", "retry", "restart", "resubmit"),
        ),
        Command("attach", "Follow the log of a submitted job.", module="attach", heading="Clusters"),
        Command(
            "clean",
            "Delete the records of finished runs.",
            module="clean",
            heading="Housekeeping",
            place=6,
            also=("rm", "remove", "delete", "prune", "purge"),
        ),
    )

    def make_node_side(self, context: FeatureContext) -> NodeSide:
        from ddplaunch.features.runs import history_recorder, provenance_process, time_tracker
        from ddplaunch.observe.history import sample_file
        from ddplaunch.observe.samples.node import SampleCollector

        if context.options[History].no_history:
            return time_tracker.TimeTracker(context.plan.nnodes)
        streams, log = context.node.streams, context.log
        history = history_recorder.HistoryRecorder(
            context.plan,
            streams.tail,
            lambda: log.path,
            context.screen.show_note,
            streams.times,
            lambda: context.job.control_socket_path,
            provenance_process.ProvenanceProcess(context.tree.environ, context.loop),
        )
        if samples := context.find(SampleCollector):
            samples.subscribe(context.loop.guard(sample_file.SampleFile(lambda: history.folder).on_sample))
        return history


FEATURE = Runs()
