"""What goes wrong with tokens, in words that say which file and what to do."""


class TokenStoreError(ValueError):
    """A store cannot be read or written; the message names the file and what to do."""


class BadItemError(ValueError):
    """One item of a data set cannot be used.

    The reason goes into the manifest when such items are skipped, so it must not hold an address, a path
    or anything else that changes between two runs.
    """


class ForeignShardError(TokenStoreError):
    """A shard is whole, but belongs to another store or to another place in this one."""
