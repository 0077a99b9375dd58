"""Small operations by either library: the same numbers, whatever the layout."""

import numpy as np
import pytest
import torch

from sordino.gradients import recurrent_cells as module
from sordino.gradients.numerics import tracing_graph
from sordino.gradients.recurrent_cells import NUMPY, TORCH, elementwise


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("cut", [slice(None), slice(1, 4)])
def test_both_libraries_do_the_same_where_the_last_argument_lies(dtype, cut):
    exact = {
        "multiply": (2, lambda out, a, b: a * b),
        "add": (2, lambda out, a, b: a + b),
        "subtract": (2, lambda out, a, b: a - b),
        "tanh": (1, lambda out, a: a.tanh()),
        "less_product": (3, lambda out, a, b, c: a - b * c),
        "plus_product": (3, lambda out, a, b, c: a + b * c),
    }
    close = {"rtol": 0, "atol": 8 * torch.finfo(dtype).eps}
    for name, (count, change) in exact.items():
        arguments = [normal(5, 7, seed=i, dtype=dtype)[:, cut] for i in range(count)]
        start = normal(5, 7, seed=9, dtype=dtype)
        expected = start.clone()
        expected[:, cut] = change(start[:, cut], *arguments)
        for ops in (NUMPY, TORCH):
            result = start.clone()
            getattr(ops, name)(*(ops.of(x) for x in arguments), ops.of(result[:, cut]))
            torch.testing.assert_close(result, expected, **close)
            if name == "plus_product":
                first = arguments[0].clone()
                ops.plus_product(ops.of(first), ops.of(arguments[1]), ops.of(arguments[2]), ops.of(first))
                torch.testing.assert_close(first, expected[:, cut], **close)


def test_tanh_keeps_small_numbers_and_passes_on_what_is_not_finite():
    x = torch.tensor([1e-30, -3e-5, 0.4, 90.0, torch.inf, -torch.inf, torch.nan])
    for ops in (NUMPY, TORCH):
        result = torch.empty_like(x)
        ops.tanh(ops.of(x), ops.of(result))
        torch.testing.assert_close(result, x.double().tanh().float(), rtol=1e-6, atol=0, equal_nan=True)


class Other(torch.Tensor):
    """A subclass, which may have no memory of its own."""


def test_the_library_follows_from_type_and_size(monkeypatch):
    assert elementwise(normal(2), 100) is NUMPY
    assert elementwise(normal(2, dtype=torch.float64), 100) is NUMPY
    assert elementwise(normal(2), 10**7) is TORCH
    assert elementwise(normal(2).bfloat16(), 100) is TORCH
    assert elementwise(normal(2).to("meta"), 100) is TORCH
    assert elementwise(normal(2).as_subclass(Other), 100) is TORCH
    with tracing_graph():
        assert elementwise(normal(2), 100) is TORCH
    monkeypatch.setattr(module, "_MOST", 99)
    assert elementwise(normal(2), 100) is TORCH


def test_an_array_is_the_tensors_own_memory():
    x = torch.zeros(3)
    NUMPY.of(x)[1:] = np.float32(2)
    assert x.tolist() == [0, 2, 2]
