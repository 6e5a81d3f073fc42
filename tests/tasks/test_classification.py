"""Which classes an episode is made of."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from metanudge.tasks import MNIST1D, Labelled


def rows_as_inputs(classes: int, **options) -> Labelled:
    """Row r belongs to class r % classes and its input is r, so that an input tells its class."""
    return Labelled(
        np.arange(10 * classes),
        np.arange(10 * classes) % classes,
        **({"ways": 4, "shots": 2, "queries": 3} | options),
    )


@pytest.mark.parametrize("classes", [40, 400], ids=["shuffled", "by Floyd's algorithm"])
@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_episode_classes_are_those_of_the_examples(classes, split):
    source = rows_as_inputs(classes)
    indices = [7, 0, 7, 1000]
    names = source.episode_classes(indices, split)
    for task, own in zip(source.batch(indices, split), names, strict=True):
        for inputs, labels in (task.support, task.query):
            assert [own[label] for label in labels.tolist()] == [
                str(int(row) % classes) for row in inputs.flatten()
            ]
        assert set(own) <= set(source.classes(split))
    assert names[0] == names[2] != names[1]


def test_episode_rows_are_the_examples():
    source = rows_as_inputs(40)
    rows = source.episode_rows([3, 1000], "test")
    for task, own in zip(source.batch([3, 1000], "test"), rows, strict=True):
        assert own[:, :2].flatten().tolist() == task.support[0].flatten().tolist()
        assert own[:, 2:].flatten().tolist() == task.query[0].flatten().tolist()


def test_episode_classes_do_not_depend_on_the_device_or_the_other_episodes():
    source = MNIST1D(num_samples=1000, ways=3, cache=False)
    together = source.episode_classes(range(20), "test")
    assert [source.episode_classes([i], "test")[0] for i in range(20)] == together
    assert source.to("meta").episode_classes(torch.arange(20), "test") == together


def test_episode_classes_refuses_what_batch_refuses():
    source = rows_as_inputs(4, splits=(1.0, 0.0, 0.0))
    for ask in (source.batch, source.episode_classes):
        with pytest.raises(ValueError, match="There is no episode -1"):
            ask([-1])
        with pytest.raises(ValueError, match="There is no split 'validation'"):
            ask([0], "validation")
        with pytest.raises(ValueError, match=r"Split 'test' .* has 0 classes, but ways=4"):
            ask([0], "test")
