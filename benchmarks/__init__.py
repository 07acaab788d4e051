"""Figures that Holdfast promises, measured: ``make bench``."""
