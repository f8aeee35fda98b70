"""``fpfl reproduce tables``: people's tables by public ranges, beside models without privacy."""
