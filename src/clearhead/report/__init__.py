"""Prints explanations, traces and diagnoses in the terminal, in English and Chinese."""
