"""Zygotes that stay between runs, seen from a launcher: what they must agree in, where they are, asking one."""
