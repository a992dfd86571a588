"""Tests of ddplaunch.control."""
