"""Holdfast: distributed locks for Python."""
