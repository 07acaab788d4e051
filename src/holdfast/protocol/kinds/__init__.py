"""Kinds of locks beside the mutex, and what they share: permit pools, several names, hand-over."""
