"""Virtual time, machines that run the protocols, and messages between them and a modelled server."""
