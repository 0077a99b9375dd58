"""Private training inside other libraries' loops (floor 4): `huggingface`, `lightning` and `accelerate`."""
