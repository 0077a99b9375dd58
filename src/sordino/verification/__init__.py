"""Checking a finished run from its folder alone: nothing that it says is taken on trust. No torch.

What can be found: files, lines and numbers that don't fit together, also when one of them was changed. What can't:
a folder that was rebuilt as a whole, by someone who could write to it. Against that, note the head of the chain
somewhere else (`VerificationReport.head`), and give it back as ``head=`` later.

Example:
    >>> import tempfile, pathlib
    >>> from sordino.events import Gaussian
    >>> from sordino.runs import RunFolder
    >>> with RunFolder.create(pathlib.Path(tempfile.mkdtemp()) / "run", plan="{}") as run:
    ...     run.append(step=0, event=Gaussian(noise_multiplier=2.0), epsilon=None)
    >>> found = verify(run.path)
    >>> found.passed, found.item("chain").status
    (True, 'pass')
"""

from sordino.verification.checks import CheckResult, VerificationReport
from sordino.verification.verifier import verify

__all__ = ["CheckResult", "VerificationReport", "verify"]
