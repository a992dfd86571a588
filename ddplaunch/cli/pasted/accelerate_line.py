"""``accelerate launch``: options of accelerate 1.15."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddplaunch.base.errors import UsageError
from ddplaunch.cli.pasted.foreign_options import ForeignSyntax, TranslatedLine, split_foreign_options
from ddplaunch.system.plan.numbers import parse_int

# fmt: off
SYNTAX = ForeignSyntax(
    flags=frozenset({
        "--quiet", "--cpu", "--use-cpu", "--multi-gpu", "--use-xpu", "--use-mps-device", "--tpu", "--same-network",
        "--module", "--no-python", "--debug", "--enable-cpu-affinity", "--use-deepspeed", "--use-fsdp",
        "--use-megatron-lm", "--dynamo-use-fullgraph", "--dynamo-use-dynamic",
    }),
    values=frozenset({
        "--config-file", "--mixed-precision", "--num-processes", "--num-machines", "--num-cpu-threads-per-process",
        "--dynamo-backend", "--dynamo-mode", "--gpu-ids", "--machine-rank", "--main-process-ip", "--main-process-port",
        "--tee", "--log-dir", "--role", "--rdzv-backend", "--rdzv-conf", "--max-restarts", "--monitor-interval",
        "--main-training-function", "--deepspeed-config-file", "--zero-stage", "--gradient-accumulation-steps",
        "--gradient-clipping", "--fsdp-version", "--fsdp-sharding-strategy", "--fsdp-offload-params",
        "--fsdp-auto-wrap-policy", "--fsdp-state-dict-type", "--fsdp-min-num-params", "--fsdp-backward-prefetch",
        "--fsdp-transformer-layer-cls-to-wrap", "--fsdp-use-orig-params", "--fsdp-activation-checkpointing",
    }),
    aliases={"-m": "--module", "-q": "--quiet", "--num-nodes": "--num-machines", "--nproc": "--num-processes"},
)

_SAME = ("--machine-rank --node-rank", "--main-process-ip --master-addr", "--main-process-port --master-port",
         "--log-dir --log-dir", "--role --role", "--max-restarts --max-restarts")
_VARIABLES = dict(map(str.split, (
    "--mixed-precision ACCELERATE_MIXED_PRECISION",
    "--num-cpu-threads-per-process OMP_NUM_THREADS",
    "--gradient-accumulation-steps ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "--gradient-clipping ACCELERATE_GRADIENT_CLIPPING",
    "--zero-stage ACCELERATE_DEEPSPEED_ZERO_STAGE",
    "--deepspeed-config-file ACCELERATE_DEEPSPEED_CONFIG_FILE",
    "--fsdp-version FSDP_VERSION",
    "--fsdp-sharding-strategy FSDP_SHARDING_STRATEGY",
    "--fsdp-offload-params FSDP_OFFLOAD_PARAMS",
    "--fsdp-auto-wrap-policy FSDP_AUTO_WRAP_POLICY",
    "--fsdp-state-dict-type FSDP_STATE_DICT_TYPE",
    "--fsdp-min-num-params FSDP_MIN_NUM_PARAMS",
    "--fsdp-backward-prefetch FSDP_BACKWARD_PREFETCH",
    "--fsdp-transformer-layer-cls-to-wrap FSDP_TRANSFORMER_CLS_TO_WRAP",
    "--fsdp-use-orig-params FSDP_USE_ORIG_PARAMS",
    "--fsdp-activation-checkpointing FSDP_ACTIVATION_CHECKPOINTING",
)))
"""Variables that ``accelerate launch`` sets for ``Accelerator`` to read (accelerate/utils/launch.py)."""

_FLAG_VARIABLES = {
    "--use-deepspeed": "ACCELERATE_USE_DEEPSPEED=true", "--use-fsdp": "ACCELERATE_USE_FSDP=true",
    "--debug": "ACCELERATE_DEBUG_MODE=true",
}
# fmt: on


def translate_accelerate(words: Sequence[str], own: Mapping[str, bool]) -> TranslatedLine:
    """Translate the words after ``accelerate launch``. Raises UsageError if the ranks cannot be spread evenly."""
    given = split_foreign_options(words, SYNTAX, own)
    variables = [f"{name}={value}" for option, name in _VARIABLES.items() if (value := given.take(option))]
    variables += [text for option, text in _FLAG_VARIABLES.items() if given.take_flag(option)]
    if backend := given.take("--dynamo-backend"):
        variables.append(f"ACCELERATE_DYNAMO_BACKEND={backend.upper()}")
    machines, processes = given.take("--num-machines") or "1", given.take("--num-processes")
    gpus = given.take("--gpu-ids")
    options = list(given.own)
    if processes:
        options += ["--nproc", _ranks_per_machine(processes, machines)]
    if gpus and gpus != "all":
        options += ["--gpus", gpus]
    elif given.take_flag("--cpu", "--use-cpu"):
        options += ["--gpus", "none"]
        variables.append("ACCELERATE_USE_CPU=true")
    if machines != "1":
        options += ["--nnodes", machines]
    if given.given.get("--main-process-port") == ["0"]:  # any free port: the default of one node
        given.take("--main-process-port")
    for foreign, name in map(str.split, _SAME):
        if (value := given.take(foreign)) and (
            machines != "1" or foreign not in ("--machine-rank", "--main-process-ip")
        ):
            options += [name, value]
    if given.take_flag("--enable-cpu-affinity"):
        options += ["--bind", "numa"]
    if given.take("--rdzv-backend") not in (None, "static", "c10d"):
        raise UsageError("accelerate launch: ddplaunch does not use a rendezvous server", "leave --rdzv_backend out")
    given.take("--multi-gpu", "--same-network", "--use-xpu", "--monitor-interval", "--quiet", "--tee")
    for flag in ("--module", "--no-python"):
        if given.take_flag(flag):
            options.append("-m" if flag == "--module" else flag)
    return TranslatedLine(tuple(options), tuple(given.rest), tuple(variables), given.left_over())


def _ranks_per_machine(processes: str, machines: str) -> str:
    """Divide accelerate's --num_processes, which counts the processes of all machines, by the number of machines."""
    total, count = parse_int(processes), parse_int(machines)
    if not total or not count:
        return processes
    if total % count:
        what = f"--num_processes {total} on --num_machines {count}: accelerate counts the processes of all machines"
        raise UsageError(what, "--nproc is the number on each: one for all, or a list like --nproc 8,7")
    return str(total // count)
