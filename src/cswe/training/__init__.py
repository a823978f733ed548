"""From tokens to a trained model: recipes, the loop, checkpoints, scores."""

from cswe.training.checkpoint import load
from cswe.training.data import TrainingData
from cswe.training.errors import TrainingError, UserError
from cswe.training.evaluate import evaluate
from cswe.training.fit import fit
from cswe.training.model import Model
from cswe.training.neighbors import nearest
from cswe.training.recipe import Recipe
from cswe.training.recipes import SPACES, recipe

__all__ = [
    "SPACES",
    "Model",
    "Recipe",
    "TrainingData",
    "TrainingError",
    "UserError",
    "evaluate",
    "fit",
    "load",
    "nearest",
    "recipe",
]
