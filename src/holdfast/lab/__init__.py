"""A simulated world in which the protocols of Holdfast run, and can be broken."""
