"""The two ways in which `gspo` gives up, and the two after which it tries again; everything else is a bug and propagates."""


class InputError(Exception):
    """The user's input cannot be used: exit code 2, before a model is loaded.

    The message says what was wrong, where (file, key, row) and what to do about it.
    """


class RunError(Exception):
    """A run that had started cannot go on: exit code 1, with the evidence in the message."""


class OutOfMemoryError(RunError):
    """A pass did not fit into memory; nothing has changed by it, so that it can be tried in smaller pieces."""


class DivergedError(RunError):
    """The weights have come to numbers that are not finite, or to a policy that cannot move: the guard may put them back."""
