"""What people see in a terminal: explanations and traces as text, in English and Chinese."""
