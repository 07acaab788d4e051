"""Faults at random on real servers, and judges of what the workers saw. docs/hostile.md says how to run it."""
