"""The rounds of sites that train together, as coroutines without I/O. docs/islands.md is their text.

A coordinator names which updates make up a round; a gateway of each site makes its site's update, fetches the others' and has its site go
on with what they add up to. They see the world through the same `Clock`, `Transport` and journal as the swarm, and their site through
`SiteTraining`.
"""

from atoll.control.rounds.coordinator import RoundCoordinator
from atoll.control.rounds.gateway import Gateway
from atoll.control.rounds.messages import RoundSettings, RoundTerms
from atoll.control.rounds.site import GatewayReplacedError, SiteTraining

__all__ = ["Gateway", "GatewayReplacedError", "RoundCoordinator", "RoundSettings", "RoundTerms", "SiteTraining"]
