"""Cached values: one caller computes a missing value, and all other callers wait for that result.

``lookup`` asks the server, ``computation`` stores what was computed, ``singleflight`` lets one caller ask for all
callers of its process, ``entry`` has the keys and the serialization, ``name_template`` makes names from arguments.
"""
