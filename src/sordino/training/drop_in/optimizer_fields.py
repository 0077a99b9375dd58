"""What scripts read from an optimizer that was made private (floor 3): the values of the step, and names of Opacus."""

from collections.abc import Callable, Iterator

from torch.optim import Optimizer

from sordino.errors import InvalidArgument, NotOffered
from sordino.training.plan import Plan

__all__ = ["NotThere", "OptimizerFields"]

_ADVICE = {
    "accumulated_iterations": "Leave it out: passes over one batch are added up before clipping",
    "add_noise": "optimizer.step() clips, adds noise and steps",
    "attach_step_hook": "Write optimizer.register_step_post_hook(lambda optimizer, args, kwargs: …)",
    "clip_and_accumulate": "optimizer.step() clips, adds noise and steps",
    "grad_samples": "No per-record gradients are held; after optimizer.step() parameter.grad is the private gradient",
    "pre_step": "optimizer.step() clips, adds noise and steps",
    "scale_grad": "optimizer.step() clips, adds noise and steps",
    "signal_skip_step": "Pass microbatch_size= to make_private: the loader splits each batch",
    "virtual_step": (
        "Pass microbatch_size= to make_private: the loader splits each batch; write optimizer.step() for every part"
    ),
}


class OptimizerFields:
    """``optimizer.noise_multiplier``, ``.max_grad_norm``, ``.expected_batch_size`` of the coming step, to read.

    ``optimizer.original_optimizer`` is the optimizer itself. The values follow the plan. One that was set by hand is
    refused at the next step, because it would change nothing.

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
        self._optimizer.original_optimizer = self._optimizer  # pyright: ignore[reportAttributeAccessIssue]
        for name, advice in _ADVICE.items():
            setattr(self._optimizer, name, NotThere("optimizer", name, advice))
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
        for name in (*self._values, *_ADVICE, "original_optimizer"):
            self._optimizer.__dict__.pop(name, None)


class NotThere:
    """A method or value that is not there, and says what to write when it is used.

    Args:
        owner: "optimizer", "module" or "parameter".
        name: of the method or value.
        advice: what to write.
    """

    def __init__(self, owner: str, name: str, advice: str) -> None:
        self._owner, self._name, self._advice = owner, name, advice

    def __call__(self, *_args: object, **_kwargs: object) -> None:
        """Raise `NotOffered`."""
        raise self._refusal()

    def __getattr__(self, name: str) -> object:
        # What copying and pickling ask for is an ordinary "no".
        raise AttributeError(name) if name.startswith("_") else self._refusal()

    def __iter__(self) -> Iterator[object]:
        raise self._refusal()

    def __getitem__(self, place: object) -> object:
        raise self._refusal()

    def _refusal(self) -> NotOffered:
        return NotOffered(f"{self._owner} must be used as torch's own, got {self._name}. {self._advice}.")
