"""The paper's tables: one declarative file per table, run row by row through ``fpfl.train``."""
