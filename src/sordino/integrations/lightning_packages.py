"""Lightning under either of its names, ``lightning.pytorch`` and ``pytorch_lightning`` (floor 4; needs one of them).

The two packages hold the same code twice: a class of one is none of the other's.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    try:
        from lightning.pytorch import Callback, LightningModule, Trainer
    except ImportError:
        from pytorch_lightning import Callback, LightningModule, Trainer

__all__ = ["Callback", "LightningModule", "Trainer", "both", "part_of"]

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def part_of(trainer: object, name: str) -> Any:
    """The class called `name`, such as ``strategies.DDPStrategy``, of the package that `trainer` is of."""
    package = next(
        package for kind in type(trainer).__mro__ for package in _PACKAGES if kind.__module__.startswith(f"{package}.")
    )
    return _found(package, name)


def both(name: str) -> tuple[Any, ...]:
    """The class called `name` of each package that is loaded and has it."""
    classes = [_found(package, name) for package in _PACKAGES if package in sys.modules]
    return tuple(one for one in classes if one is not None)


def _found(package: str, name: str) -> Any:
    module, _, found = name.rpartition(".")
    return getattr(import_module(f"{package}.{module}" if module else package), found, None)
