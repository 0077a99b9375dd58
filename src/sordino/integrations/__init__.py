"""Private training inside other libraries' loops: `huggingface`, `lightning` and `accelerate`."""
