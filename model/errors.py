"""The error a user can act on."""


class UserError(ValueError):
    """Bad input: the message is one line that names the file, field or value and what to do.

    The command line prints it without a traceback; libraries may catch it as a ValueError.
    """
