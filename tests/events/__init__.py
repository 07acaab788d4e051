"""Events, and the logs, metrics and spans that are made from them."""
