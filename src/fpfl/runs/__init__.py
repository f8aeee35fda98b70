"""Runs on disk: the folder, its ledger and journal, and how a run begins and goes on."""
