"""Tests of Lanewise."""
