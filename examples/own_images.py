"""Your own images, one sub-folder per class: a learner for new classes, against the nearest pixels.

python examples/own_images.py [PICTURE] [FOLDER]     # draws a folder where none is given
"""

import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from PIL import Image, ImageDraw

import metanudge as mn


def draw(folder: Path) -> Path:
    rng = np.random.default_rng(0)
    for scribble in range(36):
        (place := folder / f"scribble{scribble:02d}").mkdir()
        corners = rng.uniform(4, 24, size=(5, 2))
        for number in range(12):
            image = Image.new("L", (28, 28), 255)
            points = corners + rng.normal(0, 1, size=(5, 2)) + rng.uniform(-3, 3, size=2)
            ImageDraw.Draw(image).line([tuple(point) for point in points], fill=0, width=2)
            image.save(place / f"{number}.png")
    return folder


def nearest_mean(task: mn.Task) -> float:
    (x, y), (queries, answers) = task.support, task.query
    means = torch.stack([x[y == c].mean(0).flatten() for c in range(5)])
    return float((torch.cdist(queries.flatten(1), means).argmin(1) == answers).float().mean())


folder = Path(sys.argv[2]) if len(sys.argv) > 2 else draw(Path(tempfile.mkdtemp()))
source = mn.tasks.Labelled.from_folder(folder, image_size=28, grey=True, ways=5, queries=5)
torch.manual_seed(0)
conv4 = mn.models.Conv4(ways=5, channels=16)
learner = mn.MetaLearner(conv4, torch.nn.functional.cross_entropy, lam=2.0)
optimizer = torch.optim.Adam(learner.parameters(), lr=1e-2)
for tasks in source.batches(size=4, count=30):
    optimizer.zero_grad()
    learner.backward(tasks, metrics=False)
    optimizer.step()
test = source.batch(range(40), "test")  # of classes that no training task holds
print(f"nearest class mean of pixels  {sum(map(nearest_mean, test)) / len(test):.0%}")
print(f"metanudge                     {learner.evaluate(test).mean_accuracy:.0%}")
task = test[0]  # adapt gives an ordinary module for it
said = learner.adapt(task.support)(task.query[0]).argmax(1)
bare = {"xticks": (), "yticks": ()}
figure, axes = plt.subplots(2, 5, figsize=(6, 2.8), layout="constrained", subplot_kw=bare)
for c in range(5):
    axes[0, c].imshow(task.support[0][c, 0].numpy(), cmap="gray")
    axes[0, c].set_title(f"example of {c}", fontsize=8)
    axes[1, c].imshow(task.query[0][5 * c, 0].numpy(), cmap="gray")
    axes[1, c].set_title(f"a {c}, taken for {said[5 * c]}", fontsize=8)
figure.savefig(sys.argv[1] if len(sys.argv) > 1 else "own_images.png")
