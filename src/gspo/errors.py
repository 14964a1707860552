"""The two ways in which `gspo` gives up; everything else is a bug and propagates."""


class InputError(Exception):
    """The user's input cannot be used: exit code 2, before a model is loaded.

    The message says what was wrong, where (file, key, row) and what to do about it.
    """


class RunError(Exception):
    """A run that had started cannot go on: exit code 1, with the evidence in the message."""
