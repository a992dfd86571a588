"""Translates torchrun's command line and variables to ddplaunch's options.

A row in ``torchrun_options`` is an option of torchrun.
"""
