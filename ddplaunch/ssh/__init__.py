"""Reaching many machines over SSH: which hosts, one connection, all of them, and what runs at the far end."""
