"""Code that is loaded in the ranks and in the zygote: standard library only, so that user code meets nothing else."""
