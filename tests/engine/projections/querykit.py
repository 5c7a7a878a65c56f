"""Queries for a test, written as their authors write them: the text of a module, over given views."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from textwrap import dedent

from projections.engine.queries.query import Query, query_of
from projections.engine.views.view import View

HEAD = '''"""Which question?"""

from __future__ import annotations
from collections import namedtuple
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from typing import NamedTuple
from uuid import UUID
from projections.engine import Key, Sum
'''
_numbers = count(1)


def query(folder: Path, source: str, views: Mapping[str, View], name: str = "asked") -> Query:
    """The query that this text would declare as `projections/queries/<name>.py`. Raises BadQuery."""
    file = folder / f"{name}{next(_numbers)}.py"
    file.write_text(HEAD + dedent(source))
    spec = importlib.util.spec_from_file_location(f"{file.stem}.{name}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # where annotations are looked up
    spec.loader.exec_module(module)
    return query_of(module, views)
