"""Settings of the whole suite."""

import importlib.util
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

import perturbation

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # tests fetch nothing
# Triton comes with torch for CUDA; elsewhere the modules with its kernels cannot even be imported.
NAMES = (
    "step",
    "head",
    "trunk/cuda",
    "trunk/kernels",
    "trunk/launches",
    "trunk/first_kernels",
    "trunk/tail",
    "trunk/tail_kernels",
)
TRITON = [f"src/metanudge/accel/{name}.py" for name in NAMES]
TRITON.append("src/metanudge/engines/packed_kernels.py")
collect_ignore = [] if importlib.util.find_spec("triton") else TRITON

ROOT = Path(__file__).parent
# Where results are compared to tolerances of rounding: these must hold for every CPU's arithmetic
# (`make test-numerics`).
NUMERICAL = [
    ROOT / "tests" / name
    for name in (
        *("accel", "bilevel", "engines", "estimators", "proximal", "solvers"),
        *(
            "test_conformance.py",
            "test_gradcheck.py",
            "test_learner.py",
            "test_models.py",
            "test_optim.py",
            "test_shared.py",
        ),
        *("test_tuning.py", "training/test_auto_nu.py", "training/test_stiffness.py"),
    )
] + [
    ROOT / "lab" / "tests" / "experiments" / name
    for name in ("test_theory.py", "test_quadratics.py")
]
assert all(place.exists() for place in NUMERICAL), NUMERICAL
# These count bytes and imports.
NOT_NUMERICAL = ("test_memory.py", "test_reverse_memory.py", "test_offers.py")
# What takes long and guards what seldom changes, or repeats at a larger size what others try small:
# left to `make test-all`.
THOROUGH = (
    *(
        f"test_tutorials.py::test_it_says_what_is_recorded[{name}]"
        for name in ("schools", "intents", "learned_rates", "shards", "serving")
    ),
    "test_browser.py::test_the_page_of_the_repository",
    "test_contract.py::test_a_part_of_the_cells_can_be_shown[ablation]",
    "test_contract.py::test_a_part_of_the_cells_can_be_shown[omniglot-long]",
    "test_contract.py::test_it_measures_draws_and_judges[longer]",
    "test_contract.py::test_it_measures_draws_and_judges[transformer]",
    "test_ablation.py::test_equal_cost_is_as_many_gradients",
    "test_contract.py::test_it_measures_draws_and_judges[along-training]",
    "test_adapt.py::test_pictures_of_unseen_characters",
    "test_interrupts.py::test_at_every_line[vmap-signal]",
    "test_site.py::test_every_link",
    "test_site.py::test_no_page",
    "test_planning.py::test_the_command",
    "test_planning.py::test_what_is_planned_is_what_is_allocated[transformer",
    "test_packed.py::test_no_farther_from_float64_than_float32_is[dtype1",
    "test_shards.py::test_every_estimator_equals_one_process[4]",
    "test_shards.py::test_tensor_parallel",
    "test_sharded.py::test_torchrun_goes_on",
    "test_sharded.py::test_four_ranks",
    "test_sharded_runs.py::test_from_four_ranks",
    "test_sharded_runs.py::test_torchrun_goes_on",
    "test_distributed.py::test_torchrun_restarts",
    "test_distributed.py::test_one_two_and_four_ranks_agree",
    "test_stopping.py::test_two_ranks_leave",
    "test_shards.py::test_every_estimator_equals_one_process[2x2]",
    "test_offers.py::test_without_the_folder",
    "test_reverse_memory.py::test_points_are_of",
    "test_reverse_memory.py::test_products_take_a_double_backward_and_three_copies[16",
    "test_reverse_memory.py::test_differences_take_a_training_step_and_three_copies[16",
    "test_interrupts.py::test_at_every_line[vmap-exception]",
    "test_interrupts.py::test_at_every_line[in place-exception]",
    "test_interrupts.py::test_at_every_line[chain-exception]",
    "hf/test_adapters.py::test_an_adapted_copy_holds_no_more_than_its_adapters[Llama]",
    "hf/test_adapters.py::test_an_adapted_copy_holds_no_more_than_its_adapters[T5]",
    "hf/test_adapters.py::test_many_users_from_one_base[T5]",
    "test_tuning.py::test_the_error_is_at_most_twice_the_best_of_a_grid[relu",
    "lab/tests/experiments/test_contract.py::test_it_measures_draws_and_judges[convergence]",
    "lab/tests/experiments/test_contract.py::test_it_measures_draws_and_judges[bias-rates]",
    "lab/tests/bench/test_run.py::test_measuring_needs",
    "test_reverse.py::test_steps_walked_back_are_the_unrolled_gradient[20-",
    "test_rates.py::test_all_at_once_on_every_network[5-",
    "test_rates.py::test_all_at_once_on_every_network[20-",
    "test_reverse_optimizers.py::test_optimizers_walked_back[Adam-20-",
    "test_reverse_optimizers.py::test_optimizers_walked_back[momentum-20-",
    "test_tutorials.py::test_it_says_what_is_recorded[own_images]",
    "test_tutorials.py::test_it_says_what_is_recorded[penalties]",
    "test_tutorials.py::test_it_says_what_is_recorded[gradient_quality]",
    "test_memory.py::test_steps_and_tasks_do_not_matter",
    "test_use.py::test_unseen_characters",
    "test_heads.py::test_unseen_characters",
    "lab/tests/experiments/test_shuffles.py",
    "lab/tests/experiments/test_transformer.py::test_a_broken_off_cell",
    "lab/tests/experiments/test_contract.py::test_it_measures_draws_and_judges[ablation]",
    "lab/tests/experiments/test_contract.py::test_it_measures_draws_and_judges[omniglot",
    "lab/tests/experiments/test_contract.py::test_it_measures_draws_and_judges[complexity]",
    "lab/tests/experiments/test_contract.py::test_measuring_needs_torch_and_numpy_only",
    "lab/tests/bench/test_scaling.py",
    "lab/tests/bench/test_rounding.py",
    "lab/tests/bench/test_run.py::test_a_fresh_process",
    "lab/tests/test_examples.py::test_hyper_cleaning",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--perturb", type=int, metavar="SEED", help="change every θ that the tests draw by an ulp"
    )
    # The tests' tensors are tiny: one thread is faster than handing work over, much faster where
    # cores are shared.
    parser.addoption("--threads", type=int, default=1, help="torch's threads in each test process")


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(config.getoption("threads"))
    # A shell starts background jobs deaf to Ctrl-C, and so are their children; the tests send it.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if (seed := config.getoption("perturb")) is not None:
        perturbation.start(seed)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.name not in NOT_NUMERICAL and any(
            item.path.is_relative_to(place) for place in NUMERICAL
        ):
            item.add_marker(pytest.mark.numerical)
        if any(part in item.nodeid for part in THOROUGH):
            item.add_marker(pytest.mark.thorough)


def pytest_report_header(config: pytest.Config) -> str:
    seed = config.getoption("perturb")
    change = "" if seed is None else f", θ changed by an ulp (seed {seed})"
    return (
        f"arithmetic: {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()}"
        f" threads{change}"
    )


@pytest.fixture(autouse=True)
def seeded_examples(request: pytest.FixtureRequest) -> None:
    """Examples in docstrings draw weights without a word about seeds: here the same ones always."""
    if isinstance(request.node, pytest.DoctestItem):
        torch.manual_seed(0)


@pytest.fixture
def script() -> Callable[[Path], ModuleType]:
    """How a script is imported that lies outside every package."""

    def load(path: Path) -> ModuleType:
        spec = importlib.util.spec_from_file_location(f"script_{path.stem}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses look their module up
        spec.loader.exec_module(module)
        return module

    return load
