"""Tests and commands of a service made by an older release import Samefold under former names; here they find what these became."""

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType

FORMER = {
    "infra.cli": "tools.cli",
    "infra.domain_model": "domain.engine",
    "infra.terminal": "tools.terminal",
    "infra.testing": "tools.testing",
}


class Former(MetaPathFinder, Loader):
    """Imports what a module that moved holds."""

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        former = ".".join(name.split(".")[:2])
        return spec_from_loader(name, self, is_package=name == former) if former in FORMER else None

    def exec_module(self, module: ModuleType) -> None:
        former = ".".join(module.__name__.split(".")[:2])
        moved = import_module(FORMER[former] + module.__name__.removeprefix(former))
        vars(module).update({name: value for name, value in vars(moved).items() if not name.startswith("__")})


# first: folders that an update emptied still hold __pycache__, and Python would take them for packages
sys.meta_path.insert(0, Former())
