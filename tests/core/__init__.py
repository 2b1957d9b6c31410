"""Tests of the functional core, written from its contract."""
