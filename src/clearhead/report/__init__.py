"""The terminal's output: explanations, traces and diagnoses as text, in English and Chinese."""
