"""Finds out why the memory of a server is not judged."""

from sm121.run.run import Run


def reason(run: Run) -> str:
    """Return why the server's memory is not judged.

    For an attached server, also record that its memory could not be checked.

    Args:
        run: The run.
    """
    life = run.servers.attached_life
    why = life.no_memory if life is not None else None
    if why is None:
        return "no process of the server could be inspected"
    run.record.unproven(why)
    return why
