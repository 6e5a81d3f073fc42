"""The code in the README runs as it stands."""

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_python_blocks_run_in_order(capsys):
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(blocks) >= 2
    names = {}
    for block in blocks:
        exec(compile(block, str(README), "exec"), names)
    assert names["stats"].support_gradients == 10
    assert "against the implicit gradient" in capsys.readouterr().out
    assert all(p.grad is not None for p in names["learner"].parameters())


def test_first_screen_names_both_commands_and_the_code():
    first_screen = "\n".join(README.read_text(encoding="utf-8").splitlines()[:40])
    for needed in ("make run", "make test", "learner.backward(tasks)", "learner.adapt("):
        assert needed in first_screen
