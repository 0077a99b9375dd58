"""The loss of a custom loop, put to the independence probe: replayed from its trace, or given as a function."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from sordino.errors import CoupledRecords, InvalidArgument, NonPrivateStep, RecordCountMismatch, SordinoError
from sordino.gradients import GradientCapture, OneByOne, Recorder
from sordino.training.loss_tracing.trace import OperationTrace, map_values
from sordino.training.loss_tracing.traced_tensor import TracedTensor
from sordino.training.probing.one_by_one import NOT_CAPTURED, check_records
from sordino.training.probing.padding import Padding, check_padding
from sordino.training.probing.probe_runner import (
    ProbeOptions,
    ProbeTask,
    attempt,
    check_no_max_norm_embeddings,
    preserve_model_state,
)
from sordino.training.probing.snapshots import SeededGenerators, generators_used, preserve_rng_state
from sordino.training.probing.synthetic import INTEGER_PATTERNS, AdversarialValue, SyntheticRecords
from sordino.training.probing.torch_modes import IndexBoundsCheck, PublicDivisor
from sordino.training.pytree import tensors_in, tree_leaves, tree_map

# ----------------------------------------------------------------------------------------------------------------------
# The gradient that arrives at a module's output, compared with that of the declared criterion.
# ----------------------------------------------------------------------------------------------------------------------


Criterion = Callable[[Tensor, Tensor], Tensor]
"""A loss as a function of (output, target)."""

# Rounding between two ways to compute one loss; a coupling or another loss is far above it.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
_TOLERANCE_HALF = 5e-2
# How deep objects (distributions) are searched for tensors.
_DEPTH = 3


class OutputGradientCheck:
    """Compares what arrives at one output.

    Args:
        criterion: the declared loss.
        output: what the module returned.
        target: the batch's last part.
    """

    def __init__(self, criterion: Criterion, output: object, target: Tensor) -> None:
        tensors = [tensor for tensor in tensors_within(output) if tensor.requires_grad]
        used: set[str] = set()
        leaves: list[Tensor] = []

        def leaf_of(tensor: Tensor) -> Tensor:
            if not tensor.requires_grad:
                return tensor
            leaves.append(tensor.detach().clone().requires_grad_())
            return leaves[-1]

        with preserve_rng_state(), generators_used(used), torch.enable_grad(), PublicDivisor():
            loss = criterion(_replaced(leaf_of, output, _DEPTH), target)  # pyright: ignore[reportArgumentType]
            gradients = torch.autograd.grad(loss, leaves, allow_unused=True) if leaves and loss.requires_grad else ()
        self._expected = [
            torch.zeros_like(leaf) if gradient is None else gradient
            for leaf, gradient in zip(leaves, gradients, strict=False)
        ]
        self._gradients: list[Tensor | None] = [None] * len(tensors)
        # A criterion that draws random numbers can't be repeated.
        self._is_comparable = not used and bool(self._expected)
        for index, tensor in enumerate(tensors):
            tensor.register_hook(lambda gradient, index=index: self._add(index, gradient))

    def _add(self, index: int, gradient: Tensor) -> None:
        before = self._gradients[index]
        self._gradients[index] = gradient.detach().clone() if before is None else before + gradient

    def restart(self) -> None:
        """The backward pass runs once more, and brings the same."""
        self._gradients = [None] * len(self._gradients)

    def check(self) -> None:
        """Compare, once the backward passes are over.

        Raises:
            NonPrivateStep: the gradients are not those of the criterion.
        """
        if not self._is_comparable or all(gradient is None for gradient in self._gradients):
            return
        difference = size = 0.0
        for expected, gradient in zip(self._expected, self._gradients, strict=True):
            # Where a record's own gradient is not finite it counts for nothing in any case.
            wanted = expected.double().nan_to_num(0.0, 0.0, 0.0)
            got = torch.zeros_like(wanted) if gradient is None else gradient.double().nan_to_num(0.0, 0.0, 0.0)
            difference += float((wanted - got).square().sum())
            size += float(wanted.square().sum())
        tolerance = max(_TOLERANCE.get(expected.dtype, _TOLERANCE_HALF) for expected in self._expected)
        if not difference**0.5 <= tolerance * size**0.5 + 1e-12:
            raise NonPrivateStep(
                "loss must be the declared criterion of (output, target), got other gradients at the module's output. "
                "Call the very function that was passed as criterion=, add nothing to it, and put no hooks on its "
                "input."
            )


def tensors_within(output: object, depth: int = _DEPTH) -> Iterator[Tensor]:
    """The tensors of what a module returned, also inside objects such as distributions."""
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor):
            yield leaf
        elif depth and hasattr(leaf, "__dict__") and not callable(leaf):
            for value in vars(leaf).values():
                yield from tensors_within(value, depth - 1)


def _replaced(function: Callable[[Tensor], Tensor], output: object, depth: int) -> object:
    def replaced(leaf: object) -> object:
        if isinstance(leaf, Tensor):
            return function(leaf)
        if not depth or not hasattr(leaf, "__dict__") or callable(leaf):
            return leaf
        made = copy.copy(leaf)
        for name, value in vars(leaf).items():
            vars(made)[name] = _replaced(function, value, depth - 1)
        return made

    return tree_map(replaced, output)


# ----------------------------------------------------------------------------------------------------------------------
# The loss of a custom loop, put to the independence probe: replayed from its trace, or given as a function.
# ----------------------------------------------------------------------------------------------------------------------


_ALONE = (
    "Or, if the loss takes every record by itself, train one record at a time, with the loop as it is: "
    'PrivacyEngine(gradients="one-by-one"), in a trainer PrivacyArguments(gradients="one-by-one").'
)
# Repetitions of a check take a small batch at first, a large one later.
_SMALL_AGAIN = 16
# So many records are tried before a module sees the first real ones.
_RECORDS = 4


class LoopProbe:
    """What is checked about a custom training loop on synthetic records.

    Args:
        module: the private module.
        recorder: gives the hooks that record its gradients at the moment.
        structure: a batch with no rows.
        criterion: the declared loss, or None.
        padding: how batches follow their longest record, or None.
        options: how training reads its records, and which are used.
    """

    def __init__(
        self,
        module: nn.Module,
        recorder: Callable[[], Recorder],
        structure: object,
        *,
        criterion: Criterion | None,
        padding: Padding | None,
        options: ProbeOptions,
    ) -> None:
        self._module, self._recorder, self._structure = module, recorder, structure
        self.criterion, self.padding, self._options = criterion, padding, options

    def check_traced_loss(self, trace: OperationTrace, loss: int, times: int) -> None:
        """Probe the loss at index `loss` of the trace, or the losses of its records, with the module in between.

        `times` says how often it has come since it was checked before; 0 for one that was not.
        """
        options = replace(self._options, reduction="none") if trace.is_by_record else self._options

        def run(_batch: object, inputs: Sequence[Tensor], records: int) -> Tensor:
            return trace.replay(loss, inputs, records=records)

        self._check_replayed(trace, run, options, times)

    def check_arguments(self, trace: OperationTrace, arguments: int, times: int) -> None:
        """Probe the declared criterion of what the module gives on the arguments that the loop made of its batch.

        `arguments` is where they are on the trace.
        """

        def run(batch: object, inputs: Sequence[Tensor], records: int) -> Tensor:
            made = trace.replay_all([arguments], inputs, records=records)[arguments]
            args, kwargs = cast("tuple[tuple[object, ...], dict[str, object]]", made)
            own = cast("tuple[Sequence[object], object]", batch)[0]
            return self._criterion_of(self._module(*args, **kwargs), own[-1])

        self._check_replayed(trace, run, self._options, times)

    def check_criterion(self, times: int) -> None:
        """Probe ``criterion(module(*inputs), target)`` for batches (*inputs, target)."""

        def run(batch: object) -> Tensor:
            if not isinstance(batch, tuple | list) or len(batch) < 2:
                raise InvalidArgument(
                    "batch must be (inputs…, target) for criterion= to be called on it, got another structure. Leave "
                    "criterion out; the loss is then followed from the first batch."
                )
            return self._criterion_of(self._module(*batch[:-1]), batch[-1])

        self._check(self._structure, run, self._options, times)

    def _check(self, records: object, run: Callable[[object], Tensor], options: ProbeOptions, times: int) -> None:
        if times:
            options = replace(options, again=True, is_thorough=times > _SMALL_AGAIN)
        task = ProbeTask(model=self._module, recorder=self._recorder(), records=records, run=run, options=options)
        check_records(task)
        check_padding(self.padding, task)

    def _check_replayed(
        self,
        trace: OperationTrace,
        replay: Callable[[object, Sequence[Tensor], int], Tensor],
        options: ProbeOptions,
        times: int,
    ) -> None:
        """Check a loss with tensors from outside: as rows of records if they may be that, then read in other ways."""
        sizes = [tensor.size(0) if tensor.dim() else None for tensor in tensors_in(self._structure)]
        with_rows = sizes.index(0)

        def run(batch: object) -> Tensor:
            inputs = list(tensors_in(batch))
            return replay(batch, inputs, inputs[with_rows].size(0))

        *others, last = trace.outside_readings()
        for reading in (*others, last):
            trace.outside = reading
            try:
                self._check((self._structure, trace.outside_inputs()), run, options, times)
                return
            except SordinoError as refusal:
                # What came from outside the batch with a row a record may be a constant whose size fits by chance.
                failed = refusal.__cause__ is not None
                if failed and reading != last:
                    continue
                if reading == "rows" and trace.has_bound_rows and (failed or isinstance(refusal, RecordCountMismatch)):
                    raise _of_rows() from refusal
                raise

    def _criterion_of(self, output: object, target: object) -> Tensor:
        assert self.criterion is not None
        try:
            return self.criterion(output, target)  # pyright: ignore[reportArgumentType]
        except (TypeError, AttributeError) as failure:
            if isinstance(output, Tensor):
                raise
            raise InvalidArgument(
                f"criterion must be a function of what the module returns, got a failure on {type(output).__name__}. "
                "Let it take its part of that (lambda out, target: loss(out.logits, target)), or leave criterion= out: "
                "the loss of the loop is then followed."
            ) from failure

    def try_forward(self, trace: OperationTrace, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        """Call the module on synthetic records in place of its traced arguments, before it sees the first real ones.

        Whether records are independent is seen later, with the loss; but what a module would store must not be real.

        Raises:
            CoupledRecords: the module changes its parameters or buffers.
            UnsupportedModule: an embedding rewrites the rows that are looked up.
            RecordCountMismatch: some records decide how many are given to the module, or a layer gets other rows.
            UncapturedParameter: a parameter is used where no layer rule captures it.
        """
        check_no_max_norm_embeddings(self._module)
        recorder = self._recorder()
        count = 1 if isinstance(recorder, OneByOne) else min(_RECORDS, self._options.num_records)
        given = [tensor for tensor in tensors_in((args, dict(kwargs))) if isinstance(tensor, TracedTensor)]

        # The numbers of rows that the module was called on.
        sizes: list[list[torch.Size]] = []

        def call(records: SyntheticRecords, value: AdversarialValue | None) -> None:
            SeededGenerators().start()
            inputs = list(tensors_in(records.batch(range(count), {} if value is None else {0: value})))
            values = trace.replay_all([tensor.slot for tensor in given], inputs, records=count)

            def value_of(leaf: object) -> object:
                return values[leaf.slot] if isinstance(leaf, TracedTensor) else leaf

            arguments, named = map_values(value_of, args), map_values(value_of, dict(kwargs))
            sizes.append([made.shape[:1] for tensor in given if isinstance(made := values[tensor.slot], Tensor)])
            with IndexBoundsCheck():
                self._module(*cast("tuple[object, ...]", arguments), **cast("dict[str, object]", named))

        def capture_once(records: SyntheticRecords) -> None:
            try:
                with torch.enable_grad(), recorder.capturing(count):
                    call(records, None)
            except NOT_CAPTURED as refusal:
                raise type(refusal)(f"{refusal.args[0]} {_ALONE}") from refusal
            finally:
                recorder.discard()

        def tried(records: SyntheticRecords, value: AdversarialValue | None) -> None:
            call(records, value)
            # Texts have no synthetic stand-ins: their number is that of the batch.
            if value is None and given and isinstance(recorder, GradientCapture):
                capture_once(records)

        structure, example = (self._structure, trace.outside_inputs()), list(tensors_in(self._options.public_batch))
        with preserve_model_state(self._module):
            for pattern in INTEGER_PATTERNS:
                records = SyntheticRecords(structure, rows=0, count=count, pattern=pattern, example=example)
                for value in (None, AdversarialValue(integers=-1), AdversarialValue(floats=torch.nan)):
                    # What fails on synthetic records is reported with the loss, or doesn't take such values.
                    attempt(lambda records=records, value=value: tried(records, value))
                if any(size != sizes[0] for size in sizes[1:]):
                    raise RecordCountMismatch(
                        "module must be called on all records of the batch, got a part of them that their values "
                        "decide. Give the module the whole batch, and weight the losses of the records that don't "
                        "count with 0."
                    )
                sizes.clear()


def _of_rows() -> CoupledRecords:
    return CoupledRecords(
        "rows of records must be made of the batch, got a tensor from elsewhere with one row per record whose rows "
        "differ (weights, labels, noise, public records): they follow from the position in the batch, or from other "
        "records, so that one record more or less changes what all others do. Put them into the dataset, draw them "
        "with torch's generator in the loop (torch.rand_like(x)), or make all rows the same."
    )
