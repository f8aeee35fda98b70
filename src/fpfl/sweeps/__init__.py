"""Sweeps: many trainings that differ in seeds and settings, computed side by side."""
