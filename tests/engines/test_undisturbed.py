from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from types import FrameType

import pytest

from metanudge.engines import undisturbed as module
from metanudge.engines.undisturbed import obey, restored, uninterrupted


class Told(Exception):
    """What the handlers here raise."""


def tell(number: int, frame: FrameType | None) -> None:
    raise Told(number)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {
        number: signal.signal(number, tell)
        for number in (signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1)
    }
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_signal_waits_for_the_end() -> None:
    went_on: list[bool] = []

    def work() -> None:
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            went_on.append(True)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert went_on
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1])
def test_whatever_its_number(number: signal.Signals) -> None:
    def work() -> None:
        with uninterrupted():
            signal.raise_signal(number)

    with pytest.raises(Told) as told:
        work()
    assert told.value.args == (number,)
    assert signal.getsignal(number) is tell


def test_a_signal_that_waits_is_obeyed_where_it_is_safe() -> None:
    def work() -> None:
        with uninterrupted(), uninterrupted():
            obey()
            signal.raise_signal(signal.SIGTERM)
            try:
                obey()
            except Exception:
                pytest.fail("an interrupt was taken for an error of the model's")
            pytest.fail("went on")

    with pytest.raises(Told):
        work()


def test_the_end_of_an_inner_block_is_not_the_end() -> None:
    ended: list[bool] = []

    def work() -> None:
        with uninterrupted():
            with uninterrupted():
                signal.raise_signal(signal.SIGTERM)
            ended.append(True)

    with pytest.raises(Told):
        work()
    assert ended


def test_handlers_that_do_not_raise_are_called_once_each_in_order() -> None:
    calls: list[int] = []
    for number in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, lambda number, frame: calls.append(number))
    with uninterrupted():
        for number in (signal.SIGALRM, signal.SIGTERM, signal.SIGALRM):
            signal.raise_signal(number)
        assert calls == []
        obey()
        assert calls == [signal.SIGALRM]
    assert calls == [signal.SIGALRM, signal.SIGTERM, signal.SIGALRM]


def test_all_that_wait_are_handed_over_when_the_first_raises() -> None:
    calls: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: calls.append(number))

    def work() -> None:
        with uninterrupted():
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGUSR1)

    with pytest.raises(Told):
        work()
    assert calls == [signal.SIGUSR1]


def test_a_handler_set_inside_stays() -> None:
    def other(number: int, frame: FrameType | None) -> None: ...

    with uninterrupted():
        signal.signal(signal.SIGTERM, other)
    assert signal.getsignal(signal.SIGTERM) is other


def test_an_error_inside_passes_and_so_does_the_signal() -> None:
    def work() -> None:
        with uninterrupted():
            signal.raise_signal(signal.SIGTERM)
            raise ValueError("of the model's")

    with pytest.raises(Told) as told:
        work()
    assert isinstance(told.value.__context__, ValueError)


def test_an_evaluation_that_hangs_can_be_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])

    def work() -> None:
        with uninterrupted():
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
            now[0] = module.PATIENCE + 1
            module._waiting.pop()  # so that nothing is left for the end
            with pytest.raises(Told):
                signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Told):
        work()


def test_other_threads_leave_the_handlers_alone() -> None:
    seen: list[object] = []

    def work() -> None:
        with uninterrupted():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [tell]


def test_what_is_restored_is_restored_although_it_was_cut_short() -> None:
    done: list[str] = []

    def restore() -> None:
        if not done:
            done.append("half")
            raise Told
        done.append("whole")

    with pytest.raises(Told), restored(restore):
        pass
    assert done == ["half", "whole"]
