"""The gradient of one record at a time, by plain autograd.

A chunk is one record, so the ordinary gradient of its loss *is* the record's gradient: no layer is hooked, no rule is
needed, and nothing has to be known of where a tensor holds the records. A hook on each parameter takes the gradient as
soon as it has arrived, so that no raw one is left in ``.grad``.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]
from torch.utils.hooks import RemovableHandle

from sordino import checks
from sordino.errors import InvalidArgument, PrivacyError, RecordCountMismatch, UncapturedParameter
from sordino.gradients.backward_strategies import GroupwiseInBackward, NormsInBackward, TwoPassBackward
from sordino.gradients.capture import Recorder
from sordino.gradients.module_hooks import (
    PlainPython,
    check_hooks_present,
    check_no_record_mixing,
    check_not_complex,
    may_mix_records,
)
from sordino.gradients.numerics import compute_dtype, row_squared_norms
from sordino.shapes import Float


class _Record:
    """What one record brought: the gradient of every parameter that its loss reached."""

    def __init__(self, records: int, scale: float) -> None:
        self.records, self.scale, self.open = records, scale, True
        self.gradients: dict[nn.Parameter, Tensor] = {}
        self.groups: Sequence[Sequence[nn.Parameter]] | None = None
        self.arriving = 0


class OneByOne(Recorder):
    """Gradients by plain autograd, one record a chunk: for every model that runs on one record.

    Guarantee:
        Norm and sum are read from the same tensors. ``add_weighted_sums`` with a weight for which ``weight · bound ≤
        C``, with the bound of `squared_norm_bounds`, lets the record contribute at most C(1 + 1e-6). Several backward
        passes
        of one record are added up before anything is measured. A backward pass outside of a recording raises, and
        leaves no gradient behind.

    Args:
        model: the model.
        parameters: the parameters to record, by default all of the model's. Frozen ones are recorded from the first
            chunk after they are unfrozen. Parameters of the model that are not listed receive no gradient.
        is_trial: only synthetic records come: what else looks at the parameters' gradients may stay.
        only_backward: refuse a record whose gradient was also handed out by ``torch.autograd.grad``: in a loop of the
            user's own it may not be held elsewhere.

    Attributes:
        allows: whether a backward pass that has reached a parameter is one of the record's loss; None allows every one.

    Raises:
        InvalidArgument: a listed parameter is not the model's, or somebody's hook would see the gradients first.
        UnsupportedModule: a layer stores what it sees of the records, or a parameter is complex.

    Example:
        >>> model = nn.Linear(3, 1)
        >>> single = OneByOne(model)
        >>> with single.capturing(records=1):
        ...     model(torch.ones(1, 3)).sum().backward()
        >>> [round(float(norm), 3) for norm in single.squared_norm_bounds().sqrt()]
        [2.0]
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Iterable[nn.Parameter] | None = None,
        *,
        only_backward: bool = False,
        is_trial: bool = False,
    ) -> None:
        named = {parameter: name for name, parameter in model.named_parameters()}
        wanted = list(named) if parameters is None else list(dict.fromkeys(parameters))
        if any(parameter not in named for parameter in wanted):
            raise InvalidArgument("parameters must be parameters of the model, got one that is not. List them from it.")
        check_hooks_present(model)
        check_not_complex(wanted, named)
        for name, module in model.named_modules():
            # Over one record batch statistics are that record's own, as long as nothing is kept of them.
            alone = isinstance(module, _BatchNorm) and module.running_mean is None
            if may_mix_records(module) and not alone:
                check_no_record_mixing(module, f"{name or 'the model'} ({type(module).__name__})")
        self.model = model
        self.names = {parameter: named[parameter] for parameter in wanted}
        self._only_backward, self._is_trial = only_backward, is_trial
        self.allows: Callable[[], bool] | None = None
        self._record: _Record | None = None
        self._plain_python: PlainPython | None = None
        self._handles: list[RemovableHandle] = []
        self._hooked: dict[nn.Parameter, str] = {}
        self._hook()

    def _hook(self) -> None:
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad and parameter not in self._hooked:
                looked_at = getattr(parameter, "_post_accumulate_grad_hooks", None) or parameter._backward_hooks
                if looked_at and not self._is_trial:
                    raise _sees_gradients(name)
                self._hooked[parameter] = name
                self._handles.append(parameter.register_hook(self._arriving))
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._take))

    def detach(self) -> None:
        """Remove every hook; the model is as before."""
        self.discard()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._hooked.clear()

    # --- recording -----------------------------------------------------------------------------------------------

    def start(
        self,
        records: int,
        *,
        scale: float = 1.0,
        backward_strategy: NormsInBackward | GroupwiseInBackward | TwoPassBackward | None = None,
    ) -> None:
        """Begin a recording of at most one record; see `Recorder`. ``.grad`` of every parameter is emptied."""
        checks.positive(scale=scale)
        if checks.integer(0, records=records) > 1 or backward_strategy is not None:
            raise RecordCountMismatch(
                "chunk must hold one record at a time, read after its backward pass, got another. Split batches with "
                "microbatch_size=1."
            )
        self._hook()
        for parameter, name in self._hooked.items():
            # Those that came later; after ours, hooks on what was accumulated find nothing.
            if len(parameter._backward_hooks or ()) > 1 and not self._is_trial:
                raise _sees_gradients(name)
            parameter.grad = None
        self.stop()
        self._record = _Record(records, scale)
        self._plain_python = PlainPython()

    def stop(self) -> None:
        """End the recording: later backward passes are refused. It can still be read."""
        if self._plain_python is not None:
            self._plain_python.end()
        if self._record is not None:
            self._record.open = False

    def discard(self) -> None:
        """Forget the recording and free what it holds."""
        self.stop()
        self._record = None

    def suspend(self) -> object:
        """Stop recording without ending the recording; give it to `resume`."""
        record, self._record = self._record, None
        return record

    def resume(self, recording: object) -> None:
        """Go on with a recording that was set aside; what was recorded meanwhile is discarded."""
        assert recording is None or isinstance(recording, _Record)
        self._record = recording

    def _arriving(self, _gradient: Tensor) -> None:
        if self._record is None or not self._record.open:
            raise UncapturedParameter(
                "module must be trained on private batches only, got an ordinary backward pass outside of a batch. "
                "Call detach() first, or train on the batches that the private loader gives."
            )
        if self.allows is not None and not self.allows():
            self.discard()
            raise UncapturedParameter(
                "module must be trained by loss.backward() on the loss of the current batch only, got a backward pass "
                "of something else that reached its parameters: torch.autograd.grad on them, a forward in evaluation "
                "mode, a layer called or a parameter used past the module's forward, or a loss made by a custom "
                "autograd function. Make one loss of torch functions from what module(batch) returns; for gradients of "
                "inputs use torch.autograd.grad in evaluation mode."
            )
        self._record.arriving += 1

    def _take(self, parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        record = self._record
        if record is None or gradient is None:
            return
        record.arriving -= 1
        if not isinstance(parameter, nn.Parameter) or parameter not in self.names:
            return
        gradient = gradient.detach()
        gradient = gradient.to_dense() if gradient.is_sparse else gradient
        present = record.gradients.get(parameter)
        if present is not None:
            gradient = present.to(compute_dtype(present)) + gradient
        record.gradients[parameter] = gradient

    # --- reading -------------------------------------------------------------------------------------------------

    def squared_norm_bounds(self, groups: Sequence[Sequence[nn.Parameter]] | None = None) -> Float[Tensor, "..."]:
        """Squared norm of the record's gradient, over all parameters or a row for each group of them.

        The gradient is one tensor that is measured and then summed, so nothing but the rounding of the norm, at most
        1e-6 relative, lies between bound and norm.

        Args:
            groups: parameters whose gradients are bounded apart, each in at most one group; None takes all together.

        Returns:
            One float64 value per record, not finite where the gradient is not. With `groups` one row for each.
        """
        record = self._readable()
        members = list(self.names) if groups is None else [parameter for group in groups for parameter in group]
        if groups is not None and (len(set(members)) != len(members) or not set(self.trainable()) <= set(members)):
            raise InvalidArgument(
                "groups must hold every trained parameter once, got others. Build them from trainable()."
            )
        record.groups = groups
        rows = [self._squares(record, group) for group in ([members] if groups is None else groups)]
        squares = torch.stack(rows) * record.scale**2
        return squares[0] if groups is None else squares

    def _squares(self, record: _Record, group: Sequence[nn.Parameter]) -> Float[Tensor, " B"]:
        found = [record.gradients[parameter] for parameter in group if parameter in record.gradients]
        device = found[0].device if found else next(iter(self.names)).device
        total = torch.zeros(record.records, dtype=torch.float64, device=device)
        if record.records:
            for gradient in found:
                total += row_squared_norms(gradient[None]).to(device)
        return total

    def add_weighted_sums(
        self, weights: Float[Tensor, "..."], into: dict[nn.Parameter, Tensor], *, last: bool = False
    ) -> None:
        """Add ``scale · weight · gradient`` to the entry of every parameter that the record's loss reached.

        Args:
            weights: one factor for the record; a row of them for each group, after `squared_norm_bounds` with groups.
                At 0 nothing is added, even when the gradient is not finite.
            into: sums by parameter, in at least float32; a missing entry is created.
            last: forget the record.
        """
        record = self._readable()
        rows = weights[None] if weights.dim() == 1 else weights
        groups = [list(self.names)] if record.groups is None else record.groups
        if rows.shape != (len(groups), record.records):
            raise RecordCountMismatch("weights must be one number per record of the chunk, got another shape.")
        factors = rows.detach().double().flatten().tolist()
        for group, factor in zip(groups, factors, strict=False):
            # Below the smallest normal number a weight has lost its precision.
            if abs(factor) > torch.finfo(torch.float32).tiny:
                _add(record, group, factor * record.scale, into)
        if last:
            self.discard()

    def per_record_gradients(self) -> Iterator[tuple[dict[nn.Parameter, Float[Tensor, "b *shape"]], float]]:
        """The record's gradient by parameter, with a leading dimension of one, and the factor `scale` it lacks."""
        record = self._readable()
        if record.gradients and record.records:
            yield {parameter: gradient[None] for parameter, gradient in record.gradients.items()}, record.scale

    def _readable(self) -> _Record:
        if self._record is None:
            raise PrivacyError("a recording must exist to be read, got none. Run forward and backward inside one.")
        if self._only_backward and self._record.arriving:
            self.discard()
            raise PrivacyError(
                "gradients must be taken by loss.backward() only, got torch.autograd.grad on parameters: a record's "
                "gradient would be read without clipping and noise. Use gradients of inputs or activations instead."
            )
        return self._record


def _sees_gradients(name: str) -> InvalidArgument:
    return InvalidArgument(
        f'{name} must have no gradient hook of its own with gradients="one-by-one", got one: it would see the gradient '
        "of a single record, without clipping and noise. Remove it."
    )


def _add(record: _Record, group: Sequence[nn.Parameter], factor: float, into: dict[nn.Parameter, Tensor]) -> None:
    with torch.no_grad():
        for parameter in group:
            gradient = record.gradients.get(parameter)
            if gradient is None:
                continue
            present = into.get(parameter)
            if present is None:
                into[parameter] = gradient.to(compute_dtype(gradient)) * factor
            else:
                present.add_(gradient.to(compute_dtype(gradient)), alpha=factor)
