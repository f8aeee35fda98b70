"""For people to look at: tables and pictures."""
