"""The keys of a run: `/dlaunch/<run id>/...`, as docs/protocol.md lists them."""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import quote

_NUMBER = re.compile("[1-9][0-9]{0,9}")
_NODE_ID = re.compile("[0-9a-f]{12}-.+")


class Keys(NamedTuple):
    """All keys of one run."""

    root: str  # ends with a slash

    @classmethod
    def of(cls, prefix: str, run_id: str) -> Keys:
        """The keys of a run. The id is quoted, so that no run's keys start with another's."""
        return cls(f"{prefix.rstrip('/')}/{quote(run_id, safe='', errors='surrogateescape')}/")

    @property
    def spec(self) -> str:
        """The settings of the run."""
        return self.root + "spec"

    @property
    def round(self) -> str:
        """The only decision record."""
        return self.root + "round"

    @property
    def nodes(self) -> str:
        """What the keys of registered nodes start with; their order is the order of arrival."""
        return self.root + "nodes/"

    @property
    def away(self) -> str:
        """What the keys of hosts that were set aside start with."""
        return self.root + "away/"

    @property
    def stop(self) -> str:
        """A user's wish that the run ends."""
        return self.root + "control/stop"

    @property
    def every_report(self) -> str:
        """What all reports start with."""
        return self.root + "report/"

    @property
    def oldest_nodes(self) -> tuple[str, str]:
        """From where to where registrations stand, by arrival: what sorts before or after them is none of ours."""
        return self.nodes + "0", self.nodes + "g"

    def node(self, node_id: str) -> str:
        """A node's registration, on its lease."""
        return self.nodes + node_id

    def away_host(self, host: str) -> str:
        """A host that was set aside."""
        return self.away + quote(host, safe="")

    def assigns(self, nonce: str) -> str:
        """What the assignments of one proposal start with."""
        return f"{self.root}assign/{nonce}/"

    def assign(self, nonce: str, node_id: str) -> str:
        """A node's assignment in one proposal."""
        return self.assigns(nonce) + node_id

    def reports(self, number: int) -> str:
        """What the reports of a round start with."""
        return f"{self.every_report}{number}/"

    def node_of(self, key: str) -> str | None:
        """Whose registration a key is, if it is one."""
        node_id = key.removeprefix(self.nodes) if key.startswith(self.nodes) else ""
        return node_id if node_id and "/" not in node_id else None

    def assigned(self, key: str) -> tuple[str, str] | None:
        """The nonce and the node of an assignment's key, if it is one."""
        parts = key.removeprefix(self.root).split("/") if key.startswith(self.root) else []
        return (parts[1], parts[2]) if len(parts) == 3 and parts[0] == "assign" and all(parts) else None

    def reported(self, key: str) -> tuple[int, str, str] | None:
        """The round, the node and the kind of a report's key, if it is one."""
        parts = key.removeprefix(self.root).split("/") if key.startswith(self.root) else []
        if len(parts) != 4 or parts[0] != "report" or not all(parts) or not _NUMBER.fullmatch(parts[1]):
            return None
        return int(parts[1]), parts[2], parts[3]

    def report(self, number: int, node_id: str, kind: str) -> str:
        """One report on a node in a round; created once."""
        return f"{self.reports(number)}{node_id}/{kind}"


def is_node_id(text: str) -> bool:
    """Whether a text has the form of a node's id. What somebody else puts among the registrations has not."""
    return _NODE_ID.fullmatch(text) is not None


def new_node_id(arrival: int, fresh: str) -> str:
    """An id whose order is the order of arrival (a revision of the store), and that is never used twice."""
    return f"{arrival:012x}-{fresh}"
