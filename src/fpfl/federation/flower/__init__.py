"""Flower's apps: transport, TLS, node identity and scheduling are Flower's, the rest is not."""

RECORD, TOKEN = "fpfl", "token"
"""The record of a message, and of a node's state; and what a reply is told apart by."""

COMMON = "fpfl-common"
"""The record of a request with what all nodes are sent alike: the model, above all."""
