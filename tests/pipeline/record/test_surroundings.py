"""What a recording changes around a module, and changes back."""

from types import SimpleNamespace

from torch import nn

from neuronx_dist.pipeline.record.surroundings import without_cache


def test_a_config_of_two_recordings_has_no_cache_until_both_have_ended():
    config = SimpleNamespace(use_cache=True)
    first, second = nn.Linear(1, 1), nn.Linear(1, 1)
    first.config = second.config = config
    one, other = without_cache(first), without_cache(second)
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    assert config.use_cache is False
    other.__exit__(None, None, None)
    assert config.use_cache is True


def test_a_cache_that_is_off_stays_off():
    model = nn.Linear(1, 1)
    model.config = SimpleNamespace(use_cache=False)
    with without_cache(model):
        assert model.config.use_cache is False
    assert model.config.use_cache is False
