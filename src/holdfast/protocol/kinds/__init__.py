"""Kinds of locks other than the mutex, and what they share: permit pools, several names, hand-over."""
