"""Where to draw the line: what every cut would take and give, measured on a few samples, and the best one."""

from frostline.cut.costs import Budgets as Budgets
from frostline.cut.costs import CutPlan as CutPlan
from frostline.cut.costs import Option as Option
from frostline.cut.costs import StageCost as StageCost
from frostline.cut.costs import StepCost as StepCost
from frostline.cut.planner import plan as plan
from frostline.cut.steps import step_cost as step_cost
