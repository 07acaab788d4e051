"""The embedded server behind ``local://``, the directory it lives in, and the process that ends it."""
