"""Packages by rule; all else is in setup.cfg, whose `find:` knows one folder only.

The top-level folders `envs`, `runners` and so on are parts of the package `mafrt`, and `bench` and `tests` are not
installed.
"""

from setuptools import find_namespace_packages, setup

FOLDERS = ("envs", "runners", "scripts", "profiles", "configs")


def packages() -> list[str]:
    found = find_namespace_packages(include=["mafrt", "mafrt.*"], exclude=["mafrt.assets*", "*.source", "*.rubrics"])
    for folder in FOLDERS:
        inside = find_namespace_packages(folder, exclude=["*data", "*assets*", "recipes"])
        found += [f"mafrt.{folder}", *(f"mafrt.{folder}.{name}" for name in inside)]
    return sorted(found)


setup(packages=packages())
