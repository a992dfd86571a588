"""The domain of this machine: machines of one domain share fast links. Nodes are ordered by domain. No I/O."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ddplaunch.system.plan.rendezvous import SourcedValue


def find_domain(given: str | None, fabrics: Collection[str | None], environ: Mapping[str, str]) -> SourcedValue | None:
    """Return the domain of this machine: ``--domain``, else its NVLink domain, else Slurm's switch; None without any.

    ``fabrics``: the NVLink domain of each GPU that the job may use. With GPUs of different domains there is none.
    """
    if given:
        return SourcedValue(given, "--domain")
    distinct = {*fabrics}
    if len(distinct) == 1 and (fabric := distinct.pop()):
        return SourcedValue(fabric, "NVLink")
    switch = read_switch(environ)
    return SourcedValue(switch, "SLURM_TOPOLOGY_ADDR") if switch else None


def read_switch(environ: Mapping[str, str]) -> str:
    """Return the network switch of this node from SLURM_TOPOLOGY_ADDR: "s0.s2" of "s0.s2.n7"; "" if unknown."""
    path, dot, _ = environ.get("SLURM_TOPOLOGY_ADDR", "").rpartition(".")
    is_switch = environ.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").startswith("switch")
    return path if dot and is_switch else ""
