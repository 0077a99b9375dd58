"""What scripts read from an optimizer that was made private (floor 3): the values of the step, and names of Opacus."""

from collections.abc import Callable

from torch.optim import Optimizer

from sordino.errors import InvalidArgument, NotOffered
from sordino.training.plan import Plan

__all__ = ["OptimizerFields"]

_ADVICE = {
    "add_noise": "optimizer.step() clips, adds noise and steps",
    "attach_step_hook": "Write optimizer.register_step_post_hook(lambda optimizer, args, kwargs: …)",
    "clip_and_accumulate": "optimizer.step() clips, adds noise and steps",
    "pre_step": "optimizer.step() clips, adds noise and steps",
    "scale_grad": "optimizer.step() clips, adds noise and steps",
    "signal_skip_step": "Pass microbatch_size= to make_private: the loader splits each batch",
}


class OptimizerFields:
    """``optimizer.noise_multiplier``, ``.max_grad_norm``, ``.expected_batch_size`` of the coming step, to read.

    They follow the plan. A value that was set by hand is refused at the next step, because it would change nothing.

    Make it before any other hook on the optimizer's steps, so that nothing has happened when it refuses.

    Args:
        optimizer: gets the attributes; methods of Opacus's optimizers raise `NotOffered` with what to write instead.
        plan: where the values come from.
        last_step: the number of the last step, −1 before the first.
    """

    def __init__(self, optimizer: Optimizer, plan: Plan, last_step: Callable[[], int]) -> None:
        self._optimizer, self._plan, self._last_step = optimizer, plan, last_step
        self._values: dict[str, object] = {}
        self._handle = optimizer.register_step_pre_hook(lambda *_: self._before_step())

    def show(self) -> None:
        """Set the attributes to the values of the coming step."""
        for name, advice in _ADVICE.items():
            setattr(self._optimizer, name, _Missing(name, advice))
        try:
            step = self._plan.at(self._last_step() + 1)
        except InvalidArgument:
            # A schedule that is written out has ended: the values of its last step stay.
            return
        self._values = {
            "noise_multiplier": step.noise_multiplier,
            "max_grad_norm": step.max_grad_norm,
            "expected_batch_size": step.expected_batch_size,
        }
        for name, value in self._values.items():
            setattr(self._optimizer, name, value)

    def _before_step(self) -> None:
        for name, value in self._values.items():
            if getattr(self._optimizer, name, None) != value:
                setattr(self._optimizer, name, value)
                raise InvalidArgument(
                    f"optimizer.{name} must stay as make_private set it, got another value: every step takes it from "
                    f"the plan. Pass a schedule, make_private({name}=Exponential(…)) of sordino.schedules."
                )
        if self._values:
            self.show()

    def remove(self) -> None:
        """Take the attributes off."""
        self._handle.remove()
        for name in (*self._values, *_ADVICE):
            self._optimizer.__dict__.pop(name, None)


class _Missing:
    """A method that is not there, and says what to write."""

    def __init__(self, name: str, advice: str) -> None:
        self._name, self._advice = name, advice

    def __call__(self, *_args: object, **_kwargs: object) -> None:
        raise NotOffered(f"optimizer must be used as a torch optimizer, got {self._name}. {self._advice}.")
