"""What stands before a worker's lines, as plain text."""

from __future__ import annotations

from dlaunch.environ import Place


def torchrun_prefix(place: Place, template: str | None) -> str:
    """``[<role><local_rank>]:``, or the user's template with ``${role_name} ${local_rank} ${rank}`` filled in.

    Source: torch 2.13 ``torch/distributed/elastic/multiprocessing/tail_log.py`` and ``launcher/api.py``.
    """
    if template is None:
        return f"[{place.role}{place.local_rank}]:"
    from string import Template  # noqa: PLC0415  -- costs 10 ms at start-up, and few need it

    return Template(template).safe_substitute(role_name=place.role, local_rank=place.local_rank, rank=place.rank)


def console_prefix(place: Place, template: str | None, *, tee: bool) -> str:
    """The template where there is one, torchrun's prefix for a tee'd stream, else ``<node>:<rank> ``.

    A job of one worker has no prefix of its own: there is nothing to tell apart.
    """
    if tee or template is not None:
        return torchrun_prefix(place, template)
    return f"{place.group_rank}:{place.rank} " if place.world_size > 1 else ""
