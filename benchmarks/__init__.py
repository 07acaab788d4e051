"""Measures the figures that Holdfast promises: ``make bench``."""
