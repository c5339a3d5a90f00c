"""MXFP8 training for any torch model.

from mxfp8_recipe import apply_recipe
print(apply_recipe(model))
"""

from .api import Report, apply_recipe, revert
from .config import Recipe
from .plan import Plan
from .planner import plan_recipe
from .recipe_files import load_recipe, recipe_names

__all__ = ["Plan", "Recipe", "Report", "apply_recipe", "load_recipe", "plan_recipe", "recipe_names", "revert"]
