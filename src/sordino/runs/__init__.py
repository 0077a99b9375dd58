"""One folder a run: what was planned, what was done, what came out. Plain JSON and safetensors, no pickle.

| file | holds |
|---|---|
| `run.json` | schema version, when it began, and what the caller said about the run (data, model, recipe) |
| `plan.json` | everything that changes the guarantee |
| `transcript.jsonl` | one line a step, chained by hashes: step, event, ε charged so far; it only grows |
| `checkpoint.safetensors` | where an interrupted run goes on |
| `guarantee.json` | what the finished run guarantees |
| `evaluations.json` | noisy counts on private records, when somebody paid for them |
| `loss_curve.json` | noisy losses, when the plan releases them |
| `metrics.json` | measured values, each marked public or private |
| `model.safetensors` | the trained parameters, written whole or not at all |
| `model.json` | what they are: kind of model, schema, names of features and classes; see `sordino.load_model` |
| `environment.json` | versions and platform; no host name, no user name, no path |
| `manifest.json` | SHA-256 and size of each of these files, and the head of the transcript's chain |

Nothing here depends on a record: no realized batch size, no loss, no norm, except what was
released with noise and paid for. So the folder may be published
with the model, except for metrics marked private.

Example:
    >>> import tempfile, pathlib
    >>> from sordino.events import Gaussian
    >>> with RunFolder.create(pathlib.Path(tempfile.mkdtemp()) / "run", plan="{}") as run:
    ...     run.append(step=0, event=Gaussian(noise_multiplier=2.0), epsilon=1.5)
    >>> run.event()
    Gaussian(noise_multiplier=2.0)
"""

from sordino.runs.folder import MANIFEST_FILES, RunFolder
from sordino.runs.results import Evaluation, Metric, NoisyTable, ReleasedLoss, ReleasedLosses, average_adjacent
from sordino.runs.transcript import RunSegment, TranscriptLine

__all__ = [
    "Evaluation",
    "MANIFEST_FILES",
    "Metric",
    "NoisyTable",
    "ReleasedLoss",
    "ReleasedLosses",
    "RunFolder",
    "RunSegment",
    "TranscriptLine",
    "average_adjacent",
]
