"""Tests of ddplaunch.core.job."""
