"""Plans: which groups, schedule, wire and tier a model should have on a cluster, forecast before it is launched."""

from tf_fusedrec.schedules.planning.choice import Plan, plan
from tf_fusedrec.schedules.planning.cluster import Cluster
from tf_fusedrec.schedules.planning.forecast import Forecast

__all__ = ["Cluster", "Forecast", "Plan", "plan"]
