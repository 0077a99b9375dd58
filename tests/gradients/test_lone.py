"""One row where every record should have its own: constants are expanded, a record that is left over is refused."""

import pytest
import torch
from torch import Tensor, nn

from agreement import check
from sordino.errors import RecordCountMismatch
from sordino.gradients import GradientCapture


class Masked(nn.Module):
    """A layer behind another, that sees only the rows whose first feature is positive."""

    def __init__(self, behind: nn.Module) -> None:
        super().__init__()
        self.first, self.behind = nn.Linear(4, 4), behind

    def forward(self, x: Tensor) -> Tensor:
        rows = self.first(x)[x[:, 0, 0] > 0]
        out = self.behind(*[rows] * 3) if isinstance(self.behind, nn.MultiheadAttention) else self.behind(rows)
        return out if isinstance(out, Tensor) else out[0]


def batch() -> Tensor:
    x = -torch.rand(3, 5, 4) - 0.1
    x[1] *= -1
    return x


@pytest.mark.parametrize("model", [nn.Linear(4, 2), nn.LayerNorm(4), nn.Sequential(nn.ReLU(), nn.Linear(4, 2))])
def test_a_model_that_is_called_with_the_one_record_that_is_left_refuses(model):
    capture = GradientCapture(model)
    x = batch()
    with pytest.raises(RecordCountMismatch, match="all records"), capture.capturing(records=3):
        model(x[x[:, 0, 0] > 0])


@pytest.mark.parametrize(
    "behind",
    [
        nn.Linear(4, 2),
        nn.LayerNorm(4),
        nn.MultiheadAttention(4, 2, batch_first=True),
        nn.ConvTranspose1d(5, 2, 1),
    ],
)
def test_a_layer_that_sees_the_one_record_that_is_left_refuses(behind):
    model = Masked(behind)
    capture = GradientCapture(model)
    with pytest.raises(RecordCountMismatch, match="behind"), capture.capturing(records=3):
        model(batch())


def test_a_batch_of_one_record_is_no_lone_row():
    model = Masked(nn.Linear(4, 2))
    check(model, lambda m, x: m(x).square().flatten(1).sum(1), batch()[1:2])


def test_position_ids_beside_the_records_are_expanded():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.positions = nn.Embedding(7, 4), nn.Embedding(5, 4)

        def forward(self, ids: Tensor, position_ids: Tensor) -> Tensor:
            return torch.tanh(self.table(ids) + self.positions(position_ids))

    places = torch.arange(5)[None]
    check(Model(), lambda m, ids: m(ids, places).square().sum((1, 2)), torch.randint(0, 7, (3, 5)))


def test_a_constant_row_inside_the_model_is_expanded():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("grid", torch.randn(1, 5, 4))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.layer(self.get_buffer("grid"))

    check(Model(), lambda m, x: m(x).square().sum((1, 2)), torch.randn(3, 5, 4))
