"""A study so small that a test can run it."""

from cswe.training.cells import Plan
from experiments.studies import Entry, Study

TINY = ("epochs=1", "batch_size=16", "points=6")


def study(name="small", pools=("mean", "swe"), wave=0, store="sets", **options):
    plan = Plan(pools, (2,), 2, layers=(6,), choices=TINY)
    return Study(name, "proteins", lambda chosen: [Entry(plan, wave, store)], **options)
