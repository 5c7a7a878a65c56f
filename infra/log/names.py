"""The names of consumer groups and transactional ids below a prefix, SAMEFOLD_GROUP_PREFIX. ACLs give rights to these names."""


def handlers(prefix: str) -> str:
    """What the names of handlers' groups begin with; `.` follows."""
    return f"{prefix}-handler"


def agents(prefix: str, agent: str) -> str:
    """What the names of an agent's groups begin with."""
    return f"{prefix}-{agent}-"


def publisher(prefix: str) -> str:
    """The publishers' group."""
    return f"{prefix}-publisher"


def transactions(prefix: str) -> str:
    """What the publishers' transactional ids begin with; a partition's number follows."""
    return f"{publisher(prefix)}-"


def readers(prefix: str) -> str:
    """The group of consumers that join none: librdkafka asks for its coordinator all the same."""
    return f"{prefix}-reader"
