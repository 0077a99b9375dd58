"""Private training inside other libraries' loops (floor 4): import `huggingface` or `lightning` from here."""
