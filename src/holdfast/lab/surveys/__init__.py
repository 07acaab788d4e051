"""Surveys: searches of many subjects within a budget of time."""
