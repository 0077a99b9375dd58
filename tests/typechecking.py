"""The run-time type checker of the test run: beartype, with Python's numeric tower (an int is a float)."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
