"""Translates torchrun's command line and variables to ddplaunch's options."""
