"""Writes made-up records, people.csv and new.csv, and their schema, people.schema.json, into the working directory.

The schema is what is public about a table: bounds, categories, labels. `sordino train` never computes it from a file.
"""

import csv
import json
from pathlib import Path

import numpy as np

SCHEMA = {
    "target": "income",
    "labels": ["low", "high"],
    "columns": [
        {"name": "age", "type": "numeric", "low": 0, "high": 100},
        {"name": "job", "type": "category", "categories": ["clerk", "nurse"]},
    ],
}

draw = np.random.default_rng()
for name, count in (("people.csv", 2000), ("new.csv", 200)):
    with Path(name).open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["age", "job", "income"])
        for age, job in zip(draw.integers(18, 91, count), draw.choice(["clerk", "nurse"], count), strict=True):
            table.writerow([age, job, "high" if age + 20 * (job == "nurse") > 60 else "low"])
Path("people.schema.json").write_text(json.dumps(SCHEMA, indent=1) + "\n")
print("wrote people.csv, new.csv and people.schema.json")
