"""Frozen public models: each record by itself, in evaluation mode, with the weights named."""

import numpy as np
import pytest
import torch
from torch import nn

from sordino.errors import CoupledRecords, InvalidArgument, RecordCountMismatch, UnsupportedModule
from sordino.transfer import PublicInput, feature_extractor, file_sha256, module_digest


class Mapped(nn.Module):
    """A linear layer and what is done after it."""

    def __init__(self, after):
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.after = after

    def forward(self, x):
        return self.after(self.linear(x))


def small_net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.LazyLinear(5)
    )


def initialized(net, shape):
    net.eval()(torch.zeros(2, *shape))
    net[1].running_mean.normal_(generator=torch.Generator().manual_seed(1))
    return net.train()


def test_features_are_those_of_the_module_in_evaluation_mode_one_record_at_a_time():
    net = initialized(small_net(), (3, 8, 8))
    records = torch.linspace(-1, 1, 11 * 3 * 64).reshape(11, 3, 8, 8)
    found = feature_extractor(net)(records, batch_size=4)
    assert net.training
    assert net[1].training
    net.eval()
    alone = torch.cat([net(record[None]).detach() for record in records])
    torch.testing.assert_close(found, alone, rtol=1e-5, atol=1e-6)
    assert found.dtype == torch.float32
    assert not found.requires_grad


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_a_record_has_the_same_features_whatever_stands_beside_it(autocast):
    net = initialized(small_net(), (3, 8, 8))
    extract = feature_extractor(net, autocast=autocast)
    records = torch.linspace(-1, 1, 11 * 3 * 64).reshape(11, 3, 8, 8)
    whole = extract(records, batch_size=4)
    others = records.clone()
    others[1:] = torch.nan
    assert torch.equal(extract(others, batch_size=4)[0], whole[0])
    assert torch.equal(extract(records[:1], batch_size=4)[0], whole[0])
    assert torch.equal(extract(records[4:8], batch_size=4), whole[4:8])


@pytest.mark.parametrize(
    "after",
    [
        lambda h: h - h.mean(0),
        lambda h: h - 1e-3 * h.mean(0),
        lambda h: h / h.abs().max().clamp(min=100),
        lambda h: torch.dropout(h, 0.5, train=True),
        lambda h: h.flip(0),
        lambda h: h + torch.arange(len(h))[:, None],
        lambda h: torch.softmax(h, 0),
    ],
    ids=["centered", "a little centered", "a large one scales all", "dropout", "mixed up", "numbered", "softmax"],
)
def test_a_module_in_which_records_meet_is_refused(after):
    with pytest.raises(CoupledRecords):
        feature_extractor(Mapped(after))(torch.zeros(10, 4))


def test_a_module_that_remembers_other_batches_is_refused():
    seen = [0.0]

    def remember(h):
        seen[0] = 0.5 * seen[0] + float(h.detach().mean())
        return h + seen[0]

    with pytest.raises(CoupledRecords):
        feature_extractor(Mapped(remember))(torch.zeros(10, 4))


def test_batch_norm_by_the_statistics_of_the_batch_is_refused_by_name():
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, track_running_stats=False))
    with pytest.raises(UnsupportedModule, match=r"1 \(BatchNorm1d\)"):
        feature_extractor(net)(torch.zeros(10, 4))


def test_batch_norm_that_refuses_to_leave_train_mode_is_refused():
    class Stubborn(nn.BatchNorm1d):
        def train(self, mode=True):
            return super().train(True)

    with pytest.raises(UnsupportedModule, match="eval"):
        feature_extractor(nn.Sequential(nn.Linear(4, 3), Stubborn(3)))(torch.zeros(10, 4))


def test_an_inner_layer_gives_its_maps_averaged_over_places():
    net = initialized(small_net(), (3, 8, 8)).eval()
    records = torch.linspace(-1, 1, 5 * 3 * 64).reshape(5, 3, 8, 8)
    found = feature_extractor(net, "2")(records)
    torch.testing.assert_close(found, net[:3](records).detach().mean((2, 3)))


def test_tokens_and_masks_go_in_together():
    class Mean(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(20, 3)

        def forward(self, ids, mask):
            weights = mask.float()[:, :, None]
            return (self.table(ids) * weights).sum(1) / weights.sum(1).clamp(min=1)

    model = Mean()
    ids = np.array([[4, 5, 0], [6, 0, 0]])
    found = feature_extractor(model)(ids, ids != 0)
    expected = torch.stack([model.table.weight[[4, 5]].mean(0), model.table.weight[6]]).detach()
    torch.testing.assert_close(found, expected)


def test_an_output_that_is_no_row_a_record_is_refused():
    for model, records in (
        (Mapped(torch.sum), torch.zeros(3, 4)),
        (nn.Embedding(9, 2), torch.zeros(3, 7, dtype=torch.long)),
    ):
        with pytest.raises(UnsupportedModule, match="a row or a map"):
            feature_extractor(model)(records)


def test_no_records_have_features_of_the_right_width():
    assert feature_extractor(nn.Linear(4, 3))(torch.zeros(0, 4)).shape == (0, 3)


def test_inputs_of_different_lengths_and_unknown_layers_are_refused():
    with pytest.raises(RecordCountMismatch):
        feature_extractor(nn.Bilinear(2, 2, 3))(torch.zeros(4, 2), torch.zeros(5, 2))
    with pytest.raises(InvalidArgument, match="layer"):
        feature_extractor(nn.Linear(4, 3), "body")


def test_the_fingerprint_names_the_weights_and_a_changed_model_is_refused():
    model = nn.Linear(4, 3)
    twin = nn.Linear(4, 3)
    assert module_digest(model) != module_digest(twin)
    twin.load_state_dict(model.state_dict())
    extract = feature_extractor(model, source="the net of someone else")
    assert extract.public_input == PublicInput(name="the net of someone else", sha256=module_digest(twin))
    with torch.no_grad():
        model.weight[0, 0] += 1e-6
    with pytest.raises(InvalidArgument, match="frozen"):
        extract(torch.zeros(2, 4))


def test_a_file_with_another_hash_is_refused(tmp_path):
    file = tmp_path / "weights.bin"
    file.write_bytes(b"abc")
    # SHA-256 of "abc": FIPS 180-2, appendix B.1.
    known = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert file_sha256(file) == known
    assert PublicInput(name="weights", sha256=known).require(file) == file
    file.write_bytes(b"abd")
    with pytest.raises(InvalidArgument, match=r"weights \(SHA-256 ba7816bf8f01cfea…\)"):
        PublicInput(name="weights", sha256=known).require(file)
    with pytest.raises(InvalidArgument, match="64"):
        PublicInput(name="weights", sha256="abc")
