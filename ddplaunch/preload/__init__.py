"""Preloading: which modules the zygote imports once, before it forks the ranks."""
