"""``ddplaunch submit``: batch scripts for Slurm, Grid Engine, PBS and LSF, and submitting them."""
