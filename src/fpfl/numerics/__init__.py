"""Random streams, exact sums, checks of numbers: leaves, which import nothing of ours."""
