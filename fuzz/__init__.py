"""Coverage-guided fuzzing of everything that reads a file or a vector; see ``python -m fuzz``."""
