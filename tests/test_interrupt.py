import os
import signal
import time

import pytest

from slmgrpo.interrupt import Interrupted, Interrupts


def send(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(0.01)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_raises_with_its_exit_code(number: int, code: int) -> None:
    with Interrupts(), pytest.raises(Interrupted) as caught:
        send(number)
    assert caught.value.exit_code == code


def test_a_signal_waits_for_the_end_of_a_held_block() -> None:
    done = []
    with Interrupts() as interrupts, pytest.raises(Interrupted), interrupts.held():
        send(signal.SIGTERM)
        done.append("the rest of the block")
    assert done


def test_a_second_signal_does_not_wait() -> None:
    with Interrupts() as interrupts, pytest.raises(Interrupted), interrupts.held():
        send(signal.SIGINT)
        send(signal.SIGINT)
        pytest.fail("not reached")


def test_a_second_sigterm_waits_like_the_first() -> None:
    done = []
    with Interrupts() as interrupts, pytest.raises(Interrupted), interrupts.held():
        send(signal.SIGTERM)
        send(signal.SIGTERM)
        done.append("the rest of the block")
    assert done


def test_a_released_part_of_a_held_block_lets_signals_in() -> None:
    with Interrupts() as interrupts, interrupts.held():
        with pytest.raises(Interrupted), interrupts.released():
            send(signal.SIGTERM)
            pytest.fail("not reached")
        with interrupts.released():
            pass


def test_a_signal_that_waited_comes_when_the_block_is_released() -> None:
    with Interrupts() as interrupts, interrupts.held():
        send(signal.SIGTERM)
        with pytest.raises(Interrupted), interrupts.released():
            pytest.fail("not reached")


def test_a_block_held_after_a_signal_runs_to_its_end() -> None:
    with Interrupts() as interrupts:
        with pytest.raises(Interrupted):
            send(signal.SIGTERM)
        with interrupts.held():
            saved = True
    assert saved


def test_the_handlers_of_before_come_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Interrupts():
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before
