"""Waiting for another process or thread, always with a time limit."""

import time


def wait_until(condition, seconds=60.0):
    """Wait until `condition()` is true; return its value.

    Raises:
        TimeoutError: It was still false after `seconds`. In a thread this fails the test too,
            because pytest turns an error of a thread into a warning, and warnings are errors.
    """
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"still waiting after {seconds:g} s")
        time.sleep(0.01)
    return value
