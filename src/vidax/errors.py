"""The one exception for what a user can put right."""


class UserError(ValueError):
    """A sentence for the user: the value, the rule it breaks and the way out. The command line prints it and exits with
    2.
    """
