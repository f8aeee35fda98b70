"""Flower's apps: transport, TLS, node identity and scheduling are Flower's, the rest is not."""
