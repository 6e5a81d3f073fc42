"""Using a trained learner: a few examples per class in, labels with probabilities out (a few rows
of a given task in, predictions out), and the adapted model to take away.

    from metanudge.training.use import adapt
    classifier = adapt("runs/omniglot", "support/")             # one sub-folder per class
    for found in classifier.predict("unknown/"):
        print(found.file, found.label, found.probability)
    classifier.export("model/")                                 # state_dict, classes, torch.export

Models with BatchNorm are used inductively: after adaptation every BatchNorm layer keeps the
statistics of the support set, so what is said about a file does not depend on the other files.
"""

from metanudge.training.use.adaptation import adapt
from metanudge.training.use.classifier import Classifier, Prediction, write_predictions
from metanudge.training.use.files import check_new_file, check_new_folder, new_file
from metanudge.training.use.preprocessing import Preprocessing
from metanudge.training.use.regressor import Estimate, Regressor, write_estimates

__all__ = [
    "Classifier",
    "Estimate",
    "Prediction",
    "Preprocessing",
    "Regressor",
    "adapt",
    "check_new_file",
    "check_new_folder",
    "new_file",
    "write_estimates",
    "write_predictions",
]
