"""Redis and Valkey: which server ``connect`` means, the protocol and its errors, and an engine for each face."""
