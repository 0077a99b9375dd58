"""A program of its own: many processes charge one account at once. Prints how many charges each was granted.

usage: racing.py URL ACCOUNT PROCESSES
"""

import os
import sys

from sordino.errors import BudgetExceeded
from sordino.events import Gaussian
from sordino.ledger import Ledger


def main():
    url, name, processes = sys.argv[1], sys.argv[2], int(sys.argv[3])
    account = Ledger(url).account(name)
    event = Gaussian(noise_multiplier=30.0)
    account.check_charge(event)  # everything is imported before the processes part
    gate_read, gate_write = os.pipe()
    readers = []
    for _ in range(processes):
        read, write = os.pipe()
        if os.fork() == 0:
            os.close(gate_write)
            os.read(gate_read, 1)  # until the parent opens the gate by closing it
            granted, word = 0, "refused"
            try:
                while True:
                    account.charge(event, run=str(os.getpid()))
                    granted += 1
            except BudgetExceeded:
                pass
            except BaseException as error:
                word = f"{type(error).__name__}:{error}".replace("\n", " ").replace(" ", "_")
            os.write(write, f"{granted} {word}".encode())
            os._exit(0)
        os.close(write)
        readers.append(read)
    os.close(gate_read)
    os.close(gate_write)
    for read in readers:
        sys.stdout.write(os.read(read, 2000).decode() + "\n")
        os.wait()


main()
