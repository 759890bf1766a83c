"""The value head, its learning on cached features, and its file."""

from __future__ import annotations

import pytest
import torch

from mafrt.core.errors import CheckpointError
from mafrt.models.value_head import ValueHead, load_critic, save_critic


def make(seed=0, width=16, hidden=8):
    torch.manual_seed(seed)
    return ValueHead(width, hidden)


def test_shapes_types_and_a_start_near_zero():
    head = make()
    features = 50 * torch.randn(3, 7, 16)
    values = head(features)
    assert values.shape == (3, 7) and values.dtype == torch.float32
    # The output row has norm .01 and tanh is at most 1 in 8 channels: |v| <= .01 * sqrt(8) = .0283
    assert values.abs().max() <= 0.0284 and values.abs().max() > 0
    assert head(features.bfloat16()).dtype == torch.float32
    assert head(features[0, 0]).shape == ()


def test_scale_of_the_hidden_states_does_not_matter():
    head = make()
    features = torch.randn(5, 16)
    torch.testing.assert_close(head(features), head(1000 * features), atol=1e-6, rtol=1e-3)


def test_it_learns_from_cached_features():
    """A linear function of 512 random features: a critic that cannot learn it stays at the targets' variance."""
    head = make()
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(512, 16, generator=generator)
    targets = features @ torch.randn(16, generator=generator) / 4 + 1
    optimizer = torch.optim.Adam(head.parameters(), lr=1e-2)
    for _ in range(200):
        loss = (head(features) - targets).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.2 * targets.var()


def test_a_saved_critic_comes_back_bit_for_bit(tmp_path):
    head, path = make(3), tmp_path / "critic.pth"
    save_critic(head, path)
    loaded = load_critic(path, hidden_size=16)
    assert (loaded.hidden_size, loaded.hidden) == (16, 8)
    for ours, theirs in zip(head.state_dict().values(), loaded.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)
    assert [p.name for p in tmp_path.iterdir()] == ["critic.pth"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "found no critic"),
        (b"", "no critic"),
        (b"garbage" * 100, "no critic"),
        ({"hidden_size": 16}, "no critic"),
        ({"hidden_size": 16, "hidden": 8, "state": {"x": torch.zeros(1)}}, "no critic"),
    ],
)
def test_files_that_are_no_critic_are_one_sentence(tmp_path, content, message):
    path = tmp_path / "critic.pth"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_critic(path)
    assert str(path) in str(caught.value) and "expected" in str(caught.value)


def test_a_truncated_file_and_a_pickle_of_code_are_refused(tmp_path):
    path = tmp_path / "critic.pth"
    save_critic(make(), path)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(CheckpointError):
        load_critic(path)
    torch.save(make(), path)  # a whole module: needs code to be run to be read
    with pytest.raises(CheckpointError, match="UnpicklingError"):
        load_critic(path)


def test_a_critic_for_another_base_is_refused(tmp_path):
    save_critic(make(), tmp_path / "critic.pth")
    with pytest.raises(CheckpointError, match="hidden states of 16, expected 32"):
        load_critic(tmp_path / "critic.pth", hidden_size=32)
