"""Options that scripts written for other engines pass (floor 3): accepted where they change nothing, else refused."""

from sordino import checks
from sordino.errors import InvalidArgument

__all__ = ["accountant_called", "check_options"]

_ACCOUNTANTS = {"auto": "auto", "prv": "auto", "rdp": "rdp"}
_GRAD_SAMPLE_MODES = ("hooks", "functorch", "ew", "ghost")


def accountant_called(name: str) -> str:
    """Our name of the accountant that is called `name` elsewhere."""
    if name == "gdp":
        raise InvalidArgument(
            "accountant must be auto, prv or rdp, got 'gdp': its central limit approximation can understate ε. "
            "Use 'prv'."
        )
    checks.one_of(_ACCOUNTANTS, accountant=name)
    return _ACCOUNTANTS[name]


def check_options(batch_first: bool, noise_generator: None, grad_sample_mode: str, loss_reduction: str) -> None:
    """Refuse what `make_private` can't do; "hooks", "functorch", "ew" and "ghost" are all the same here."""
    checks.one_of((True,), batch_first=batch_first, hint="Move the records to the first dimension.")
    checks.one_of(_GRAD_SAMPLE_MODES, grad_sample_mode=grad_sample_mode)
    checks.one_of(("mean", "sum"), loss_reduction=loss_reduction)
    if noise_generator is not None:
        raise InvalidArgument(
            "noise_generator must be None, got a generator: noise is drawn from a cryptographic generator keyed by run "
            "and step. For a repeatable test run use PrivacyEngine(seed=…, reproducible=True)."
        )
