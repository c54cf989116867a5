"""A stand-in for a terminal that keeps what a command wrote to it."""

import io


class Terminal(io.StringIO):
    """A stream that claims to be a terminal. If `error` is given, every write raises it."""

    def __init__(self, error=None):
        super().__init__()
        self.error = error

    def isatty(self):
        return True

    def write(self, text):
        if self.error is not None:
            raise self.error
        return super().write(text)
