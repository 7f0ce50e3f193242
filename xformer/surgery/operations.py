"""The type of an item in a recipe's list `surgery`.

Importing any module of this package imports all operations (see __init__.py), so they are all
registered here.
"""

from typing import TYPE_CHECKING, Annotated, Union

from pydantic import Field

from xformer.surgery.registry import OPERATIONS, Operation

if TYPE_CHECKING:
    AnyOperation = Operation
else:
    schemas = tuple(known.schema for known in OPERATIONS.values())
    # the key `op` selects the schema
    AnyOperation = Annotated[Union[schemas], Field(discriminator="op")]  # noqa: UP007
