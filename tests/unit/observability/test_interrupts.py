"""Ctrl-C waits for the end of what must not be cut in two."""

import os
import signal
import threading

import pytest

from trimtab.observability.interrupts import hold_interrupts


def test_an_interrupt_is_held_until_the_block_ends_and_then_raised():
    reached_the_end = False
    with pytest.raises(KeyboardInterrupt):
        with hold_interrupts():
            os.kill(os.getpid(), signal.SIGINT)
            reached_the_end = True
        raise AssertionError("the interrupt was lost")
    assert reached_the_end
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_without_an_interrupt_nothing_happens():
    with hold_interrupts():
        pass
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_threads_are_left_alone():
    failures: list[BaseException] = []

    def run() -> None:
        try:
            with hold_interrupts():
                pass
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(timeout=10)
    assert not failures
