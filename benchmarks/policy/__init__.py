"""Parts of `./run bench policies`."""
