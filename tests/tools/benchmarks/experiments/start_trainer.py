"""A program that imports transformers, Hugging Face's Trainer on a tiny BERT: two steps, and its memory at rest."""

from tests.tools.benchmarks import harness as bench

REQUIRES = ("transformers",)


def experiment(size: bench.Size) -> bench.Experiment:
    def measure(launcher: bench.Launcher) -> bench.Values:
        command = launcher(size.many, "hf_trainer.py")
        return {**bench.measure_command(command), **bench.measure_memory(command, size.many)}

    what = f"{size.many} ranks, Hugging Face's Trainer on a tiny BERT, 2 steps"
    return bench.Experiment(
        {
            **bench.compare(measure, bench.DDPLAUNCH, bench.TORCHRUN),
            bench.PLAIN: lambda: bench.measure_command(bench.plain("hf_trainer.py")),
        },
        (
            bench.Row(f"{what}: CPU", "cpu", "CPU-s", bench.TORCHRUN),
            bench.Row(f"{what}: the whole command", "wall", "s", bench.PLAIN),
            bench.Row(f"{size.many} idle ranks of it: PSS of the whole job", "memory", "MB", bench.TORCHRUN),
        ),
        rounds=3,
    )
