"""Callbacks: whoever watches a training. `fpfl.server.events` says when they are called."""
