"""Engines run the steps of protocols: on Redis or Valkey (``redis``), or on an embedded server (``local``)."""
